"""From the recorded trees of a finished group to its micro-batches.

Invariant: a pure function of trees, scores and statuses, so that a resumed run builds the same micro-batches under the
same names. Not here: who computes them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gyre_core import MicroBatch
from gyre_loss import groups
from gyre_loss.assemble import ExecutionRecord, GroupBatch, assemble_group
from gyre_loss.partitioner import partition
from gyre_loss.serial import to_bytes

from gyre_rl.config.schema import LossConfig

_ESTIMATORS = {"grpo": groups.grpo, "centre": groups.centre, "leave_one_out": groups.leave_one_out}


@dataclass(frozen=True, slots=True)
class Member:
    """One execution of a group as it ended. `tree` is None when nothing was recorded."""

    execution: str
    status: str
    score: float
    tree: object | None
    """Tree arrays v1, in any form that gyre-loss takes."""


@dataclass(frozen=True, slots=True)
class BuiltGroup:
    """The micro-batches of a group and what is worth telling of it."""

    batches: tuple[MicroBatch, ...]
    group: GroupBatch
    spread: float
    scores: tuple[float, ...]


def build_group(
    name: str, step: int, members: Sequence[Member], config: LossConfig, *, trainer_version: int
) -> BuiltGroup:
    """Fix advantages and denominators of the group and cut its forest into micro-batches.

    Micro-batches are named `<group>.<i>`; a group without any gradient (equal scores, gated) has none.
    """
    experts = _experts([m.tree for m in members])
    records = [
        ExecutionRecord(m.execution, m.status, m.score, m.tree, routed_experts=rows)
        for m, rows in zip(members, experts, strict=True)
    ]
    group = assemble_group(
        records,
        trainer_version=trainer_version,
        estimator=_ESTIMATORS[config.estimator],
        gate=None if config.gate == "off" else config.gate,
        single=config.single,
        drop_zero_advantage=True,
    )
    parts = partition(group.batch, config.micro_batch_tokens, oversize="alone").parts if group.batch else ()
    scores = tuple(m.score for m, is_member in zip(members, group.advantages.member, strict=True) if is_member)
    return BuiltGroup(
        batches=tuple(
            MicroBatch(f"{name}.{index}", step, part.tokens, to_bytes(part)) for index, part in enumerate(parts)
        ),
        group=group,
        spread=statistics.pstdev(scores) if scores else 0.0,
        scores=scores,
    )


def _experts(trees: Sequence[Any]) -> list[Any]:
    """Recorded experts of each tree, int16[N, layers, top_k]; where others have some, a tree without has -1: what the
    router chooses."""
    known = [getattr(tree, "routed_experts", None) for tree in trees]
    shape = next((rows.shape[1:] for rows in known if rows is not None), None)
    if shape is None:
        return known
    return [
        rows if rows is not None or tree is None else np.full((len(tree.token_ids), *shape), -1, np.int16)
        for rows, tree in zip(known, trees, strict=True)
    ]
