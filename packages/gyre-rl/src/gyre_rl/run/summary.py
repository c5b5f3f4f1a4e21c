"""What a run comes to: the figures that `gyre run --json` prints, and nothing that the log does not show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Scores are means over held-out tasks; counters are over all lives of the run."""

    run_dir: str
    status: str
    """"finished", or "stopped" (resumable)."""
    score_before: float | None
    score_after: float | None
    steps: int
    """Optimizer steps applied."""
    role_switches: int
    satellite_joins: int
    """Satellites that began to work in a step that was already running."""
    sessions_rerouted: int
    """Sessions that went on at another cell."""
    kv_moved_sessions: int
    """Those of them whose KV went along."""
    branches: int
    """Paths beyond the first, over all trajectory trees."""
    partial_scores: int
    """Cut executions that earned something."""
    lost_calls: int
    """Answered calls that are not in the store."""
    wall_s: float
