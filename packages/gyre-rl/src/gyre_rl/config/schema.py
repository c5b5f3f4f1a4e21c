"""What a run can be told: the sections of its TOML file as frozen dataclasses.

Invariant: every field here is read by some part of the ring, has its unit in its docstring and a default that works;
the reference page is generated from these docstrings. A section that chooses a plugin is a `PluginChoice`: the key
`name` picks the plugin and every other key is one of that plugin's own options. No reading of files, no defaults that
depend on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from gyre_core.execution import Limits
from gyre_core.registration import Kind
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class PluginChoice:
    """Which plugin, and its options.

    `options` is an instance of the dataclass that the plugin registered for them, or None when it takes none.
    """

    name: str
    options: Any = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The policy that is trained."""

    path: str
    """Folder with config.json, safetensors and tokenizer in Hugging Face form."""
    tokenizer: str | None = None
    """Folder of the tokenizer; the model's folder when absent."""
    shape: str | None = None
    """config.json that `gyre check` estimates memory from where the model's folder is not at hand."""
    family: str | None = None
    """Name of the chat format (renderer); found from the model's config when absent."""
    routed_experts: bool = False
    """Mixture-of-experts models: engines record which experts each token went through, and the trainer, where it can,
    replays them (`deepspeed` without `recompute`)."""


@dataclass(frozen=True, slots=True)
class CellsConfig:
    """The cells of the run. One of them is the core cell."""

    count: Positive = 2
    """All cells, the core cell among them."""
    train: Positive = 1
    """Cells that begin as TRAIN, the core cell among them. The policy `static` keeps this split."""
    threads: Positive = 1
    """CPU threads that one cell computes with."""
    device: str = "cpu"
    """Device of engine and trainer: "cpu" or "cuda"."""
    accelerators: Count = 0
    """Accelerators that one cell owns; 0 on CPU."""
    accelerator_gib: Annotated[float, Meta(gt=0)] = 80.0
    """Memory of one accelerator in GiB, for the estimate of `gyre check`."""
    start_s: Seconds = 120.0
    """Seconds that a cell may take from its start until it is ready."""
    switch_s: Seconds = 120.0
    """Seconds that a change of role, or loading new weights, may take before it counts as failed. A cell that begins as
    TRAIN starts its engine at its first change."""
    restarts: Count = 2
    """How often one lost cell is started again, as a new incarnation, before the run goes on without it."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """What one step samples."""

    tasks_per_step: Positive = 8
    """Tasks (groups) in one step."""
    group_size: Positive = 8
    """Executions of each task inside one step."""
    split: str = "train"
    """Split of the task set that training draws from."""
    shuffle: bool = True
    """Draw tasks in an order given by the seed, anew each time all were drawn; else in the set's own order."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Sampling temperature of training executions, whatever their agents ask for."""
    top_p: Share = 1.0
    """Nucleus of training executions. Below 1 the sampling differs from the policy that is trained."""
    max_staleness: Count = 1
    """Policy versions that a sampled token may be behind the trainer. 0 is strictly on-policy."""
    max_in_flight: Positive | None = None
    """Executions that run at once; no bound but the admission's own when absent."""
    on_step_close: Literal["continue", "cut"] = "continue"
    """What becomes of executions that still run when their step closes: they go on under the new policy, or are cut
    and scored partially."""
    rest_every_s: Annotated[float, Meta(ge=0)] = 300.0
    """Seconds between two snapshots of an execution, from which a resume goes on; 0 takes one after each turn. An agent
    whose harness cannot go on has none and begins again."""
    retries: Count = 2
    """How often an execution that failed by our fault is run again."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """How scores become advantages and trees become micro-batches. The objective is the trainer's option."""

    estimator: Literal["grpo", "centre", "leave_one_out"] = "grpo"
    """Advantage over the executions of a group."""
    gate: float | Literal["off"] = 0.0
    """A group none of whose members scores above this gets no advantages, so that shaped scores of a failed group
    invent no direction; "off" switches the gate off."""
    single: Literal["zero", "raw"] = "zero"
    """Advantage of a group of one: none, or its raw score."""
    max_logprob_gap: Annotated[float, Meta(gt=0)] = 0.1
    """Mean difference, in nats, between the trainer's and the engine's log-probabilities of the first step's tokens
    beyond which the run stops before it steps; 0.01 to 0.05 is usual when one of them computes in bfloat16."""
    micro_batch_tokens: Positive = 4096
    """Tree tokens of one micro-batch; a tree that is longer makes one of its own."""


@dataclass(frozen=True, slots=True)
class CostsConfig:
    """What the scheduler assumes until it has measured; its figures replace these one by one."""

    to_train_s: Annotated[float, Meta(ge=0)] = 5.0
    """Seconds of a change of role to TRAIN."""
    to_rollout_s: Annotated[float, Meta(ge=0)] = 5.0
    """Seconds of a change of role to ROLLOUT."""
    sync_s: Annotated[float, Meta(ge=0)] = 2.0
    """Seconds that an engine takes to load new weights."""
    kv_bytes_per_token: Annotated[float, Meta(gt=0)] = 100_000.0
    """Bytes of KV that one token of context holds."""
    kv_bytes_per_s: Annotated[float, Meta(gt=0)] = 10e9
    """Bytes per second that KV moves with."""
    kv_setup_s: Annotated[float, Meta(ge=0)] = 0.05
    """Seconds before the first byte of a move."""
    prefill_tps: Annotated[float, Meta(gt=0)] = 8_000.0
    """Tokens per second that one cell prefills, on short contexts."""
    prefill_quadratic: Annotated[float, Meta(ge=0)] = 0.0
    """Slow-down per token of context: n tokens take n / prefill_tps * (1 + prefill_quadratic * n / 2) seconds."""
    train_tps: Annotated[float, Meta(gt=0)] = 10_000.0
    """Tree tokens per second that one cell trains."""
    step_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds from one step to the next; until one was measured, 0 lets cells turn however short the step may be."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """When cells change their role. Loads and marks are shares of sampling capacity."""

    policy: Annotated[PluginChoice, Kind.POLICY] = PluginChoice("watermark")
    """When cells turn: a policy by name, or [scheduler.policy] with its name and options."""
    low: float = 0.7
    """Demand below which the idlest rollout cell is released to TRAIN, while data is ready."""
    high: float = 0.95
    """Demand above which a satellite is claimed back to ROLLOUT."""
    dwell_s: float = 0.0
    """Seconds that a cell stays in a role at least."""
    switch_margin: float = 1.0
    """A switch must bring this many times its measured cost."""
    max_in_transit: float = 0.05
    """Share of all cells that may change role at once; one always may."""
    claim_idle: float | None = None
    """Demand above which a satellite with nothing to train samples instead; the low mark when absent."""
    keep_rollout: int = 1
    """Rollout cells that are never released."""
    pause_weight: float = 1.0
    """How much of a slot a session in a tool pause is expected to need, 0 to 1."""
    growth_horizon_s: float = 30.0
    """Seconds for which contexts must still fit when they grow at the measured rate."""
    pause_wait_s: float = 2.0
    """Seconds that a draining cell waits for a running call to reach its pause before it interrupts it."""
    balance: float = 0.25
    """How much of a call's time depends on the calls beside it, 0 to 1; a session leaves a fuller cell if that pays."""
    carry_kv: bool = True
    """Carry the KV of sessions that leave a cell where that is cheaper than prefilling again."""
    join_midway: bool = True
    """Satellites may join a step that is already running; else only once it is sealed."""
    admit_load: float | None = None
    """Admit a group only while demand is below this share of the whole cluster's capacity; always when absent."""
    min_group: int = 2
    """A group trains with the members that are left if there are at least this many (or all of a smaller one)."""
    cut_after_s: float | None = None
    """Seconds after which an execution is cut and scored for what it reached; never when absent."""
    cut_tail_share: float = 0.0
    """Cut a step's last executions once they are at most this share of it and training waits for them alone."""
    max_lease_batches: int = 4
    """Micro-batches in one lease."""
    tick_s: float = 1.0
    """Seconds between two looks when nothing happens."""
    priors: CostsConfig = field(default_factory=CostsConfig)


@dataclass(frozen=True, slots=True)
class KVConfig:
    """How a session's KV goes to another cell, where engines let it be read in place. The scheduler says when."""

    transport: str = "auto"
    """The first that works ("auto"), or one by name: "process_vm", "nixl", "shm", "tcp", or what a plugin brings."""
    digest: Literal["", "fast", "strong"] = ""
    """Digests of blocks that a move compares: "fast" finds damaged, stale and foreign blocks; "strong" is BLAKE2b. The
    embedded engine sums a block when it fills; others when a move begins, which makes it a third longer with "fast"."""
    finite: bool = False
    """Refuse KV with NaN or infinity in it."""


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """How the processes of a run reach one another."""

    address: str = "127.0.0.1"
    """This machine's address for the run's processes. With cells on other machines it must be one that they reach;
    every process then listens on the address from which it reaches this one. Traffic is authenticated, not
    encrypted."""


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The recording proxy in front of the engines."""

    host: str = "127.0.0.1"
    """Address to listen on. The agents of remote sandboxes need one that they can reach."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port to listen on; 0 takes a free one."""


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """How held-out tasks are judged, before the first step and after the last one."""

    split: str = "heldout"
    """Split of the task set to evaluate on."""
    tasks: Positive | None = None
    """Tasks of the split that are used, the first ones; all when absent."""
    repeats: Positive = 1
    """Executions of each task."""
    every: Count = 0
    """Also evaluate after every so many steps; 0 is only at the start and at the end."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Sampling temperature of evaluations, whatever their agents ask for; 0 is greedy."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What a resume begins from."""

    every: Positive = 1
    """Steps between two checkpoints of the core cell."""
    keep: Positive = 2
    """Checkpoints that are kept, the latest ones."""


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """What a run leaves to read."""

    html: bool = True
    """Write report.html into the run directory at the end."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A whole run. `base_dir` is the folder that relative paths mean."""

    name: str
    """Name of the run; also names its directory when `dir` is absent."""
    model: ModelConfig
    tasks: Annotated[PluginChoice, Kind.TASKSET]
    seed: Count = 0
    """Seed of everything that draws at random in the run."""
    steps: Positive = 10
    """Optimizer steps."""
    dir: str | None = None
    """Run directory, relative to the working directory; "runs/<name>" when absent, with a number when that is taken."""
    deadline_s: Seconds | None = None
    """Seconds after which the run is stopped in order, resumable."""
    base_dir: str = "."
    """Folder that relative paths mean; that of the file when absent."""
    cells: CellsConfig = field(default_factory=CellsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    limits: Limits = field(default_factory=Limits)
    loss: LossConfig = field(default_factory=LossConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    engine: Annotated[PluginChoice, Kind.ENGINE] = PluginChoice("local")
    trainer: Annotated[PluginChoice, Kind.TRAINER] = PluginChoice("local")
    harness: Annotated[PluginChoice, Kind.HARNESS] = PluginChoice("shell")
    sandbox: Annotated[PluginChoice, Kind.SANDBOX] = PluginChoice("local")
    launcher: Annotated[PluginChoice, Kind.LAUNCHER] = PluginChoice("local")
    scorers: Annotated[tuple[PluginChoice, ...], Kind.SCORER] = ()
    """Options of scorers, such as a judge's end point; which one judges is up to each task."""
    sinks: Annotated[tuple[PluginChoice, ...], Kind.SINK] = ()

    def resolve(self, path: str) -> Path:
        """`path` as an absolute path; a relative one means `base_dir`."""
        return Path(self.base_dir, path).absolute()

    @property
    def model_dir(self) -> Path:
        """The model's folder, absolute."""
        return self.resolve(self.model.path)

    @property
    def tokenizer_dir(self) -> Path:
        """The tokenizer's folder, absolute."""
        return self.resolve(self.model.tokenizer or self.model.path)
