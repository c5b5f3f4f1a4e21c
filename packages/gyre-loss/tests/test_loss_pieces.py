"""The loss in pieces, as a trainer with a forward of its own uses it, against each path by itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gyre_loss as gl
import numpy as np
import pytest
import torch
from gyre_loss import pieces
from gyre_loss.layout import paths
from gyre_loss.logprob import linear_logprob
from gyre_loss.surrogates import Reinforce
from torch import nn

OBJECTIVE = gl.PolicyLoss(Reinforce())


def random_forest(seed):
    path = Path(__file__).with_name("test_loss_data.py")
    spec = importlib.util.spec_from_file_location("loss_data_pieces", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.random_forest(seed, 4, 8)


class Stack(nn.Module):
    """A decoder whose layers call a core attention on [tokens, 1, heads, size], as Megatron's do."""

    def __init__(self, layers: int = 2, size: int = 16, vocab: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, size)
        self.place = nn.Embedding(64, size)
        self.qkv = nn.ModuleList(nn.Linear(size, 2 * size) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.head = nn.Linear(size, vocab, bias=False)
        self.double()

    def forward(self, ids, positions, core):
        x = self.embed(ids) + self.place(positions)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(torch.tanh(x))[:, None].split([16, 8, 8], -1)
            mixed = core(q.unflatten(-1, (4, 4)), k.unflatten(-1, (2, 4)), v.unflatten(-1, (2, 4)))
            x = x + out(mixed.flatten(1))
        return x


def causal(query, key, value):
    q, k, v = (t[:, 0].transpose(0, 1)[None] for t in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)[:, None]


def by_paths(model, batch):
    """Sum over entries of -weight * advantage * logp, every path by itself, each token from its first path."""
    total, done = torch.zeros((), dtype=torch.float64), set()
    for path in paths(batch):
        ids = torch.from_numpy(batch.token_ids[path].astype(np.int64))
        log_p = torch.log_softmax(model.head(model(ids, torch.arange(len(path)), causal)), -1)
        for at, token in enumerate(path.tolist()):
            for entry in np.flatnonzero(batch.entry_token == token).tolist():
                if entry not in done:
                    done.add(entry)
                    share = float(batch.entry_weight[entry]) * float(batch.entry_advantage[entry])
                    total = total - share * log_p[at - 1, ids[at]]
    assert len(done) == batch.entries
    return total


def by_pieces(model, batch, kind="auto", checkpoint=False):
    given = pieces.inputs(batch)
    core = pieces.TreeAttention.of(batch, kind=kind)
    if checkpoint:
        run = torch.utils.checkpoint.checkpoint
        hidden = run(model, given.token_ids, given.positions, core, use_reentrant=False)
    else:
        hidden = model(given.token_ids, given.positions, core)
    logp = linear_logprob(hidden[given.rows], model.head.weight, given.wanted).logp
    return pieces.loss(batch, OBJECTIVE, logp)


def gradient(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("kind", ["auto", "dense", "blocked"])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_equal_paths_by_themselves(kind, seed):
    model, batch = Stack(), random_forest(seed)
    want = by_paths(model, batch)
    got = by_pieces(model, batch, kind)
    torch.testing.assert_close(got.loss, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradient(model, got.loss), gradient(model, want), rtol=1e-10, atol=1e-11)
    assert got.metrics.summary()["entries"] == batch.entries


def test_batches_in_flight_and_layers_that_run_again_keep_their_own_forest():
    model, batches = Stack(), [random_forest(5), random_forest(6)]
    want = sum(gradient(model, by_paths(model, batch)) for batch in batches)
    losses = [by_pieces(model, batch, "blocked", checkpoint=True).loss for batch in batches]
    got = gradient(model, losses[0]) + gradient(model, losses[1])
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_padding_changes_nothing_that_trains(multiple):
    model, batch = Stack(), random_forest(3)
    padded = gl.pad(batch, multiple)
    assert padded.tokens % multiple == 0
    assert padded.tokens - batch.tokens < multiple
    one, other = by_pieces(model, batch).loss, by_pieces(model, padded, "blocked").loss
    torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(model, other), gradient(model, one), rtol=1e-10, atol=1e-12)
    assert gl.prune(padded).tokens == gl.prune(batch).tokens


def test_padding_leaves_the_routers_their_choice():
    batch = random_forest(3)
    experts = np.zeros((batch.tokens, 2, 1), np.int16)
    from dataclasses import replace

    padded = gl.pad(replace(batch, routed_experts=experts), batch.tokens + 3)
    assert (padded.routed_experts[batch.tokens :] == -1).all()
    with pytest.raises(ValueError, match="multiple = 0; expected 1 or more"):
        gl.pad(batch, 0)


def test_shapes_that_do_not_fit_are_named():
    batch = random_forest(1)
    attend = pieces.TreeAttention.of(batch)
    size = batch.tokens
    good = torch.zeros(size, 4, 8)
    with pytest.raises(ValueError, match=rf"in layer 3: query \({size - 1}, 4, 8\)"):
        attend(good[1:], good, good, layer=3)
    with pytest.raises(ValueError, match="heads a multiple of kv heads"):
        attend(good, good[:, :3], good[:, :3])
    with pytest.raises(ValueError, match=r"key \(\d+, 2, 8\), value \(\d+, 4, 8\)"):
        attend(good, good[:, :2], good)
    with pytest.raises(ValueError, match="kind 'tiled'"):
        pieces.TreeAttention.of(batch, kind="tiled")


def test_losses_that_cannot_be_are_refused():
    batch = random_forest(1)
    count = pieces.inputs(batch).wanted.shape[0]
    logp = -torch.ones(count, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"logp of shape \({count + 1},\); expected \({count},\)"):
        pieces.loss(batch, OBJECTIVE, torch.ones(count + 1))
    logp[1] = float("nan")
    with pytest.raises(ValueError, match=r"logp\[1\] is NaN \(token \d+ of the batch\)"):
        pieces.loss(batch, OBJECTIVE, logp)
    with pytest.raises(ValueError, match="no entropy for an objective with an entropy bonus"):
        pieces.loss(batch, gl.PolicyLoss(entropy_coefficient=0.1), -torch.ones(count))
