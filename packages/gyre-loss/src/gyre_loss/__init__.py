"""Tree batches and losses that compute a shared prefix once.

The names below need numpy alone and are imported at once. What needs torch is imported from its own module when it is
first asked for, so a process that only builds micro-batches never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gyre_loss.aggregate import (
    Aggregation,
    Constant,
    Denominators,
    group_token_mean,
    sequence_mean,
    token_mean,
    two_level,
)
from gyre_loss.arrays import TreeArrays
from gyre_loss.assemble import ExecutionRecord, GroupBatch, assemble_group
from gyre_loss.batch import TreeBatch
from gyre_loss.forest import TrainedTree, merge, pad
from gyre_loss.groups import (
    GroupAdvantages,
    GroupNote,
    Status,
    centre,
    group_advantages,
    grpo,
    leave_one_out,
)
from gyre_loss.layout import Layout
from gyre_loss.partitioner import Partition, partition, prune
from gyre_loss.serial import from_bytes, to_bytes
from gyre_loss.stale import StalenessPolicy, histogram, staleness

if TYPE_CHECKING:
    from gyre_loss.compute import LossResult, accumulate, token_logprobs, tree_loss
    from gyre_loss.objective import Objective, PolicyLoss

_LAZY = {
    "LossResult": "gyre_loss.compute",
    "Objective": "gyre_loss.objective",
    "PolicyLoss": "gyre_loss.objective",
    "accumulate": "gyre_loss.compute",
    "token_logprobs": "gyre_loss.compute",
    "tree_loss": "gyre_loss.compute",
}

__all__ = [
    "Aggregation",
    "Constant",
    "Denominators",
    "ExecutionRecord",
    "GroupAdvantages",
    "GroupBatch",
    "GroupNote",
    "Layout",
    "LossResult",
    "Objective",
    "Partition",
    "PolicyLoss",
    "StalenessPolicy",
    "Status",
    "TrainedTree",
    "TreeArrays",
    "TreeBatch",
    "accumulate",
    "assemble_group",
    "centre",
    "from_bytes",
    "group_advantages",
    "group_token_mean",
    "grpo",
    "histogram",
    "leave_one_out",
    "merge",
    "pad",
    "partition",
    "prune",
    "sequence_mean",
    "staleness",
    "to_bytes",
    "token_logprobs",
    "token_mean",
    "tree_loss",
    "two_level",
]


def __getattr__(name: str) -> Any:
    """Import a torch-dependent name on first use."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
