"""What a cell is told and what it tells. Plain frozen data; holds no behaviour.

Bulk data never travels in these: weights and gradients are named by their location, KV by its session.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gyre_core import Contribution, EngineLoad, MicroBatch, Role, SamplingParams, StepResult, WeightSource

from gyre_rl.procs.wire import Fault


@dataclass(frozen=True, slots=True)
class KVSettings:
    """How KV is moved: `transport` by name or "auto"; `digest` of blocks that is compared, "" for none; `finite`: no
    NaN is taken."""

    transport: str = "auto"
    digest: str = ""
    finite: bool = False


@dataclass(frozen=True, slots=True)
class CellBody:
    """A cell's configuration, in `ChildSpec.body`."""

    role: Role
    core: bool
    source: WeightSource
    engine: str
    trainer: str
    engine_options: dict[str, Any] = field(default_factory=dict)
    trainer_options: dict[str, Any] = field(default_factory=dict)
    restore: str | None = None
    """Core: checkpoint folder to go on from."""
    weights: str = ""
    """Core: where it publishes versions."""
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    accelerators: int = 0
    base_dir: str = "."
    kv: KVSettings = KVSettings()
    replays_experts: bool = False
    """The run records routed experts; its trainer must replay them."""
    load_every_s: float = 0.25
    """How often a rollout cell reports its load."""


@dataclass(frozen=True, slots=True)
class CellReady:
    """A cell can work. `kv_endpoint` is where other cells fetch KV from; empty if it cannot give any. It is one for
    blocks read in place, or the cell's own address where engines hand over themselves."""

    role: Role
    version: int
    slots: int
    kv_tokens: int
    kv_endpoint: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CallBody:
    """A call to the engine; `prompt` holds int32 token ids, little-endian."""

    request_id: str
    session: str
    prompt: bytes
    sampling: SamplingParams
    routed_experts: bool = False
    routed_from: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkBody:
    """Part of an answer, or the error that ended it."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: str | None = None
    cached_tokens: int | None = None
    routed: bytes | None = None
    routed_shape: tuple[int, ...] = ()
    routed_from: int | None = None
    error: Fault | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new calls (`on`), or take them again."""

    on: bool


@dataclass(frozen=True, slots=True)
class SwitchTo:
    """Change to `role` with the weights of `source`."""

    role: Role
    source: WeightSource


@dataclass(frozen=True, slots=True)
class Sync:
    """Sample with the weights of `source` from now on."""

    source: WeightSource


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds that it took."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LeaveSession:
    """`session` goes elsewhere without its KV: end its running call at a token border."""

    session: str


@dataclass(frozen=True, slots=True)
class PullSession:
    """Fetch the KV of `session` from another cell and own it."""

    session: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class ExportSession:
    """Another cell asks this one's engine to hold the KV of `session` for its own; see `KVHandover.kv_export`."""

    session: str
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """`gyre_core.ExportedKV` as it travels, `token_ids` int32 little-endian; version -1: the engine has none."""

    session: str
    version: int
    token_ids: bytes = b""
    ticket: bytes = b""
    running: bool = False


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull did; `why` says why nothing was carried."""

    carried: bool
    bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    pause_seconds: float = 0.0
    transport: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """Compute the batches under the weights of `source` and put the sum at rest in `folder`."""

    lease: int
    step: int
    source: WeightSource
    folder: str
    batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Commit what is done of `lease` and leave the rest."""

    lease: int


@dataclass(frozen=True, slots=True)
class LeaseDone:
    """Event: the contribution of a lease is at rest; None if the lease failed (`why`) or had nothing done."""

    lease: int
    contribution: Contribution | None
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AddContribution:
    """Core: add it to the step's sum."""

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class Added:
    """Core: the contributions in the step's sum that hold batches of the one that was to be added. That one, or, when
    the word of it was lost and its batches were leased again, what counted them before.
    """

    counted: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Core: divide the sum by `divisor`, step, publish under `weights`, and save to `checkpoint` if given."""

    step: int
    divisor: float
    weights: str
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class Applied:
    """What the step did and where the new weights are."""

    result: StepResult
    source: WeightSource
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """Event: an engine's load."""

    load: EngineLoad
    pid_rss: int = 0
    """Resident bytes of the cell's process."""


@dataclass(frozen=True, slots=True)
class Failing:
    """The cell's engine is of no use any more and the cell ends."""

    why: str
