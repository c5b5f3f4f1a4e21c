"""SGLang: its pools as layouts, its slots as blocks, and keys that know the policy version.

`MHATokenToKVPool` keeps a K and a V buffer a layer, [slot, head, element]; a page of `page_size` slots is what is
called a block here, and page 0 is padding. `get_contiguous_buf_infos()` lists the buffers, all K first. SGLang's
prefix cache and its storage hooks do not know policy versions, so `extra_key` must be part of every request.

Imports no SGLang. Invariant: a slot table that is not whole pages in order is refused, not rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.engine import Int32, Region
from gyre_kvxfer.errors import LayoutRefused, explain
from gyre_kvxfer.layout import ITEMSIZE, KVLayout


def from_buffers(
    addresses: Sequence[int],
    sizes: Sequence[int],
    page_sizes: Sequence[int],
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: str,
    tp_size: int = 1,
    tp_rank: int = 0,
    device: str = "cpu",
) -> tuple[KVLayout, list[Region]]:
    """Layout and regions from `get_contiguous_buf_infos()`: addresses, bytes a buffer, bytes a page.

    One buffer a layer means latent attention (`head_dim` is then the latent's width). Raises `LayoutRefused` if the
    numbers contradict one another.
    """
    latent = len(addresses) == layers
    per_token = sum(page_sizes[:1]) // page_size
    heads = 1 if latent else max(1, kv_heads // tp_size)
    want = heads * head_dim * ITEMSIZE.get(dtype, 0)
    fits = len(addresses) in (layers, 2 * layers) and len(set(sizes)) == len(set(page_sizes)) == 1
    if not fits or per_token != want:
        came = f"{len(addresses)} buffers of {sorted(set(sizes))} bytes, {per_token} a token"
        expected = f"{layers} or {2 * layers} equal buffers, {want} bytes a token"
        raise LayoutRefused(explain("reading SGLang's pool", came, expected, "Check heads, head size and dtype."))
    layout = KVLayout(
        layers=layers,
        kv_heads=1 if latent else kv_heads,
        head_dim=head_dim,
        block_size=page_size,
        num_blocks=sizes[0] // page_sizes[0],
        dtype=dtype,
        axes="BTD" if latent else "BTHD",
        across="L" if latent else "KL",
        kind="mla" if latent else "mha",
        tp_size=tp_size,
        tp_rank=tp_rank,
    )
    return layout, [Region(a, n, device, tp_rank) for a, n in zip(addresses, sizes, strict=True)]


def pages(slots: npt.NDArray[np.integer], page_size: int) -> Int32:
    """int32[pages]: the block table of a request's row of `req_to_token`, int[tokens]. The last page may be partly
    used.

    Raises `LayoutRefused` unless every page's slots are consecutive from the page's first, and none is in page 0.
    """
    first = np.asarray(slots)[::page_size]
    want = (first[:, None] + np.arange(page_size)).ravel()[: len(slots)]
    if (first % page_size).any() or not np.array_equal(want, slots) or (len(first) and int(first.min()) < page_size):
        raise LayoutRefused(
            explain(
                "reading a slot table", "slots that are no whole pages", f"pages of {page_size}", "Use page_size > 1."
            )
        )
    return (first // page_size).astype(np.int32)


def slots(block_ids: npt.NDArray[np.integer], page_size: int, n_tokens: int) -> npt.NDArray[np.int64]:
    """int64[n_tokens]: the slots of a sequence held in these pages; the inverse of `pages`."""
    out = np.asarray(block_ids, np.int64)[:, None] * page_size + np.arange(page_size)
    return out.ravel()[:n_tokens]


def extra_key(version: int) -> str:
    """What every request of a policy version carries as `extra_key`: prefixes of two versions then never meet."""
    return f"gyre-v{version}"
