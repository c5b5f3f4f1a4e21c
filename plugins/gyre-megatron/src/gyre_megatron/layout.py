"""How Megatron's parameters lie in those of Hugging Face's names: which rows and columns a rank's share is.

Queries, keys and values of a group of heads are interleaved in one matrix; gate and up are stacked, each sharded for
itself; the vocabulary is padded to a multiple of the ranks. Invariant: the parts of all ranks of one replica, counting
each replicated tensor once, tile the named tensors exactly. Not here: collectives, and which rank this is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre_megatron.families import Shape

View = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a local parameter: `pick` is its view of the parameter (or of a gradient or moment of equal shape),
    `take` that of the full tensor `name`; both of one shape. `replicated`: every tensor-parallel rank has it; `summed`:
    and each computes a different share of its gradient; `expert`: one expert-parallel rank alone has it."""

    name: str
    take: View
    pick: View
    replicated: bool = False
    summed: bool = False
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and shares for one model on tensor rank `rank` of `ranks`, expert rank `expert_rank` of `expert_ranks`."""

    shape: Shape
    rank: int
    ranks: int
    expert_rank: int = 0
    expert_ranks: int = 1

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding over all ranks."""
        return -(-self.shape.vocabulary // self.ranks) * self.ranks

    def full_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every trained parameter of the model, tied ones once."""
        s = self.shape
        query, key = s.heads * s.head_dim, s.kv_heads * s.head_dim
        found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (s.vocabulary, s.hidden))]
        for layer in range(s.layers):
            top = f"model.layers.{layer}."
            for name, rows in (("q", query), ("k", key), ("v", key)):
                found.append((f"{top}self_attn.{name}_proj.weight", (rows, s.hidden)))
                if s.qkv_bias:
                    found.append((f"{top}self_attn.{name}_proj.bias", (rows,)))
            found.append((f"{top}self_attn.o_proj.weight", (s.hidden, query)))
            if s.qk_norm:
                found += [(f"{top}self_attn.{name}_norm.weight", (s.head_dim,)) for name in ("q", "k")]
            found += self._mlp_shapes(top)
            found += [(f"{top}{name}_layernorm.weight", (s.hidden,)) for name in ("input", "post_attention")]
        found.append(("model.norm.weight", (s.hidden,)))
        if not s.tied:
            found.append(("lm_head.weight", (s.vocabulary, s.hidden)))
        return found

    def _mlp_shapes(self, top: str) -> list[tuple[str, tuple[int, ...]]]:
        s = self.shape
        if not s.experts:
            return [
                (f"{top}mlp.gate_proj.weight", (s.intermediate, s.hidden)),
                (f"{top}mlp.up_proj.weight", (s.intermediate, s.hidden)),
                (f"{top}mlp.down_proj.weight", (s.hidden, s.intermediate)),
            ]
        found: list[tuple[str, tuple[int, ...]]] = [(f"{top}mlp.gate.weight", (s.experts, s.hidden))]
        for expert in range(s.experts):
            mine = f"{top}mlp.experts.{expert}."
            found += [(f"{mine}{name}_proj.weight", (s.expert_intermediate, s.hidden)) for name in ("gate", "up")]
            found.append((f"{mine}down_proj.weight", (s.hidden, s.expert_intermediate)))
        return found

    def parts(self, name: str) -> Sequence[Part]:
        """The parts of a Megatron parameter by its name with global layer numbers; ValueError for an unknown one."""
        if name.startswith(("embedding.word_embeddings", "output_layer")):
            tied = self.shape.tied or name.startswith("embedding")
            return [self._vocabulary("model.embed_tokens.weight" if tied else "lm_head.weight")]
        if name == "decoder.final_layernorm.weight":
            return [_whole("model.norm.weight")]
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if found:
            return self._layer(f"model.layers.{found[1]}.", found[2])
        raise ValueError(f"mapping Megatron's parameters: got {name!r}, which no family has")

    def _layer(self, top: str, rest: str) -> Sequence[Part]:
        s = self.shape
        plain = {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "mlp.router.weight": "mlp.gate.weight",
        }
        if rest in plain:
            return [_whole(top + plain[rest])]
        if rest in ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"):
            return [_whole(f"{top}self_attn.{rest.split('.')[1][0]}_norm.weight", summed=True)]
        if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            return self._interleaved(top, rest.rpartition(".")[2])
        if rest == "self_attention.linear_proj.weight":
            return [self._columns(f"{top}self_attn.o_proj.weight", s.heads * s.head_dim)]
        expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", rest)
        if expert:
            number = int(expert[1]) + self.expert_rank * (s.experts // self.expert_ranks)
            mine, width = f"{top}mlp.experts.{number}.", s.expert_intermediate
            found = self._stacked(mine, width) if expert[2] == "linear_fc1" else [self._down(mine, width)]
            return [replace(part, expert=True) for part in found]
        if rest == "mlp.linear_fc1.weight":
            return self._stacked(f"{top}mlp.", s.intermediate)
        if rest == "mlp.linear_fc2.weight":
            return [self._down(f"{top}mlp.", s.intermediate)]
        raise ValueError(f"mapping Megatron's parameters: got {top}{rest}, which no family has")

    def _span(self, size: int) -> slice:
        each = size // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def _vocabulary(self, name: str) -> Part:
        each = self.padded_vocabulary // self.ranks
        start = min(self.rank * each, self.shape.vocabulary)
        stop = min(start + each, self.shape.vocabulary)
        return Part(name, lambda full: full[start:stop], lambda local: local[: stop - start])

    def _interleaved(self, top: str, kind: str) -> list[Part]:
        """Per group of heads: its queries, its key, its value."""
        s = self.shape
        queries, size, groups = s.heads // s.kv_heads, s.head_dim, self._span(s.kv_heads)
        per_group = (queries + 2) * size

        def part(name: str, first: int, count: int) -> Part:
            rows, width = slice(first * size, (first + count) * size), count * size
            return Part(
                f"{top}self_attn.{name}_proj.{kind}",
                lambda full: full.view(s.kv_heads, width, *full.shape[1:])[groups],
                lambda local: local.view(-1, per_group, *local.shape[1:])[:, rows],
            )

        return [part("q", 0, queries), part("k", queries, 1), part("v", queries + 1, 1)]

    def _stacked(self, top: str, width: int) -> list[Part]:
        rows, each = self._span(width), width // self.ranks
        return [
            Part(f"{top}gate_proj.weight", lambda full: full[rows], lambda local: local[:each]),
            Part(f"{top}up_proj.weight", lambda full: full[rows], lambda local: local[each:]),
        ]

    def _down(self, top: str, width: int) -> Part:
        return self._columns(f"{top}down_proj.weight", width)

    def _columns(self, name: str, width: int) -> Part:
        columns = self._span(width)
        return Part(name, lambda full: full[:, columns], _same)


def _same(tensor: Any) -> Any:
    return tensor


def _whole(name: str, *, summed: bool = False) -> Part:
    return Part(name, _same, _same, replicated=True, summed=summed)
