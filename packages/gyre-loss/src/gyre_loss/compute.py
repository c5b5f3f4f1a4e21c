"""Losses and log-probabilities of tree batches: one result, three ways to compute it.

``packed``: the whole forest as one sequence under a tree mask. ``dfs``: depth first with one path in memory.
``branches``: each root-to-leaf path as a sequence of its own through the model's own attention, the slow oracle. The
invariant: the three agree, and the loss is a sum, so losses and gradients of micro-batches add up to those of the
step. Nothing here divides by the number of tasks; the core does, once.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre_loss import branches, dfs, packed
from gyre_loss._check import fail
from gyre_loss.batch import TreeBatch
from gyre_loss.hf import as_tree_model
from gyre_loss.layout import Layout
from gyre_loss.metrics import LossMetrics
from gyre_loss.model import TreeModel, refuse_recurrent
from gyre_loss.objective import Objective
from gyre_loss.terms import Targets, weighted_loss

METHODS = ("packed", "dfs", "branches")


@dataclass(frozen=True, slots=True)
class LossResult:
    """``loss``: float64 scalar, the sum over entries of weight times entry loss; ``backward`` adds its gradient.

    ``metrics`` add up over micro-batches. ``method``: the one that was used.
    """

    loss: Tensor
    metrics: LossMetrics
    method: str


@dataclass(frozen=True, slots=True)
class Options:
    """How to compute; but for ``replay_experts`` without effect on the result.

    ``attention``: ``"auto"``, ``"dense"``, ``"blocked"``, ``"flex"`` (packed only). ``chunk_tokens``: tokens whose
    activations are alive at a time (dfs only). ``recurrent``: ``"error"`` or ``"branches"``, what to do with models
    that packed and dfs cannot compute. ``replay_experts``: route as the engine recorded, where the batch says how.
    ``entropy``: whether to measure entropies where the objective does not need them.
    """

    attention: str = "auto"
    chunk_tokens: int = 2048
    recurrent: str = "error"
    entropy: bool = True
    replay_experts: bool = True


_DEFAULT = Options()


def tree_loss(
    model: object,
    batch: TreeBatch,
    objective: Objective,
    *,
    method: str = "packed",
    temperature: float = 1.0,
    options: Options = _DEFAULT,
) -> LossResult:
    """Loss of a batch under ``objective``; call ``.loss.backward()`` to add its gradient to the parameters'.

    ``model``: a Hugging Face causal model or a ``TreeModel``; ``temperature``: the one that tokens were sampled at.
    With ``dfs`` the gradient is computed here already and kept (one extra copy of the gradients) until ``backward``;
    ``accumulate`` avoids the copy. Raises ValueError for unknown methods, RecurrentLayersError for models that the
    method cannot compute.
    """
    adapter, batch, method = _prepare(model, batch, method, options)
    if method == "dfs":
        with adapter.session():
            done = dfs.loss(adapter, batch, objective, temperature, options.chunk_tokens, options.entropy)
        return LossResult(done.loss, done.metrics, method)
    place = Layout.of(batch)
    targets = Targets.of(batch, place)
    entropy = options.entropy or objective.needs_entropy
    if method == "packed":
        found = packed.logprobs(adapter, batch, place, targets, temperature, entropy, options.attention)
    else:
        found = branches.logprobs(adapter, batch, targets, temperature, entropy)
    of_entry = torch.from_numpy(targets.of_entry).to(found.logp.device)
    own_entropy = None if found.entropy is None else found.entropy[of_entry]
    result = weighted_loss(batch, objective, found.logp[of_entry], own_entropy)
    return LossResult(result.loss, result.metrics, method)


def accumulate(
    model: object,
    batch: TreeBatch,
    objective: Objective,
    *,
    method: str = "packed",
    temperature: float = 1.0,
    options: Options = _DEFAULT,
) -> LossResult:
    """``tree_loss`` and backward in one: adds the summed gradient to ``.grad``; the loss comes back detached."""
    adapter, batch, method = _prepare(model, batch, method, options)
    if method == "dfs":
        with adapter.session():
            done = dfs.accumulate(adapter, batch, objective, temperature, options.chunk_tokens, options.entropy)
        return LossResult(done.loss, done.metrics, method)
    with adapter.session() if method == "packed" else nullcontext():
        result = tree_loss(adapter, batch, objective, method=method, temperature=temperature, options=options)
        if result.loss.requires_grad:
            result.loss.backward()  # type: ignore[no-untyped-call]
    return LossResult(result.loss.detach(), result.metrics, method)


@torch.no_grad()
def token_logprobs(
    model: object,
    batch: TreeBatch,
    *,
    method: str = "packed",
    temperature: float = 1.0,
    options: Options = _DEFAULT,
) -> NDArray[np.float64]:
    """The model's log-probability of every entry's token, float64[E]: to compare with ``batch.entry_logprob``, or to
    fill ``entry_proximal`` and ``entry_reference``.
    """
    adapter, batch, method = _prepare(model, batch, method, options)
    place = Layout.of(batch)
    targets = Targets.of(batch, place)
    if method == "dfs":
        logp = dfs.logprobs(adapter, batch, temperature, options.chunk_tokens, False).logp
    elif method == "packed":
        logp = packed.logprobs(adapter, batch, place, targets, temperature, False, options.attention).logp
    else:
        logp = branches.logprobs(adapter, batch, targets, temperature, False).logp
    values: NDArray[np.float64] = logp.to("cpu", torch.float64).numpy()[targets.of_entry]
    return values


def _prepare(model: object, batch: TreeBatch, method: str, options: Options) -> tuple[TreeModel, TreeBatch, str]:
    doing = "computing a tree loss"
    if method not in METHODS:
        fail(doing, f"method {method!r}", f"one of {METHODS}")
    if options.recurrent not in ("error", "branches"):
        fail(doing, f"recurrent = {options.recurrent!r}", "'error' or 'branches'")
    if not batch.entries:
        fail(doing, "a batch without loss entries", "at least one", "Partitions hold no such batch.")
    adapter = as_tree_model(model)
    if adapter.recurrent_layers and method != "branches":
        if options.recurrent == "error":
            refuse_recurrent(adapter, method)
        method = "branches"
    if not options.replay_experts:
        batch = replace(batch, routed_experts=None)
    return adapter, batch, method
