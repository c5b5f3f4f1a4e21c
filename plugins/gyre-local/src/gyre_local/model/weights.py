"""Weights of one policy version, fused for the forward pass.

Invariant: a `Weights` is complete and of one version; it is built aside and put in use by swapping one
reference between two forward passes. Files are read in Hugging Face names; nothing of transformers is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from gyre_core import InfrastructureError
from safetensors import SafetensorError, safe_open

from gyre_local.model.architecture import Architecture

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. H heads, K kv heads, D head size, E hidden, I intermediate."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    """[(H + 2K) D, E]: queries, keys, values."""
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """[H + K, D]: the query norm's weight H times, then the key norm's K times."""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    """[2 I, E]: gate, up."""
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model in the engine's dtype, on the engine's device."""

    arch: Architecture
    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    """[max_positions, 1, D]."""
    sin: torch.Tensor
    """[max_positions, 1, D], negated in its first half, so that rotating is a roll and a product."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters; a tied head counts once."""
        seen: dict[int, int] = {}
        for tensor in (self.embed, self.norm, self.head):
            seen[tensor.data_ptr()] = tensor.nbytes
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                tensor = getattr(layer, name)
                if tensor is not None:
                    seen[tensor.data_ptr()] = tensor.nbytes
        return sum(seen.values())


def read_tensors(folder: str | Path, only: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """All tensors of a model folder (one safetensors file, or shards with their index), on the CPU; with `only`, of
    these files.

    InfrastructureError when files are missing or cut short.
    """
    root = Path(folder)
    doing = f"reading weights from {root}"
    index = root / "model.safetensors.index.json"
    try:
        if only:
            shards = list(only)
        elif index.exists():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            shards = sorted(path.name for path in root.glob("*.safetensors"))
        found: dict[str, torch.Tensor] = {}
        for shard in shards:
            with safe_open(root / shard, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a mapping
                    found[name] = reader.get_tensor(name)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InfrastructureError(
            doing, got=f"{type(error).__name__}: {error}", expected="complete safetensors files",
            fix="The file may be cut short or still being written; publish the version again.",
        ) from error  # fmt: skip
    if not found:
        raise InfrastructureError(
            doing, got="no safetensors file", expected="model.safetensors or shards with an index",
            fix="Check the weight source's location.",
        )  # fmt: skip
    return found


def load_weights(
    folder: str | Path, arch: Architecture, dtype: torch.dtype, device: torch.device, positions: int
) -> Weights:
    """Read and fuse the weights under `folder`; `positions` rows of rope tables."""
    tensors = read_tensors(folder)
    return fuse(tensors, arch, dtype, device, positions, doing=f"taking weights from {folder}")


def fuse(
    tensors: Mapping[str, torch.Tensor],
    arch: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
    doing: str,
) -> Weights:
    """Weights from Hugging Face names; InfrastructureError naming the first tensor missing or misshapen."""

    def take(name: str, *shape: int) -> torch.Tensor:
        found = tensors.get(name)
        if found is None or tuple(found.shape) != shape:
            got = f"no tensor {name}" if found is None else f"{name} of shape {list(found.shape)}"
            raise InfrastructureError(
                doing, got=got, expected=f"shape {list(shape)} as config.json says",
                fix="Check that weights and config.json belong together.",
            )  # fmt: skip
        return found.to(device=device, dtype=dtype, copy=True)  # never leave a mapped file behind

    def maybe(name: str, *shape: int) -> torch.Tensor | None:
        return take(name, *shape) if name in tensors else None

    embed = take("model.embed_tokens.weight", arch.vocab, arch.hidden)
    tied = arch.tied or "lm_head.weight" not in tensors
    frequencies = torch.outer(torch.arange(positions).float(), arch.rope.frequencies(arch.head_size))
    cos, sin = frequencies.cos(), frequencies.sin()
    return Weights(
        arch=arch,
        embed=embed,
        layers=tuple(_layer(f"model.layers.{i}.", arch, take, maybe) for i in range(arch.layers)),
        norm=take("model.norm.weight", arch.hidden),
        head=embed if tied else take("lm_head.weight", arch.vocab, arch.hidden),
        cos=torch.cat([cos, cos], -1)[:, None].to(device=device, dtype=dtype),
        sin=torch.cat([-sin, sin], -1)[:, None].to(device=device, dtype=dtype),
    )


def _layer(prefix, arch, take, maybe) -> LayerWeights:  # type: ignore[no-untyped-def]
    heads, kv, size, hidden = arch.heads, arch.kv_heads, arch.head_size, arch.hidden
    attention = prefix + "self_attn."
    rows = {"q": heads * size, "k": kv * size, "v": kv * size}
    biases = [maybe(f"{attention}{x}_proj.bias", n) for x, n in rows.items()]
    q_norm, k_norm = maybe(attention + "q_norm.weight", size), maybe(attention + "k_norm.weight", size)
    return LayerWeights(
        input_norm=take(prefix + "input_layernorm.weight", hidden),
        qkv=torch.cat([take(f"{attention}{x}_proj.weight", n, hidden) for x, n in rows.items()]),
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        qk_norm=None if q_norm is None else torch.cat([q_norm.expand(heads, size), k_norm.expand(kv, size)]),
        out=take(attention + "o_proj.weight", hidden, heads * size),
        out_bias=maybe(attention + "o_proj.bias", hidden),
        post_norm=take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=torch.cat([take(f"{prefix}mlp.{x}_proj.weight", arch.intermediate, hidden) for x in ("gate", "up")]),
        down=take(prefix + "mlp.down_proj.weight", hidden, arch.intermediate),
    )
