"""What a simulated run took and did, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Lane", "SimResult"]


@dataclass(frozen=True, slots=True)
class Lane:
    """``cell`` was in ``state`` from ``start`` to ``end`` (seconds)."""

    cell: str
    state: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class SimResult:
    """What a run took and did. ``idle_share``: cell time in which a cell neither sampled nor trained."""

    seconds: float
    step_ends: tuple[float, ...]
    idle_share: float
    sampling_share: float
    training_share: float
    switches: int
    moves: int
    moves_carried: int
    staleness: tuple[int, ...]
    """How many groups trained at staleness 0, 1, 2 …, counted from the oldest version they may contain."""
    cut: int
    executions: int
    skipped_cell_s: float
    """Least cell time of the work that cuts left undone: to be taken off a bound for all work."""
    events: int
    """Simulated events, internal ones included."""
    lost_cells: int = 0
    """Lives of cells that ended during the run."""
    computed_again: int = 0
    """Micro-batches whose gradient died with a core and was computed again."""
    lanes: tuple[Lane, ...] = field(repr=False, default=())

    @property
    def hours(self) -> float:
        """``seconds`` in hours."""
        return self.seconds / 3600.0
