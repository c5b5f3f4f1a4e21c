"""What a cell's accelerators must hold in each role, estimated from the model's shape before anything is rented.

    weights of P parameters in bfloat16            2 P        every role
    gradients in float32                           4 P        TRAIN
    float32 weights and the two moments of Adam   12 P        the core's TRAIN
    checkpoints of T tree tokens, L layers         2 T L H    TRAIN, with activation recompute
    one layer recomputed, and a tile of logits                TRAIN
    key and value of a token                       4 L G D    ROLLOUT, from what is left

all but the activations divided by the cell's accelerators. What a trainer keeps depends on the trainer: the options of
one that shards less, or that sums gradients in a place of its own, say so by `kept(accelerators, core=...)`, whose
answer (`Kept`) replaces the first three lines in TRAIN. H is the hidden size, G the key-value heads, D their size.
Invariant: pure, and on the careful side: activations are not divided. It does not know of an engine's or trainer's
other options, of fragmentation beyond `RESERVED`, or of quantised weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

GIB = 1 << 30
USABLE = 0.92
"""Share of an accelerator's memory that is left beside its runtime."""
RESERVED = 2 * GIB
"""Work space of kernels and collectives."""
LOGIT_TILE_ROWS = 2048
"""Rows of logits that exist at once (gyre_loss.logprob)."""

Kept: TypeAlias = Mapping[str, tuple[int, int, int]]
"""What a trainer keeps on a cell's accelerators while it trains, by kind: bytes for each weight, over how many
accelerators the weights that every token meets are sharded, and over how many those of experts."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder with grouped-query attention and gated feed-forward layers, dense or with experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    """Width of one expert's (or the dense) feed-forward layer."""
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0

    @property
    def parameters(self) -> int:
        """All weights; norms and biases, less than a thousandth, are left out."""
        return self._with_experts(self.experts or 1)

    @property
    def of_experts(self) -> int:
        """Weights of all experts; 0 in a dense model."""
        return self.layers * 3 * self.hidden * self.feed_forward * self.experts

    @property
    def active(self) -> int:
        """Weights that one token meets."""
        return self._with_experts(self.experts_per_token or 1)

    def _with_experts(self, experts: int) -> int:
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        router = self.hidden * self.experts
        feed = 3 * self.hidden * self.feed_forward * experts
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + feed + router) + embeddings

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of a token in bfloat16, all layers."""
        return 4 * self.layers * self.kv_heads * self.head_size


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face `config.json` describes; KeyError names what it lacks."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        feed_forward=(config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on one accelerator, and what a rollout cell can hold."""

    rollout_weights: int
    satellite: int
    core: int
    usable: int
    kv_tokens: int
    """Tokens of context that one rollout cell holds at once."""
    full_contexts: int
    """Executions at the longest context that one rollout cell holds at once."""


def kept_by_default(accelerators: int, *, core: bool) -> Kept:
    """Of a trainer whose options say nothing: it shards all over all."""
    found = {"weights": 2, "gradients": 4} | ({"optimizer": 12} if core else {})
    return {kind: (size, accelerators, accelerators) for kind, size in found.items()}


def estimate(
    shape: ModelShape,
    *,
    accelerators: int,
    accelerator_gib: float,
    micro_batch_tokens: int,
    context_tokens: int,
    kept: tuple[Kept, Kept] | None = None,
) -> Estimate:
    """The memory of a cell of `accelerators` devices with `accelerator_gib` GiB each. `kept`: what the trainer keeps as
    a satellite and as the core; None: `kept_by_default`."""
    weights = 2 * shape.parameters // accelerators
    of_satellite, of_core = kept or tuple(kept_by_default(accelerators, core=core) for core in (False, True))
    tokens = max(micro_batch_tokens, context_tokens)  # a tree longer than a micro-batch makes one of its own
    checkpoints = 2 * tokens * shape.layers * shape.hidden
    layer = 2 * tokens * (8 * shape.hidden + 4 * shape.feed_forward * max(shape.experts_per_token, 1))
    logits = 2 * 4 * LOGIT_TILE_ROWS * shape.vocabulary
    beside = checkpoints + layer + logits + RESERVED
    satellite, core = (_bytes(shape, each) + beside for each in (of_satellite, of_core))
    usable = int(USABLE * accelerator_gib * GIB)
    kv_tokens = max(0, usable - weights - RESERVED) * accelerators // shape.kv_bytes_per_token
    return Estimate(weights, satellite, core, usable, kv_tokens, kv_tokens // context_tokens)


def _bytes(shape: ModelShape, kept: Kept) -> int:
    """On one accelerator."""
    experts = shape.of_experts
    return sum(
        size * (shape.parameters - experts) // plain + size * experts // expert for size, plain, expert in kept.values()
    )


def problems_of(found: Estimate) -> list[str]:
    """What does not fit, in words; empty when all does."""
    said = []
    for role, need in (("core cell as TRAIN", found.core), ("satellite as TRAIN", found.satellite)):
        if need > found.usable:
            said.append(
                f"a {role} needs about {need / GIB:.0f} GiB an accelerator of which {found.usable / GIB:.0f} are "
                "usable; give the cells more accelerators, a trainer that shards or offloads more, a smaller "
                "loss.micro_batch_tokens, or shorter contexts"
            )
    if not found.full_contexts:
        said.append(
            f"a rollout cell holds {found.kv_tokens} tokens of KV, fewer than one full context; "
            "give the cells more accelerators or lower limits.max_context_tokens"
        )
    return said
