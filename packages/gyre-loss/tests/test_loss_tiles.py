"""Blocks of attention: both ways to compute them, joined and differentiated, against autograd."""

from __future__ import annotations

import pytest
import torch
from gyre_loss import tiles


def inputs(rows, columns, heads=4, kv_heads=2, size=8):
    torch.manual_seed(0)
    shapes = [(heads, rows, size), (kv_heads, columns, size), (kv_heads, columns, size)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def reference(query, key, value, scale, causal):
    wide_k, wide_v = (t.repeat_interleave(query.shape[0] // key.shape[0], 0) for t in (key, value))
    scores = query @ wide_k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return torch.softmax(scores, -1) @ wide_v, torch.logsumexp(scores, -1)


@pytest.fixture(params=["kernel", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(tiles, "_cpu_kernel", lambda name: None)
        monkeypatch.setattr(tiles, "CHUNK", 3)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("rows", "columns", "causal"), [(7, 7, True), (5, 11, False), (1, 1, True), (8, 2, False)])
def test_a_block_equals_autograd(rows, columns, causal):
    query, key, value = inputs(rows, columns)
    want, want_lse = reference(query, key, value, 0.3, causal)
    out, lse = tiles.forward(query.detach(), key.detach(), value.detach(), 0.3, causal)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    grad = torch.randn_like(want)
    found = tiles.backward(grad, query.detach(), key.detach(), value.detach(), out, lse, 0.3, causal)
    for got, expected in zip(found, torch.autograd.grad(want, [query, key, value], grad), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("way")
def test_a_masked_block_equals_autograd():
    query, key, value = inputs(7, 7)
    mask = torch.ones(7, 7).tril().bool()
    mask[4:, 0:3] = False
    wide_k, wide_v = (t.repeat_interleave(2, 0) for t in (key, value))
    scores = (query @ wide_k.transpose(-1, -2) * 0.3).masked_fill(~mask, -torch.inf)
    want = torch.softmax(scores, -1) @ wide_v
    plain = [t.detach() for t in (query, key, value)]
    out, lse = tiles.forward(*plain, 0.3, False, mask)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))
    grad = torch.randn_like(want)
    found = tiles.backward(grad, *plain, out, lse, 0.3, False, mask)
    for got, expected in zip(found, torch.autograd.grad(want, [query, key, value], grad), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("way")
def test_joined_blocks_are_the_whole():
    query, key, value = inputs(6, 10)
    want, want_lse = reference(query, key, value, 0.3, False)
    plain = [t.detach() for t in (query, key, value)]
    out, lse = (t.clone() for t in tiles.forward(plain[0], plain[1][:, :4], plain[2][:, :4], 0.3, False))
    tiles.join(out, lse, *tiles.forward(plain[0], plain[1][:, 4:], plain[2][:, 4:], 0.3, False))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    grad = torch.randn_like(want)
    first, second = (
        tiles.backward(grad, plain[0], plain[1][:, span], plain[2][:, span], out, lse, 0.3, False)
        for span in (slice(0, 4), slice(4, 10))
    )
    expected = torch.autograd.grad(want, [query, key, value], grad)
    torch.testing.assert_close(first[0] + second[0], expected[0])
    torch.testing.assert_close(torch.cat([first[1], second[1]], 1), expected[1])
    torch.testing.assert_close(torch.cat([first[2], second[2]], 1), expected[2])
