"""Is elastic scheduling worth it for a workload: the same work under each way of scheduling, and the bound.

Rows: ``colocate`` (best of its sync sizes), ``static`` (best split, found by search), the ablation
``switching`` → ``joining`` → ``moving`` → ``cutting``, ``cost-aware``, and ``elastic``, the best of the
elastic ones. Baselines run as today's pipelines do: fixed batches in order, training once a batch is
complete, sessions that stay where they are. Every row runs through the real machine. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .config import SchedConfig
from .policies import Policy, colocate, cost_aware, static, watermark
from .sim.bound import Bound, lower_bound, sampling_cell_seconds
from .sim.models import Hardware
from .sim.presets import Preset
from .sim.run import SimResult, simulate
from .sim.workload import Workload, batches_of

__all__ = ["Expected", "Plan", "Row", "best_split", "elastic_config", "expected_work", "make_plan", "pipeline_config"]

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One way of scheduling and what it gave. ``what`` says in words how it ran."""

    name: str
    what: str
    result: SimResult


@dataclass(frozen=True, slots=True)
class Plan:
    """All rows of one workload on one cluster. ``bound``: no scheduler can be quicker with all work done."""

    name: str
    about: str
    cells: int
    steps: int
    rows: tuple[Row, ...]
    bound: Bound
    preset: Preset | None = None

    def row(self, name: str) -> Row:
        """The row called ``name``; ``elastic`` is the quickest of the elastic ones."""
        if name == "elastic":
            kinds = ("switching", "joining", "moving", "cutting", "cost-aware", "lending", "cost-aware+cutting")
            return min((r for r in self.rows if r.name in kinds), key=lambda r: r.result.seconds)
        return next(r for r in self.rows if r.name == name)

    def ratio(self, worse: str, better: str) -> float:
        """How many times longer ``worse`` takes."""
        return self.row(worse).result.seconds / self.row(better).result.seconds


@dataclass(frozen=True, slots=True)
class Expected:
    """What a team knows of its work before the run: means over a step's worth of it. ``sampling_s`` and
    ``training_s``: cell seconds; ``latency_s``: of an execution with a full cell's speed.
    """

    sampling_s: float
    training_s: float
    latency_s: float
    cells: int

    @property
    def step_s(self) -> float:
        """Seconds of a step, if the cells are always busy or one execution after another is awaited."""
        return max(self.latency_s, (self.sampling_s + self.training_s) / self.cells)

    @property
    def train_cells(self) -> int:
        """The split in which sampling and training keep pace."""
        share = self.training_s / max(1e-9, self.sampling_s + self.training_s)
        return max(1, min(self.cells - 1, round(self.cells * share)))


def expected_work(hw: Hardware, load: Workload) -> Expected:
    """Means over the first step's groups."""
    plans = [p for g in range(load.groups_per_step) for p in load.group(g)]
    sampling = sum(sampling_cell_seconds(hw, p) for p in plans)
    training = sum(hw.train_s(b) for p in plans for b in batches_of(p.train_tokens, load.batch_tokens))
    pace = hw.step_s + hw.seq_s * min(hw.slots, -(-len(plans) // hw.cells))
    latency = sum(sum(t.sampled * pace + t.pause_s for t in p.turns) for p in plans) / len(plans)
    return Expected(sampling, training, latency, hw.cells)


def _common(hw: Hardware, load: Workload) -> SchedConfig:
    first = load.group(0)
    typical = sum(p.train_tokens for p in first) // max(1, len(first))
    latency = sum(t.sampled * hw.decode_step_s(1, 0) + t.pause_s for t in first[0].turns)
    work = expected_work(hw, load)
    return SchedConfig(
        groups_per_step=load.groups_per_step,
        max_staleness=load.max_staleness,
        tick_s=max(0.25, min(30.0, latency / 40)),
        pause_wait_s=max(0.1, min(2.0, latency / 200)),
        priors=hw.priors(min(typical, load.batch_tokens or typical), work.step_s),
        story_keep=16,
        growth_horizon_s=0.0,
    )


def pipeline_config(hw: Hardware, load: Workload) -> SchedConfig:
    """How a pipeline without elastic cells runs: fixed batches, no joining midway, no KV moves, first come
    first served.
    """
    return replace(
        _common(hw, load),
        join_midway=False,
        carry_kv=False,
        balance=0.0,
        oldest_first=False,
        batch_order=True,
        max_in_transit=1.0,
    )


def elastic_config(hw: Hardware, load: Workload, *, cut: float = 0.0) -> SchedConfig:
    """How elastic cells run."""
    return replace(_common(hw, load), max_in_transit=1.0, low=1.0, high=1.2, pause_weight=0.2, cut_tail_share=cut)


def best_split(hw: Hardware, load: Workload, config: SchedConfig, trial: Workload | None = None) -> int:
    """The number of training cells with which ``static`` is quickest, by search on ``trial`` (a shorter
    run).
    """
    shorter = trial or load
    seen: dict[int, float] = {}

    def seconds(cells: int) -> float:
        if cells not in seen:
            seen[cells] = simulate(hw, shorter, config, static, train_cells=cells).seconds
        return seen[cells]

    grid = sorted({max(1, min(hw.cells - 1, round(hw.cells * f))) for f in (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)})
    best = min(grid, key=seconds)
    step = max(1, hw.cells // 8)
    finest = max(1, hw.cells // 64)
    while step >= finest:
        around = [c for c in (best - step, best + step) if 1 <= c < hw.cells]
        better = min([best, *around], key=seconds)
        if better == best:
            if step == finest:
                break
            step = max(finest, step // 2)
        best = better
    return best


def make_plan(
    name: str,
    hw: Hardware,
    load: Workload,
    *,
    about: str = "",
    preset: Preset | None = None,
    trial: Workload | None = None,
    seed: int = 0,
    lanes: bool = False,
    cut: float = 0.0,
    only: Sequence[str] | None = None,
    say: Say | None = None,
) -> Plan:
    """Simulate all rows (or ``only`` some). ``trial``: a shorter workload for the search of the static
    split.
    """
    tell = say or (lambda text: None)
    rows: list[Row] = []
    pipe = pipeline_config(hw, load)
    start = expected_work(hw, load).train_cells

    def add(row: str, what: str, config: SchedConfig, policy: Policy, cells: int) -> None:
        if only is None or row in only:
            tell(f"{row}: {what}")
            result = simulate(hw, load, config, policy, train_cells=cells, seed=seed, keep_lanes=lanes)
            rows.append(Row(row, what, result))

    add("colocate-sync", "all sample one batch, then all train it", replace(pipe, max_staleness=0), colocate, 0)
    sizes = [r for r in rows if r.name == "colocate-sync"]
    if only is None or "colocate" in only:
        for size in range(0 if not sizes else 1, load.max_staleness + 1):
            config = replace(pipe, max_staleness=size)
            result = simulate(hw, load, config, colocate, train_cells=0, seed=seed, keep_lanes=lanes)
            sizes.append(Row("colocate", f"{size + 1} batches per change of roles", result))
        best = min(sizes, key=lambda r: r.result.seconds)
        rows.append(Row("colocate", best.what + " (best of its sync sizes)", best.result))
    if only is None or {"static", "static-streaming"} & set(only):
        split = best_split(hw, load, pipe, trial)
        add("static", f"{split} of {hw.cells} cells train (best split)", pipe, static, split)
        stream = elastic_config(hw, load)
        what = f"the same split with this scheduler's ledger and router ({split} cells train)"
        add("static-streaming", what, stream, static, split)
    switching = replace(pipe, low=1.0, high=1.2, pause_weight=0.2)
    joining = replace(elastic_config(hw, load), carry_kv=False, balance=0.0, oldest_first=False)
    moving = elastic_config(hw, load)
    add("switching", "cells change roles when a batch is complete", switching, watermark, start)
    add("joining", "and join a step as soon as its first group ended", joining, watermark, start)
    add("moving", "and sessions move with their KV, oldest groups first", moving, watermark, start)
    add("cost-aware", "the same, turning cells by predicted gain", moving, cost_aware, start)
    lending = replace(moving, lend_core=True, claim_idle=0.2)
    add(
        "lending",
        "cost-aware, and every cell samples, the core too, while nothing is to train",
        lending,
        cost_aware,
        start,
    )
    if cut:
        cutting = elastic_config(hw, load, cut=cut)
        share = f"and the last executions of a starved step are cut (at most {cut:.0%}) and scored partially"
        add("cutting", share, cutting, watermark, start)
        add("cost-aware+cutting", "cost-aware, with that cut", cutting, cost_aware, start)
    return Plan(name, about, hw.cells, load.steps, tuple(rows), lower_bound(hw, load), preset)
