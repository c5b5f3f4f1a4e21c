"""How much memory a depth-first tree loss takes: arithmetic, before anybody rents a GPU.

Pure functions of a model's shape and a tree's longest path; docs/why/loss.md derives them. They count what grows
with the tree and the model; allocator overhead and communication buffers are not in them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre_loss._check import fail


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``parameters`` in all; ``layers``; ``hidden`` size; ``intermediate`` size of the MLP; key-value heads x size."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DfsMemory:
    """Bytes per device: ``weights`` and their ``gradients``, ``keys_values`` and ``key_value_gradients`` of one path,
    ``activations`` of one chunk."""

    weights: int
    gradients: int
    keys_values: int
    key_value_gradients: int
    activations: int

    @property
    def total(self) -> int:
        """All of it, bytes."""
        return self.weights + self.gradients + self.keys_values + self.key_value_gradients + self.activations


def dfs_memory(
    shape: ModelShape,
    longest_path: int,
    chunk_tokens: int,
    *,
    ranks: int = 1,
    value_bytes: int = 2,
    gradient_bytes: int = 4,
    checkpointing: bool = True,
) -> DfsMemory:
    """Bytes per device of ``method="dfs"``, the model split evenly over ``ranks`` (tensor parallel).

    ``value_bytes``: of a weight, key or activation; ``gradient_bytes``: of a gradient (keys' and values' gradients
    are accumulated in float32). ``checkpointing``: a chunk keeps one hidden state per layer and the activations of
    one layer instead of all. Raises ValueError for sizes below one.

    >>> qwen3_8b = ModelShape(8_190_735_360, 36, 4096, 12288, 32, 8, 128)
    >>> found = dfs_memory(qwen3_8b, 700_000, 8192, ranks=8)
    >>> round(found.keys_values / 1e9, 1), round(found.key_value_gradients / 1e9, 1)
    (12.9, 25.8)
    """
    if min(longest_path, chunk_tokens, ranks) < 1:
        fail("estimating memory", f"path {longest_path}, chunk {chunk_tokens}, ranks {ranks}", "sizes of one or more")
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim
    chunk = min(chunk_tokens, longest_path)
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = (6 * shape.hidden + (attention + 4 * shape.intermediate) // ranks) * value_bytes
    alive = shape.hidden * value_bytes * shape.layers + layer if checkpointing else layer * shape.layers
    return DfsMemory(
        weights=shape.parameters * value_bytes // ranks,
        gradients=shape.parameters * gradient_bytes // ranks,
        keys_values=per_token * longest_path * value_bytes // ranks,
        key_value_gradients=per_token * longest_path * gradient_bytes // ranks,
        activations=alive * chunk,
    )
