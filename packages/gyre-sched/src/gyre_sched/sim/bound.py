"""A time that no scheduler can beat on a given cluster and workload.

Two bounds, and the larger of them: the work that must be done divided among all cells, each of them always
at its best speed; and the longest chain of things that must follow one another. The derivation is in
``docs/why/sched-bound.md``. Assumes the cost model of ``models.py`` and nothing about the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from .models import Hardware
from .workload import ExecutionPlan, Workload, batches_of

__all__ = ["Bound", "lower_bound"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds. ``work_s``: all cells busy at best speed all the time. ``chain_s``: the longest chain."""

    work_s: float
    chain_s: float
    sampling_cell_s: float
    training_cell_s: float

    def without(self, cell_s: float, cells: int) -> float:
        """The bound for a run that left work of ``cell_s`` undone on purpose."""
        return max(self.work_s - cell_s / cells, self.chain_s if not cell_s else 0.0)

    @property
    def seconds(self) -> float:
        """The lower bound."""
        return max(self.work_s, self.chain_s)


def sampling_cell_seconds(hw: Hardware, plan: ExecutionPlan) -> float:
    """Least cell time to sample an execution: every decoding step shared by ``slots`` calls, nothing
    prefilled twice.
    """
    total, context = 0.0, 0
    for turn in plan.turns:
        fill = hw.prefill_s(turn.fed, context)
        context += turn.fed
        # In a step shared by k <= slots calls this call is charged step_s/k + seq_s + ctx_s · own context
        # at least;
        # its prefill is worth fill/step tokens of the engine's time, charged at the same share.
        per_token = hw.step_s / hw.slots + hw.seq_s + hw.ctx_s * context
        alone = hw.decode_step_s(1, context)
        full = hw.step_s + hw.seq_s * hw.slots + hw.ctx_s * max(context, hw.kv_tokens)
        tokens = turn.sampled + fill / max(alone, full)
        total += tokens * per_token
        context += turn.sampled
    return total


def latency_s(hw: Hardware, plan: ExecutionPlan) -> float:
    """Least time from start to end of an execution: alone on a cell, nothing prefilled twice."""
    total, context = 0.0, 0
    for turn in plan.turns:
        total += hw.prefill_s(turn.fed, context)
        context += turn.fed
        total += turn.sampled * hw.decode_step_s(1, context) + turn.pause_s
        context += turn.sampled
    return total


def lower_bound(hw: Hardware, load: Workload) -> Bound:
    """The bound for the whole run of ``load`` on ``hw``."""
    sampling = training = 0.0
    per_group: list[float] = []
    steps, width = load.steps, load.groups_per_step
    for number in range(steps * width):
        plans = load.group(number)
        sampling += sum(sampling_cell_seconds(hw, p) for p in plans)
        pieces = [hw.train_s(b) for p in plans for b in batches_of(p.train_tokens, load.batch_tokens)]
        training += sum(pieces)
        last = max(pieces)
        per_group.append(max(latency_s(hw, p) for p in plans) + last)
    apply_s = steps * hw.apply_s
    work = (sampling + training) / hw.cells
    return Bound(work, max(_chain(load, per_group, hw), apply_s), sampling, training)


def _chain(load: Workload, per_group: list[float], hw: Hardware) -> float:
    """Steps ``s + 1`` apart cannot overlap: at least ``B`` groups are born and trained between them."""
    width, stale = load.groups_per_step, load.max_staleness
    total = 0.0
    version = 0
    while version + stale + 1 <= load.steps:
        # Between version v and the end of step v+s at least B of the groups numbered (v+s)·B … must be
        # admitted and
        # trained; at best the B quickest of all that may have been admitted by then.
        first, last = (version + stale) * width, (version + 2 * stale + 1) * width
        window = sorted(per_group[first : min(last, len(per_group))])
        if len(window) >= width:
            total += window[width - 1] + hw.apply_s
        version += stale + 1
    return total
