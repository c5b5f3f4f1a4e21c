"""Micro-batches of small groups whose executions branch and share prefixes, and the slow way to their gradient."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import gyre_loss as gl
from gyre_core import MicroBatch
from gyre_loss.shares import alone


def make_batches(seed: int = 0, count: int = 4) -> list[MicroBatch]:
    """Micro-batches of two groups whose executions branch and share prefixes."""
    rng = random.Random(seed)
    found: list[MicroBatch] = []
    for group in range(count // 2):
        prompt = [rng.randrange(320) for _ in range(12)]
        records = []
        for k in range(3):
            tail, branch = ([rng.randrange(320) for _ in range(5 + k)] for _ in range(2))
            ids = [*prompt, *tail, *branch]
            sampled = [False] * 12 + [True] * len(tail) + [False] + [True] * (len(branch) - 1)
            arrays = {
                "node_parent": [-1, 0, 0],
                "node_start": [0, 12, 12 + len(tail), len(ids)],
                "token_ids": ids,
                "sampled": sampled,
                "logprobs": [-3.0 if s else float("nan") for s in sampled],
                "versions": [0 if s else -1 for s in sampled],
            }
            records.append(gl.ExecutionRecord(f"g{group}e{k}", "completed", float(k), arrays))
        made = gl.assemble_group(records, trainer_version=0)
        for part in gl.partition(made.batch, max_tokens=45).parts:
            found.append(MicroBatch(f"b{len(found)}", 1, part.tokens, gl.to_bytes(part)))
    return found


def logprobs(model: Any, batch: MicroBatch) -> list[float]:
    """What the model says of every loss entry of the batch, branch by branch through its own attention."""
    tree = gl.from_bytes(bytearray(batch.blob))
    return [float(value) for value in gl.token_logprobs(model, tree, method="branches")]


def only_in_one(batches: Sequence[MicroBatch]) -> tuple[MicroBatch, str, int]:
    """A micro-batch of several executions, one of them, and a token that stands in the context of that one alone."""
    for batch in batches:
        tree = gl.from_bytes(bytearray(batch.blob))
        names = [name for name, held in zip(tree.execution_ids, tree.held_tokens(), strict=True) if held]
        seen = {name: set(alone(tree, name).token_ids.tolist()) for name in names}
        for name in names if len(names) > 1 else ():
            own = seen[name].difference(*(seen[other] for other in names if other != name))
            if own:
                return batch, name, min(own)
    raise ValueError("looking for a micro-batch with several executions: got none")


def gradient(model: Any, batches: Sequence[MicroBatch]) -> Mapping[str, Any]:
    """Summed gradient of the batches by name: branch by branch through the model's own attention."""
    model.zero_grad()
    for batch in batches:
        tree = gl.from_bytes(bytearray(batch.blob))
        gl.tree_loss(model, tree, gl.PolicyLoss(), method="branches").loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found
