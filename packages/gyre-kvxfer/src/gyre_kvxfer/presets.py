"""Layouts of known engines, as functions of their numbers.

Each function names the engine's own arrangement; the result is an ordinary `KVLayout`. Invariant: regions are in the
order the engine lists its buffers. Versions change; `from_tensors` in `vllm.py` reads a layout off the real tensors
instead.
"""

from __future__ import annotations

from dataclasses import replace

from gyre_kvxfer.errors import LayoutRefused, explain
from gyre_kvxfer.layout import KVLayout


def paged(layers: int, kv_heads: int, head_dim: int, block_size: int, num_blocks: int, dtype: str) -> KVLayout:
    """Separate K and V pools a layer, [block, token, head, element]; all K regions first, then all V.

    gyre-local's pools, and SGLang's `MHATokenToKVPool` with `num_blocks = size / page_size + 1` (page 0 is padding,
    page ids are slot numbers divided by the page size).
    """
    return KVLayout(layers, kv_heads, head_dim, block_size, num_blocks, dtype, axes="BTHD", across="KL")


def vllm(layers: int, kv_heads: int, head_dim: int, block_size: int, num_blocks: int, dtype: str) -> KVLayout:
    """vLLM as NixlConnector asks for it: one region a layer, [block, head, token, K then V of the head]."""
    return KVLayout(layers, kv_heads, head_dim, block_size, num_blocks, dtype, axes="BHTKD", across="L")


def vllm_flash(layers: int, kv_heads: int, head_dim: int, block_size: int, num_blocks: int, dtype: str) -> KVLayout:
    """vLLM's older arrangement: one region a layer, [K or V, block, token, head, element]."""
    return KVLayout(layers, kv_heads, head_dim, block_size, num_blocks, dtype, axes="KBTHD", across="L")


def mla(layers: int, latent_dim: int, block_size: int, num_blocks: int, dtype: str) -> KVLayout:
    """Latent attention in vLLM and SGLang: one region a layer, [block, token, latent with its rotary part]."""
    return KVLayout(layers, 1, latent_dim, block_size, num_blocks, dtype, axes="BTD", across="L", kind="mla")


HICACHE = {
    "layer_first": "KLBTHD",
    "page_first": "KBTLHD",
    "page_first_direct": "KBLTHD",
    "page_head": "KBHTLD",
}
"""Axes of SGLang's HiCache host pools, by their names there."""


def sglang_host(
    layers: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    num_blocks: int,
    dtype: str,
    *,
    order: str = "layer_first",
) -> KVLayout:
    """SGLang's HiCache host pool: one region, arranged as `order` says."""
    if order not in HICACHE:
        raise LayoutRefused(explain("naming a HiCache layout", repr(order), sorted(HICACHE), "Correct the name."))
    return KVLayout(layers, kv_heads, head_dim, block_size, num_blocks, dtype, axes=HICACHE[order], across="")


def split(layout: KVLayout, tp_size: int, tp_rank: int = 0) -> KVLayout:
    """The layout of one rank of a tensor-parallel engine (heads split, or replicated if there are more ranks)."""
    return replace(layout, tp_size=tp_size, tp_rank=tp_rank)
