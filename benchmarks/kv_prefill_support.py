"""What both halves of kv_vs_prefill.py share: the model, prompts, a timed call, the comparison of a live move."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gyre_core import Engine, GenerateRequest, SamplingParams
from transformers import AutoModelForCausalLM, Qwen3Config

VOCAB = 1024


def shape_of(hidden: int, layers: int) -> dict[str, int]:
    """A Qwen3 with few heads and a wide feed-forward part: as with real models, most of a prefill is not attention."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }


def make_model(folder: str, longest: int, shape: dict[str, int]) -> None:
    """A random model of this shape."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, vocab_size=VOCAB, max_position_embeddings=2 * longest, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def prompt_of(session: str, n: int) -> list[int]:
    """n random tokens that no other session has."""
    rng = random.Random(session)
    return [rng.randrange(VOCAB) for _ in range(n)]


def nothing_yet() -> dict[str, Any]:
    """What `sample` fills while it runs."""
    return {"ids": [], "logprobs": [], "at": [], "computed": 0, "finish": "", "request": ""}


async def sample(
    engine: Engine, session: str, prompt: list[int], count: int, out: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a greedy call: tokens, logprobs, when each came, prompt tokens computed, how it ended."""
    out = nothing_yet() if out is None else out
    out["request"] = f"{session}-{time.monotonic_ns()}"
    request = GenerateRequest(out["request"], session, prompt, SamplingParams(count, temperature=0.0))
    async for chunk in engine.generate(request):
        out["ids"] += chunk.token_ids
        out["logprobs"] += chunk.logprobs
        out["at"] += [time.monotonic()] * len(chunk.token_ids)
        if chunk.cached_tokens is not None:
            out["computed"] = len(prompt) - chunk.cached_tokens
        if chunk.finish is not None:
            out["finish"] = str(chunk.finish)
    return out


@dataclass(frozen=True)
class Moved:
    """What a move brought and how long it took."""

    bytes: int
    tokens: int
    seconds: float


class Pair(Protocol):
    """A source and a destination of one kind of engine."""

    name: str
    short: tuple[int, ...]
    model: dict[str, int]
    live_model: dict[str, int]
    """Shapes of the models for lengths and for live moves."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def wake(self) -> None: ...

    async def fill(self, session: str, n: int) -> list[int]: ...

    async def move(self, session: str) -> Moved: ...

    async def next_token(self, session: str, context: list[int]) -> dict[str, Any]: ...

    async def forget(self) -> None: ...


def summary(part: dict[str, Any], rest: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """A live move: `part` at the source, `rest` at the destination, `alone` the same call without a move."""
    got, want = part["logprobs"] + rest["logprobs"], alone["logprobs"]
    gap = 1e3 * float(np.median(np.diff(alone["at"])) or np.mean(np.diff(alone["at"])))
    pause = 1e3 * (rest["at"][0] - part["at"][-1])
    return {
        "sampled_before": len(part["ids"]),
        "pause_ms": round(pause, 2),
        "token_gap_ms": round(gap, 2),
        "pause_in_gaps": round(pause / gap, 2),
        "computed_at_destination": rest["computed"],
        "same_tokens": part["ids"] + rest["ids"] == alone["ids"],
        "logprob_difference": float(np.max(np.abs(np.array(got) - np.array(want)))),
    }
