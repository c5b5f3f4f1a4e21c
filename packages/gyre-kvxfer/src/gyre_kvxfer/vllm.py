"""vLLM: read a layout off its tensors, and move a session between two stock servers with checks in front.

Stock servers move KV with `NixlConnector` (`kv_role: kv_both`, `bidirectional_kv_xfer: true`): a one-token request on
the source returns `kv_transfer_params`, which the destination's next request takes. vLLM itself checks nothing:
blocks offered for another prompt are taken and poison the prefix cache, and parameters are accepted after their
release. So they are wrapped here in an `Export` that names tokens, policy version and age, and `import_request`
refuses what does not fit.

Invariant: no request built here lets KV of another version or prefix be used: the policy version is also the
requests' `cache_salt`. Block digests cannot be had from outside the engine; inside one, use `MigrationServer`.
Imports no vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.engine import Region
from gyre_kvxfer.errors import LayoutRefused, MoveRefused, VerificationFailed, explain
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.naming import TokenDigest

Tokens = npt.NDArray[np.integer]
Json = dict[str, Any]
Post = Callable[[str, Json], Awaitable[Json]]
"""Send a JSON body to a URL, give back the JSON answer; raise on any status but 200."""

TORCH_DTYPES = {
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float8_e4m3fn": "float8_e4m3",
    "torch.float8_e5m2": "float8_e5m2",
}


class Tensor(Protocol):
    """What is asked of a torch tensor here."""

    @property
    def shape(self) -> Sequence[int]:
        """Extents."""
        ...

    @property
    def dtype(self) -> object:
        """torch dtype."""
        ...

    @property
    def device(self) -> object:
        """torch device."""
        ...

    def stride(self) -> Sequence[int]:
        """Steps in elements."""
        ...

    def data_ptr(self) -> int:
        """Address."""
        ...


def from_tensors(
    caches: Mapping[str, Tensor], axes: str, kv_heads: int, *, tp_size: int = 1, tp_rank: int = 0, scales: str = ""
) -> tuple[KVLayout, list[Region]]:
    """Layout and regions of the tensors a connector's `register_kv_caches` is given, one a layer in layer order.

    `axes` names the tensors' dimensions as they are indexed ("BHTKD", "KBTHD", "BTD"; a fused last dimension of
    2·head_dim counts as K and D). Memory order is read off the strides, so a permuted view gives the true layout.
    Raises `LayoutRefused` if layers differ or the memory is not a dense array with at most padding between blocks.
    """
    tensors = list(caches.values())
    if not tensors or any(
        (tuple(t.shape), tuple(t.stride()), t.dtype) != (tuple(x.shape), tuple(x.stride()), x.dtype)
        for t, x in pairwise(tensors)
    ):
        came = sorted({str(tuple(t.shape)) for t in tensors})
        raise LayoutRefused(explain("reading a KV layout off tensors", came, "equal layers", "Describe groups apart."))
    one = tensors[0]
    dtype = TORCH_DTYPES.get(str(one.dtype))
    if dtype is None:
        raise LayoutRefused(explain("reading a KV dtype", one.dtype, sorted(TORCH_DTYPES), "Use one of these."))
    extents, steps = _named(one, axes)
    order = "".join(sorted(extents, key=lambda a: -steps[a]))
    layout = KVLayout(
        layers=len(tensors),
        kv_heads=kv_heads,
        head_dim=extents["D"],
        block_size=extents["T"],
        num_blocks=extents["B"],
        dtype=dtype,
        axes=order,
        across="L",
        kind="mha" if "K" in extents else "mla",
        tp_size=tp_size,
        tp_rank=tp_rank,
        scales=scales,
    )
    pitch = steps["B"] * layout.itemsize
    if pitch != layout.strides["B"]:
        layout = KVLayout(**{**_fields(layout), "block_pitch": pitch})
    want = {a: layout.strides[a] for a in extents if extents[a] > 1}
    got = {a: steps[a] * layout.itemsize for a in extents if extents[a] > 1}
    heads_fit = extents.get("H", 1) == len(layout.heads)
    if want != got or not heads_fit:
        raise LayoutRefused(
            explain("reading a KV layout off tensors", f"strides {got}", f"{want}", "The memory has gaps; describe it.")
        )
    device = str(one.device)
    return layout, [Region(t.data_ptr(), layout.region_nbytes, device, tp_rank) for t in tensors]


def _fields(layout: KVLayout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in KVLayout.__slots__}


def _named(one: Tensor, axes: str) -> tuple[dict[str, int], dict[str, int]]:
    """Extent and step in elements of each axis; a fused last dimension is parted into K and D."""
    shape, stride = list(one.shape), list(one.stride())
    if len(shape) == len(axes) - 1 and axes.endswith("KD"):
        shape[-1:] = [2, shape[-1] // 2]
        stride[-1:] = [shape[-1], stride[-1]]
    if len(shape) != len(axes):
        raise LayoutRefused(
            explain("naming a tensor's dimensions", f"{len(shape)} dimensions", f"{axes!r}", "Correct the axes.")
        )
    return dict(zip(axes, shape, strict=True)), dict(zip(axes, stride, strict=True))


# -- two stock servers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Export:
    """KV a stock server holds for another to fetch: what for (tokens by digest, version) and until when.

    `params`: vLLM's `kv_transfer_params`. `n_tokens`: tokens whose KV is offered. `taken_at`: seconds on the caller's
    clock.
    """

    session: str
    version: int
    n_tokens: int
    token_digest: str
    params: Json
    taken_at: float
    lease_s: float


def salt(version: int) -> str:
    """The `cache_salt` of a policy version: prefix-cache entries of two versions never meet."""
    return f"gyre-v{version}"


def export_request(model: str, tokens: Tokens, version: int) -> Json:
    """Body for the source's `/v1/completions`: keep this context's KV for another server. Decodes one token to throw
    away.
    """
    return {
        "model": model,
        "prompt": [int(t) for t in tokens],
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": salt(version),
        "kv_transfer_params": {"do_remote_decode": True},
    }


def take_request(model: str, request_id: str, version: int) -> Json:
    """Body for the `/v1/completions` of a source with gyre-vllm's connector: end the running call of this id at its
    next token and keep its KV, all but the last token's. The answer is read with `exported`.
    """
    body: Json = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0, "cache_salt": salt(version)}
    return body | {"kv_transfer_params": {"gyre_take": request_id}}


def exported(answer: Json, session: str, tokens: Tokens, version: int, now: float, lease_s: float = 30.0) -> Export:
    """The export in the source's answer. Raises `MoveRefused` if there is none or it is for more than was asked."""
    params = answer.get("kv_transfer_params")
    offered = params.get("remote_num_tokens", len(tokens)) if isinstance(params, dict) else 0
    if not isinstance(params, dict) or not 0 < int(offered) <= len(tokens):
        raise MoveRefused(
            "engine",
            explain(f"exporting {session}", params, f"params for up to {len(tokens)} tokens", "Is NixlConnector on?"),
        )
    digest = TokenDigest("vllm", version).update(np.asarray(tokens)[: int(offered)]).hex()
    params = {name: value for name, value in params.items() if name != _SOURCES_COUNT}
    return Export(session, version, int(offered), digest, params, now, lease_s)


_SOURCES_COUNT = "remote_prefill_cached_tokens"
"""With it a destination tells the source's count of cached tokens for its own, and not how many came."""


def import_request(export: Export, model: str, tokens: Tokens, version: int, now: float, **sampling: Any) -> Json:
    """Body for the destination's `/v1/completions`: go on from `tokens` with the exported KV.

    `tokens` may be longer than what was exported (the rest is computed). Refuses as `check_export`.
    """
    check_export(export, tokens, version, now)
    body = {"model": model, "prompt": [int(t) for t in tokens], "cache_salt": salt(version), **sampling}
    return body | {"kv_transfer_params": export.params}


def check_export(export: Export, tokens: Tokens, version: int, now: float) -> None:
    """Refuse what may not be used for a context that begins with `tokens`: `VerificationFailed` if the exported tokens
    are not a prefix of these or the version is another, `MoveRefused` if the export is too old.
    """
    doing = f"importing {export.session}"
    if version != export.version:
        want = f"version {export.version}"
        raise VerificationFailed(explain(doing, f"version {version}", want, "Prefill it."))
    if now > export.taken_at + export.lease_s:
        raise MoveRefused(
            "lease",
            explain(doing, f"an export {now - export.taken_at:.1f} s old", f"{export.lease_s} s", "Export again."),
        )
    head = np.asarray(tokens)[: export.n_tokens]
    if len(head) < export.n_tokens or TokenDigest("vllm", version).update(head).hex() != export.token_digest:
        raise VerificationFailed(explain(doing, "other tokens", "those that were exported", "Prefill the session."))


async def hand_over(
    post: Post,
    source: str,
    destination: str,
    model: str,
    session: str,
    tokens: Tokens,
    version: int,
    clock: Callable[[], float],
    *,
    warm: bool = False,
    **sampling: Any,
) -> Json:
    """Export at `source`, go on at `destination`; its answer. The caller has ended the session's call at the source.

    `warm`: only bring the KV (one token is decoded and thrown away): a pre-copy round while the source still decodes.
    """
    answer = await post(f"{source}/v1/completions", export_request(model, tokens, version))
    export = exported(answer, session, tokens, version, clock())
    if warm:
        sampling = {"max_tokens": 1, "temperature": 0}
    return await post(
        f"{destination}/v1/completions", import_request(export, model, tokens, version, clock(), **sampling)
    )


_METRIC = re.compile(
    r'^vllm:prompt_tokens_by_source(?:_total)?\{[^}]*source="([^"]+)"[^}]*\}\s+([0-9.eE+-]+)$', re.MULTILINE
)


def prompt_tokens_by_source(metrics: str) -> dict[str, int]:
    """Prompt tokens by where their KV came from, out of a server's `/metrics` text.

    The proof that nothing was prefilled again: `local_compute` must not have grown over a move.
    """
    out: dict[str, int] = {}
    for name, value in _METRIC.findall(metrics):
        out[name] = out.get(name, 0) + int(float(value))
    return out
