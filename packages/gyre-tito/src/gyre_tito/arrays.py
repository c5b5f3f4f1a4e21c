"""Tree arrays v1: a trajectory tree as flat numpy arrays, the form in which trees leave this package.

Invariant: nodes are in preorder (a parent before its children, every subtree contiguous), so `node_parent[i] < i`
and a node's subtree is one range of nodes and one range of tokens. Holds data and checks shapes; computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TREE_ARRAYS_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class TreeArrays:
    """One execution's trajectory tree, N tokens in M nodes.

    `node_parent` int32[M], -1 for roots. `node_start` int64[M+1]: node i owns tokens node_start[i]:node_start[i+1].
    `token_ids` int32[N]. `sampled` bool[N]: the policy produced the token. `logprobs` float32[N]: behaviour logprob,
    NaN where not sampled. `versions` int32[N]: policy version that sampled it, -1 where not sampled.
    `call_id` int32[N]: index of the call that sampled the token, or whose prompt first brought it.
    `routed_experts` int16[N, layers, top_k] or None; rows that the engine did not report are -1.
    """

    node_parent: NDArray[np.int32]
    node_start: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    call_id: NDArray[np.int32]
    routed_experts: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        tokens, nodes = len(self.token_ids), len(self.node_parent)
        if len(self.node_start) != nodes + 1 or int(self.node_start[-1]) != tokens:
            raise ValueError(
                f"tree arrays: node_start must have {nodes + 1} entries ending at {tokens}, "
                f"got {len(self.node_start)} ending at {self.node_start[-1] if len(self.node_start) else 'nothing'}"
            )
        for name in ("sampled", "logprobs", "versions", "call_id"):
            if len(getattr(self, name)) != tokens:
                raise ValueError(f"tree arrays: {name} has {len(getattr(self, name))} entries, expected {tokens}")
        if self.routed_experts is not None and len(self.routed_experts) != tokens:
            raise ValueError(f"tree arrays: routed_experts has {len(self.routed_experts)} rows, expected {tokens}")
