"""Tree arrays, version 1: one execution's trajectory tree as six flat numpy arrays.

This is the border between whoever recorded an execution and the loss. The invariant: a ``TreeArrays`` that exists
is well formed (preorder, ranges that tile the tokens, a finite log-probability not above zero and a version of at
least zero at every sampled token, neither anywhere else). It does not know tasks, scores or losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_loss._check import fail, field, first, vector

_DOING = "reading tree arrays"
NAMES = ("node_parent", "node_start", "token_ids", "sampled", "logprobs", "versions")
LOGPROB_SLACK = 1e-3
"""Recorded log-probabilities may exceed zero by rounding of the engine's softmax; by no more than this."""


@dataclass(frozen=True, slots=True)
class TreeArrays:
    """One execution's tree: M nodes in preorder over N tokens.

    ``node_parent`` int32[M] (-1 for a root), ``node_start`` int64[M+1] (node i owns tokens
    ``node_start[i]:node_start[i+1]``), ``token_ids`` int32[N], ``sampled`` bool[N], ``logprobs`` float32[N]
    (behaviour, natural log, NaN where not sampled), ``versions`` int32[N] (-1 where not sampled).

    >>> TreeArrays([-1], [0, 3], [5, 6, 7], [False, True, True], [float("nan"), -0.5, -1.0], [-1, 0, 0]).tokens
    3
    """

    node_parent: NDArray[np.int32]
    node_start: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    def __post_init__(self) -> None:
        """Coerce dtypes and check every law of the format; raises ValueError."""
        put = object.__setattr__
        put(self, "node_parent", vector(self.node_parent, "node_parent", np.int32, _DOING))
        nodes = self.node_parent.shape[0]
        put(self, "node_start", vector(self.node_start, "node_start", np.int64, _DOING, nodes + 1))
        put(self, "token_ids", vector(self.token_ids, "token_ids", np.int32, _DOING))
        size = self.token_ids.shape[0]
        put(self, "sampled", vector(self.sampled, "sampled", np.bool_, _DOING, size))
        put(self, "logprobs", vector(self.logprobs, "logprobs", np.float32, _DOING, size))
        put(self, "versions", vector(self.versions, "versions", np.int32, _DOING, size))
        check_topology(self.node_parent, self.node_start, self.token_ids, _DOING)
        _check_sampled(self)

    @classmethod
    def from_any(cls, source: object) -> TreeArrays:
        """Build from an object or mapping that has the six arrays by name; a TreeArrays is returned as it is."""
        if isinstance(source, cls):
            return source
        return cls(*(field(source, name, _DOING) for name in NAMES))

    @property
    def tokens(self) -> int:
        """N, the number of tokens."""
        return int(self.token_ids.shape[0])

    @property
    def nodes(self) -> int:
        """M, the number of nodes."""
        return int(self.node_parent.shape[0])


def check_topology(
    node_parent: NDArray[np.int32],
    node_start: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    doing: str,
) -> None:
    """Check that nodes are in preorder and that their ranges tile the tokens; raises ValueError."""
    nodes, size = node_parent.shape[0], token_ids.shape[0]
    if node_start[0] != 0 or node_start[-1] != size:
        fail(doing, f"node_start runs from {node_start[0]} to {node_start[-1]}", f"0 to {size}, the tokens")
    if np.any(np.diff(node_start) <= 0):
        bad = first(np.diff(node_start) <= 0)
        fail(doing, f"node {bad} has {node_start[bad + 1] - node_start[bad]} tokens", "at least one in each node")
    if np.any(token_ids < 0):
        bad = first(token_ids < 0)
        fail(doing, f"token_ids[{bad}] = {token_ids[bad]}", "ids of zero or more")
    on_path: list[int] = []
    for node, parent in enumerate(node_parent.tolist()):
        while on_path and on_path[-1] != parent:
            on_path.pop()
        if parent != -1 and not on_path:
            fail(
                doing,
                f"node_parent[{node}] = {parent} is not on the path above node {node}",
                "preorder: a node follows its parent's subtree so far",
                f"The arrays hold {nodes} nodes; sort them depth first.",
            )
        on_path.append(node)


def _check_sampled(tree: TreeArrays) -> None:
    sampled, logprobs, versions = tree.sampled, tree.logprobs, tree.versions
    roots = tree.node_start[:-1][tree.node_parent < 0]
    if np.any(sampled[roots]):
        bad = int(roots[first(sampled[roots])])
        fail(_DOING, f"sampled[{bad}] is true at the first token of a root", "a context token before any sample")
    wrong = sampled & ~np.isfinite(logprobs)
    if np.any(wrong):
        bad = first(wrong)
        fail(
            _DOING,
            f"logprobs[{bad}] = {logprobs[bad]} at a sampled token",
            "the engine's finite log-probability",
            "Record it, or mark the token as context.",
        )
    wrong = sampled & (logprobs > LOGPROB_SLACK)
    if np.any(wrong):
        bad = first(wrong)
        fail(_DOING, f"logprobs[{bad}] = {logprobs[bad]}", "a log-probability, at most 0")
    wrong = sampled & (versions < 0)
    if np.any(wrong):
        bad = first(wrong)
        fail(_DOING, f"versions[{bad}] = {versions[bad]} at a sampled token", "its policy version, 0 or more")
    wrong = ~sampled & (versions >= 0)
    if np.any(wrong):
        bad = first(wrong)
        fail(_DOING, f"versions[{bad}] = {versions[bad]} at a context token", "-1 where nothing was sampled")
