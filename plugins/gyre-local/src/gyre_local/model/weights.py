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
class RopeTables:
    """Rotations by position; the same for all versions of a model."""

    cos: torch.Tensor
    """[positions, 1, D]."""
    sin: torch.Tensor
    """[positions, 1, D], negated in its first half, so that rotating is a roll and a product."""


def rope_tables(arch: Architecture, positions: int, dtype: torch.dtype, device: torch.device) -> RopeTables:
    """Computed in float32, as transformers does, then cast."""
    angles = torch.outer(torch.arange(positions).float(), arch.rope.frequencies(arch.head_size))
    cos, sin = angles.cos(), angles.sin()
    return RopeTables(
        torch.cat([cos, cos], -1)[:, None].to(device=device, dtype=dtype),
        torch.cat([-sin, sin], -1)[:, None].to(device=device, dtype=dtype),
    )


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
    rope: RopeTables

    def named(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Where each Hugging Face tensor lies in the fused ones: contiguous windows, several where it is repeated. A
        name that is not here lies nowhere of its own (a tied head)."""
        found: dict[str, tuple[torch.Tensor, ...]] = {
            "model.embed_tokens.weight": (self.embed,), "model.norm.weight": (self.norm,)
        }  # fmt: skip
        if self.head is not self.embed:
            found["lm_head.weight"] = (self.head,)
        for index, layer in enumerate(self.layers):
            found |= {f"model.layers.{index}.{name}": at for name, at in _windows(layer, self.arch).items()}
        return found

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


class _Shelf:
    """Tensors by Hugging Face name, each taken once, copied to the engine's dtype and device."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device, doing: str
    ) -> None:
        self._tensors, self._dtype, self._device, self._doing = tensors, dtype, device, doing
        self._left = set(tensors)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor; InfrastructureError when it is missing or misshapen."""
        found = self._tensors.get(name)
        if found is None or tuple(found.shape) != shape:
            got = f"no tensor {name}" if found is None else f"{name} of shape {list(found.shape)}"
            raise InfrastructureError(
                self._doing, got=got, expected=f"shape {list(shape)} as config.json says",
                fix="Check that weights and config.json belong together.",
            )  # fmt: skip
        self._left.discard(name)
        return found.to(device=self._device, dtype=self._dtype, copy=True)  # never leave a mapped file behind

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._tensors

    def check_empty(self, *ignored: str) -> None:
        """InfrastructureError when a tensor was not used: a model with more parts than we know would run wrongly."""
        left = sorted(n for n in self._left if n not in ignored and not n.endswith("rotary_emb.inv_freq"))
        if left:
            raise InfrastructureError(
                self._doing, got=f"{len(left)} tensors this engine does not know, first {left[:3]}",
                expected="those of a plain Llama, Qwen2 or Qwen3 model",
                fix="Use the vllm or sglang engine for this model.",
            )  # fmt: skip


def fuse(
    tensors: Mapping[str, torch.Tensor],
    arch: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    rope: RopeTables,
    doing: str,
) -> Weights:
    """Weights from Hugging Face names; InfrastructureError naming the first tensor missing, misshapen or unknown."""
    shelf = _Shelf(tensors, dtype, device, doing)
    embed = shelf.take("model.embed_tokens.weight", arch.vocab, arch.hidden)
    tied = arch.tied or not shelf.has("lm_head.weight")
    made = Weights(
        arch=arch,
        embed=embed,
        layers=tuple(_layer(f"model.layers.{index}.", arch, shelf) for index in range(arch.layers)),
        norm=shelf.take("model.norm.weight", arch.hidden),
        head=embed if tied else shelf.take("lm_head.weight", arch.vocab, arch.hidden),
        rope=rope,
    )
    shelf.check_empty("lm_head.weight" if tied else "")
    return made


def _windows(layer: LayerWeights, arch: Architecture) -> dict[str, tuple[torch.Tensor, ...]]:
    """Where a block's Hugging Face tensors lie."""
    heads, kv, size = arch.heads, arch.kv_heads, arch.head_size
    rows = [heads * size, kv * size, kv * size]
    q, k, v = _cut(layer.qkv, rows)
    gate, up = _cut(layer.gate_up, [arch.intermediate] * 2)
    found: dict[str, tuple[torch.Tensor, ...]] = {
        "input_layernorm.weight": (layer.input_norm,),
        "post_attention_layernorm.weight": (layer.post_norm,),
        "self_attn.q_proj.weight": (q,),
        "self_attn.k_proj.weight": (k,),
        "self_attn.v_proj.weight": (v,),
        "self_attn.o_proj.weight": (layer.out,),
        "mlp.gate_proj.weight": (gate,),
        "mlp.up_proj.weight": (up,),
        "mlp.down_proj.weight": (layer.down,),
    }
    if layer.qkv_bias is not None:
        for part, bias in zip("qkv", _cut(layer.qkv_bias, rows), strict=True):
            found[f"self_attn.{part}_proj.bias"] = (bias,)
    if layer.out_bias is not None:
        found["self_attn.o_proj.bias"] = (layer.out_bias,)
    if layer.qk_norm is not None:
        found["self_attn.q_norm.weight"] = tuple(layer.qk_norm[:heads])
        found["self_attn.k_norm.weight"] = tuple(layer.qk_norm[heads:])
    return found


def _cut(tensor: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
    """Windows of so many rows each."""
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    return [tensor[end - count : end] for end, count in zip(ends, rows, strict=True)]


def _layer(prefix: str, arch: Architecture, shelf: _Shelf) -> LayerWeights:
    heads, kv, size, hidden = arch.heads, arch.kv_heads, arch.head_size, arch.hidden
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    rows = {"q": heads * size, "k": kv * size, "v": kv * size}
    qkv_bias = qk_norm = out_bias = None
    if shelf.has(attention + "q_proj.bias"):
        qkv_bias = torch.cat([shelf.take(f"{attention}{part}_proj.bias", n) for part, n in rows.items()])
    if shelf.has(attention + "o_proj.bias"):
        out_bias = shelf.take(attention + "o_proj.bias", hidden)
    if shelf.has(attention + "q_norm.weight"):
        q_norm, k_norm = (shelf.take(f"{attention}{part}_norm.weight", size) for part in ("q", "k"))
        qk_norm = torch.cat([q_norm.expand(heads, size), k_norm.expand(kv, size)])
    return LayerWeights(
        input_norm=shelf.take(prefix + "input_layernorm.weight", hidden),
        qkv=torch.cat([shelf.take(f"{attention}{part}_proj.weight", n, hidden) for part, n in rows.items()]),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        out=shelf.take(attention + "o_proj.weight", hidden, heads * size),
        out_bias=out_bias,
        post_norm=shelf.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=torch.cat(
            [shelf.take(f"{mlp}{part}_proj.weight", arch.intermediate, hidden) for part in ("gate", "up")]
        ),
        down=shelf.take(mlp + "down_proj.weight", hidden, arch.intermediate),
    )
