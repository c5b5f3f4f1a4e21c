"""TreeBatch: the forest that one micro-batch computes, and the loss entries on it.

A batch has two parts. The *forest* is what the model runs over: nodes in preorder, each token once. The *entries* are
what carries loss: one per (sampled token, execution that sampled it), with the weight, advantage, behaviour
log-probability and policy version that belong to that execution. A token that several executions share is one token
with several entries, so it is computed once and counted as often as it should be.

The invariant: weights are fixed before anything is split and are never divided by the number of tasks here, so the
sum of the losses (and gradients) of any partition of a batch is that of the batch. This module needs numpy alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_loss._check import fail, first, vector
from gyre_loss.arrays import LOGPROB_SLACK, TreeArrays, check_topology

_DOING = "building a TreeBatch"
NO_LOGPROB = np.float32("nan")


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """M nodes over N tokens, E loss entries of K executions.

    Forest: ``node_parent`` int32[M], ``node_start`` int64[M+1], ``token_ids`` int32[N], all as in tree arrays v1.
    Entries: ``entry_token`` int64[E] (index of the sampled token, ascending), ``entry_execution`` int32[E],
    ``entry_weight`` float64[E] (>= 0, already normalised within execution and group),
    ``entry_advantage`` float32[E], ``entry_logprob`` float32[E] (behaviour), ``entry_version`` int32[E],
    ``entry_proximal`` and ``entry_reference`` float32[E] (log-probabilities of the proximal and the reference
    policy; NaN where not known).
    Executions: ``execution_ids`` (K names) and ``execution_tokens`` int64[K]: the trained tokens |T_k| that each
    execution has in the whole step, of which this batch may hold a part.
    ``routed_experts``: int16[N, layers, k] as the engine recorded them, or None.
    """

    node_parent: NDArray[np.int32]
    node_start: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    entry_token: NDArray[np.int64]
    entry_execution: NDArray[np.int32]
    entry_weight: NDArray[np.float64]
    entry_advantage: NDArray[np.float32]
    entry_logprob: NDArray[np.float32]
    entry_version: NDArray[np.int32]
    entry_proximal: NDArray[np.float32]
    entry_reference: NDArray[np.float32]
    execution_ids: tuple[str, ...]
    execution_tokens: NDArray[np.int64]
    routed_experts: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        """Coerce dtypes and check shapes and values; raises ValueError."""
        put = object.__setattr__
        put(self, "node_parent", vector(self.node_parent, "node_parent", np.int32, _DOING))
        size = self.node_parent.shape[0]
        put(self, "node_start", vector(self.node_start, "node_start", np.int64, _DOING, size + 1))
        put(self, "token_ids", vector(self.token_ids, "token_ids", np.int32, _DOING))
        put(self, "entry_token", vector(self.entry_token, "entry_token", np.int64, _DOING))
        entries = self.entry_token.shape[0]
        for name, dtype in ENTRY_DTYPES.items():
            put(self, name, vector(getattr(self, name), name, dtype, _DOING, entries))
        put(self, "execution_ids", tuple(self.execution_ids))
        count = len(self.execution_ids)
        if self.routed_experts is not None:
            put(self, "routed_experts", np.asarray(self.routed_experts))
        put(self, "execution_tokens", vector(self.execution_tokens, "execution_tokens", np.int64, _DOING, count))
        check_topology(self.node_parent, self.node_start, self.token_ids, _DOING)
        _check_entries(self)

    @classmethod
    def from_arrays(
        cls,
        arrays: object = None,
        *,
        execution: str = "0",
        weight: float | None = None,
        advantage: float = 0.0,
        trains: NDArray[np.bool_] | None = None,
        **named: Any,
    ) -> TreeBatch:
        """Batch of one execution from tree arrays v1 (an object, a mapping, or the six arrays by keyword).

        ``weight`` is the weight of each trained token (default 1/|T|: a group of one execution); ``trains`` bool[N]
        narrows the sampled tokens that train (default: all of them). Raises ValueError on malformed arrays.

        >>> nan = float("nan")
        >>> batch = TreeBatch.from_arrays(node_parent=[-1], node_start=[0, 3], token_ids=[5, 6, 7],
        ...     sampled=[False, True, True], logprobs=[nan, -0.5, -1.0], versions=[-1, 0, 0], advantage=2.0)
        >>> batch.entry_token.tolist(), batch.entry_weight.tolist()
        ([1, 2], [0.5, 0.5])
        """
        if (arrays is None) == (not named):
            fail(_DOING, "both or neither of an arrays object and keyword arrays", "exactly one of them")
        tree = TreeArrays.from_any(named if arrays is None else arrays)
        chosen = tree.sampled
        if trains is not None:
            chosen = chosen & vector(trains, "trains", np.bool_, _DOING, tree.tokens)
        token = np.flatnonzero(chosen).astype(np.int64)
        count = token.shape[0]
        each = (1.0 / count if count else 0.0) if weight is None else weight
        return cls(
            node_parent=tree.node_parent,
            node_start=tree.node_start,
            token_ids=tree.token_ids,
            entry_token=token,
            entry_execution=np.zeros(count, np.int32),
            entry_weight=np.full(count, each, np.float64),
            entry_advantage=np.full(count, advantage, np.float32),
            entry_logprob=tree.logprobs[token],
            entry_version=tree.versions[token],
            entry_proximal=np.full(count, NO_LOGPROB, np.float32),
            entry_reference=np.full(count, NO_LOGPROB, np.float32),
            execution_ids=(execution,),
            execution_tokens=np.array([count], np.int64),
        )

    @property
    def tokens(self) -> int:
        """N, the tokens that the model computes."""
        return int(self.token_ids.shape[0])

    @property
    def entries(self) -> int:
        """E, the (token, execution) pairs that carry loss."""
        return int(self.entry_token.shape[0])

    def held_tokens(self) -> NDArray[np.int64]:
        """int64[K]: how many of each execution's trained tokens this batch holds."""
        return np.bincount(self.entry_execution, minlength=len(self.execution_ids)).astype(np.int64)

    def with_logprobs(
        self,
        *,
        proximal: NDArray[np.float32] | None = None,
        reference: NDArray[np.float32] | None = None,
    ) -> TreeBatch:
        """The same batch with the proximal and/or reference policy's log-probabilities, float32[E], filled in."""
        changed: dict[str, Any] = {}
        if proximal is not None:
            changed["entry_proximal"] = proximal
        if reference is not None:
            changed["entry_reference"] = reference
        return replace(self, **changed)


ENTRY_DTYPES: dict[str, type[np.generic]] = {
    "entry_execution": np.int32,
    "entry_weight": np.float64,
    "entry_advantage": np.float32,
    "entry_logprob": np.float32,
    "entry_version": np.int32,
    "entry_proximal": np.float32,
    "entry_reference": np.float32,
}


def _check_entries(batch: TreeBatch) -> None:
    token, count = batch.entry_token, len(batch.execution_ids)
    if np.any((token < 0) | (token >= batch.tokens)):
        bad = first((token < 0) | (token >= batch.tokens))
        fail(_DOING, f"entry_token[{bad}] = {token[bad]}", f"a token index below {batch.tokens}")
    if np.any(np.diff(token) < 0):
        bad = first(np.diff(token) < 0)
        fail(_DOING, f"entry_token falls from {token[bad]} to {token[bad + 1]}", "ascending token indices")
    roots = batch.node_start[:-1][batch.node_parent < 0]
    if np.any(np.isin(token, roots)):
        bad = first(np.isin(token, roots))
        fail(_DOING, f"entry_token[{bad}] is the first token of a root", "a token with something before it")
    execution = batch.entry_execution
    if np.any((execution < 0) | (execution >= count)):
        bad = first((execution < 0) | (execution >= count))
        fail(_DOING, f"entry_execution[{bad}] = {execution[bad]}", f"an execution below {count}")
    _check_values(batch)
    if np.any(batch.execution_tokens < 0):
        bad = first(batch.execution_tokens < 0)
        fail(_DOING, f"execution_tokens[{bad}] = {batch.execution_tokens[bad]}", "a count of zero or more")
    held = batch.held_tokens()
    if np.any(held > batch.execution_tokens):
        bad = first(held > batch.execution_tokens)
        fail(
            _DOING,
            f"execution {batch.execution_ids[bad]!r} has {held[bad]} entries",
            f"at most execution_tokens[{bad}] = {batch.execution_tokens[bad]}",
        )
    experts = batch.routed_experts
    if experts is not None and experts.dtype != np.int16:
        fail(_DOING, f"routed_experts has dtype {experts.dtype}", "int16")
    if experts is not None and (experts.ndim != 3 or experts.shape[0] != batch.tokens):
        fail(_DOING, f"routed_experts has shape {experts.shape}", f"({batch.tokens}, layers, experts per token)")


def _check_values(batch: TreeBatch) -> None:
    for name in ("entry_weight", "entry_advantage", "entry_logprob"):
        values: NDArray[Any] = getattr(batch, name)
        if not np.all(np.isfinite(values)):
            bad = first(~np.isfinite(values))
            fail(_DOING, f"{name}[{bad}] = {values[bad]}", "a finite number")
    if np.any(batch.entry_weight < 0):
        bad = first(batch.entry_weight < 0)
        fail(_DOING, f"entry_weight[{bad}] = {batch.entry_weight[bad]}", "a weight of zero or more")
    if np.any(batch.entry_version < 0):
        bad = first(batch.entry_version < 0)
        fail(_DOING, f"entry_version[{bad}] = {batch.entry_version[bad]}", "a known policy version, 0 or more")
    for name in ("entry_logprob", "entry_proximal", "entry_reference"):
        values = getattr(batch, name)
        with np.errstate(invalid="ignore"):
            wrong = (values > LOGPROB_SLACK) | np.isinf(values)
        if np.any(wrong):
            bad = first(wrong)
            fail(_DOING, f"{name}[{bad}] = {values[bad]}", "a finite log-probability, at most 0")
