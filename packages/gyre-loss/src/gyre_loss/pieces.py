"""The pieces of a tree loss as plain calls, for a trainer that runs a forward of its own.

``tree_loss`` drives a model from token ids to gradients. A trainer that splits a model over pipeline stages or tensor
ranks cannot hand that over; it takes the same computation in pieces: ``inputs`` (ids, positions, which rows to
predict from), ``TreeAttention`` in each layer, ``logprob.linear_logprob`` at the head, ``loss`` on the last stage. The
invariant: these are what ``tree_loss`` itself is made of, so the result is the same, and the loss is again a sum over
the batch that no one divides here. Knows no framework; splits no sequence (context parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gyre_loss._check import fail
from gyre_loss.attention import Attention, choose
from gyre_loss.batch import TreeBatch
from gyre_loss.layout import Layout
from gyre_loss.objective import Objective
from gyre_loss.terms import Targets, WeightedLoss, weighted_loss


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """What a model is run on, for a batch of N tokens and U distinct trained tokens.

    ``token_ids`` int64[N]; ``positions`` int64[N], along each token's path (what rotary embeddings take); ``rows``
    int64[U], the tokens whose final hidden states reach the head, and no others need to; ``wanted`` int64[U], the
    token id that each of them predicts.
    """

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    wanted: Tensor


def inputs(batch: TreeBatch, device: torch.device | str = "cpu") -> ModelInputs:
    """The ModelInputs of a batch, on ``device``."""
    place = Layout.of(batch)
    targets = Targets.of(batch, place)
    ids = torch.from_numpy(batch.token_ids.astype("int64"))
    wanted = ids[torch.from_numpy(targets.token)]
    arrays = (ids, torch.from_numpy(place.position), torch.from_numpy(targets.row), wanted)
    return ModelInputs(*(tensor.to(device) for tensor in arrays))


@dataclass(frozen=True, slots=True, eq=False)
class TreeAttention:
    """Attention of one batch's forest on [tokens, heads, size]; exact: each token sees its own path only.

    Made once per batch and called in every layer. It holds the forest's blocks and no state between calls, so several
    batches may be in flight, and a layer may be computed again during backward, as long as each call gets the object
    of its own batch.
    """

    tokens: int
    blocks: Attention

    @classmethod
    def of(cls, batch: TreeBatch, device: torch.device | str = "cpu", kind: str = "auto") -> TreeAttention:
        """For a batch on a device. ``kind`` as in ``compute.Options.attention``; raises ValueError for others."""
        return cls(batch.tokens, choose(batch, Layout.of(batch), torch.device(device), kind))

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Output shaped like ``query``: [N, H, D], or [N, 1, H, D] as in trainers that keep a batch dimension.

        ``key``, ``value``: [N, Hkv, D] (or [N, 1, Hkv, D]), Hkv dividing H; these may be one tensor-parallel rank's
        heads. ``scale``: default D ** -0.5; ``window``: sliding window in tokens of the path; ``layer`` is for
        messages. Raises ValueError for shapes that do not fit the forest.
        """
        shape = query.shape
        narrow = [t.squeeze(1) if t.ndim == 4 and t.shape[1] == 1 else t for t in (query, key, value)]
        self._check(narrow, (query, key, value), layer)
        q, k, v = (t.transpose(0, 1) for t in narrow)
        used = q.shape[-1] ** -0.5 if scale is None else scale
        return self.blocks(layer, q, k, v, scale=used, window=window).transpose(0, 1).reshape(shape)

    def _check(self, narrow: list[Tensor], given: tuple[Tensor, Tensor, Tensor], layer: int) -> None:
        query, key, value = narrow
        fits = all(t.ndim == 3 and t.shape[0] == self.tokens for t in narrow)
        if not (
            fits
            and key.shape == value.shape
            and query.shape[2] == key.shape[2]
            and key.shape[1] > 0
            and query.shape[1] % key.shape[1] == 0
        ):
            found = ", ".join(
                f"{name} {tuple(t.shape)}" for name, t in zip(("query", "key", "value"), given, strict=True)
            )
            fail(
                f"computing tree attention in layer {layer}",
                found,
                f"[{self.tokens}, heads, size] for query, [{self.tokens}, kv heads, size] for key and value, heads a "
                "multiple of kv heads",
                "Pad the batch with gyre_loss.pad if the sequence has to be longer.",
            )


def loss(
    batch: TreeBatch, objective: Objective, logp: Tensor, entropy: Tensor | None = None, *, nan_ok: bool = False
) -> WeightedLoss:
    """The batch's summed loss (float64, with gradient) and its metrics from the log-probabilities of its targets.

    ``logp`` [U] and ``entropy`` [U] are of ``inputs(batch).wanted``, in that order, as ``linear_logprob`` gives them.
    ``result.loss.backward()`` starts the last stage's backward. Raises ValueError for other shapes, for NaN, and where
    the objective needs an entropy that is not there. ``nan_ok`` lets NaN through into the gradient, for a trainer that
    looks at gradients anyway: ranks of a pipeline must not part ways over what only the last one sees.
    """
    doing = "computing a loss from log-probabilities"
    targets = Targets.of(batch, Layout.of(batch))
    count = targets.token.shape[0]
    if not count:
        fail(doing, "a batch without loss entries", "at least one", "Partitions hold no such batch.")
    for name, tensor in (("logp", logp), ("entropy", entropy)):
        if tensor is None:
            continue
        if tensor.shape != (count,):
            fail(doing, f"{name} of shape {tuple(tensor.shape)}", f"({count},), one per trained token")
        if not nan_ok and bool(torch.isnan(tensor.detach()).any()):
            bad = int(torch.isnan(tensor.detach()).nonzero()[0])
            fail(doing, f"{name}[{bad}] is NaN (token {targets.token[bad]} of the batch)", "a number")
    if entropy is None and objective.needs_entropy:
        fail(doing, "no entropy for an objective with an entropy bonus", "entropy [U]", "Ask linear_logprob for it.")
    of_entry = torch.from_numpy(targets.of_entry).to(logp.device)
    return weighted_loss(batch, objective, logp[of_entry], None if entropy is None else entropy[of_entry])
