"""From a finished group to its batch: the one call that the run loop needs.

Composes staleness, advantages, denominators and the merge, in the only order that keeps baseline, mask and
denominators consistent: too-old tokens are masked, then |T_k| is counted, then members and baseline are fixed, then
weights, then the forest. What was dropped is counted. Needs numpy alone; knows no model and no micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_loss._check import fail
from gyre_loss.aggregate import Aggregation, Denominators, two_level
from gyre_loss.arrays import TreeArrays
from gyre_loss.batch import TreeBatch
from gyre_loss.forest import TrainedTree, merge
from gyre_loss.groups import Estimator, GroupAdvantages, Status, group_advantages, grpo
from gyre_loss.stale import StalenessPolicy, histogram, staleness

_DOING = "assembling a group"
_ANY_AGE = StalenessPolicy()


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """One execution as it ended.

    ``tree``: tree arrays v1 in any accepted form, or None where nothing was recorded. ``score`` may be NaN where the
    status does not train. ``solved``: verified outcome, if known. ``routed_experts``: int16[N, layers, k] or None.
    """

    id: str
    status: Status | str
    score: float
    tree: object | None
    solved: bool | None = None
    routed_experts: NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """A group ready to train.

    ``batch`` is None if nothing in it trains. ``divisor`` is the group's share of the step's divisor: the core
    divides the summed gradient by the sum of the shares, once. ``executions`` counts by final status (an execution
    all of whose tokens were too old is ``stale``). ``masked_tokens``: sampled tokens of otherwise training executions
    that staleness masked; ``staleness`` counts the trained tokens by staleness.
    """

    batch: TreeBatch | None
    divisor: float
    advantages: GroupAdvantages
    executions: dict[str, int]
    masked_tokens: int
    staleness: dict[int, int]


def assemble_group(
    executions: Sequence[ExecutionRecord],
    *,
    trainer_version: int,
    age: StalenessPolicy = _ANY_AGE,
    estimator: Estimator = grpo,
    aggregation: Aggregation = two_level,
    gate: float | None = 0.0,
    single: str = "zero",
    drop_zero_advantage: bool = False,
) -> GroupBatch:
    """Fix a group's members, advantages and denominators, and merge what trains into one batch.

    ``drop_zero_advantage`` leaves executions of advantage 0 out of the batch, not out of the denominators: exact for
    objectives without KL or entropy terms. Other options as in ``group_advantages``. Raises ValueError for an empty
    group, repeated ids, unknown statuses, malformed trees, and a training status without a tree.
    """
    if not executions:
        fail(_DOING, "a group without executions", "at least one")
    trees = [None if item.tree is None else TreeArrays.from_any(item.tree) for item in executions]
    masks = [_mask(item, tree, age, trainer_version) for item, tree in zip(executions, trees, strict=True)]
    counts = np.array([0 if mask is None else int(mask.sum()) for mask in masks], np.int64)
    statuses = [_final_status(*row) for row in zip(executions, trees, counts.tolist(), strict=True)]
    known = [item.solved for item in executions]
    solved = None if any(flag is None for flag in known) else [bool(flag) for flag in known]
    advantages = group_advantages(
        [item.score for item in executions],
        statuses,
        trained_tokens=counts.tolist(),
        solved=solved,
        estimator=estimator,
        gate=gate,
        single=single,
    )
    members = np.flatnonzero(advantages.member)
    denominators = aggregation(counts[members]) if members.shape[0] else Denominators(np.zeros(0), 0.0)
    trained: list[TrainedTree] = []
    gaps: list[NDArray[np.int64]] = []
    masked = 0
    for member, weight in zip(members.tolist(), denominators.weight.tolist(), strict=True):
        tree, mask = trees[member], masks[member]
        assert tree is not None
        assert mask is not None
        masked += int(tree.sampled.sum() - mask.sum())
        gaps.append(staleness(tree.versions[mask], trainer_version))
        value = float(advantages.advantage[member])
        if drop_zero_advantage and value == 0.0:
            continue
        item = executions[member]
        trained.append(TrainedTree(item.id, tree, mask, weight, value, item.routed_experts))
    return GroupBatch(
        batch=merge(trained) if trained else None,
        divisor=denominators.divisor,
        advantages=advantages,
        executions=dict(Counter(status.value for status in statuses)),
        masked_tokens=masked,
        staleness=histogram(np.concatenate(gaps)) if gaps else {},
    )


def _mask(
    item: ExecutionRecord, tree: TreeArrays | None, age: StalenessPolicy, trainer_version: int
) -> NDArray[np.bool_] | None:
    if tree is None:
        return None
    if not _status(item).trains:
        return np.zeros(tree.tokens, np.bool_)
    mask = tree.sampled.copy()
    mask[mask] = age.mask(tree.versions[tree.sampled], trainer_version)
    return mask


def _status(item: ExecutionRecord) -> Status:
    try:
        return Status(item.status)
    except ValueError:
        fail(_DOING, f"status {item.status!r} of {item.id!r}", f"one of {[status.value for status in Status]}")


def _final_status(item: ExecutionRecord, tree: TreeArrays | None, trained: int) -> Status:
    status = _status(item)
    if not status.trains:
        return status
    if tree is None:
        fail(_DOING, f"execution {item.id!r} is {status.value} and has no tree", "its tree", "Or mark it failed.")
    return Status.STALE if trained == 0 and bool(tree.sampled.any()) else status
