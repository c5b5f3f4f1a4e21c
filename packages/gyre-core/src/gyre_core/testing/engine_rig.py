"""What the engine suites share: the rig an author gives, calls put together, plain transformers as the oracle.

Invariant: nothing heavy is imported before a test needs it; the oracle keeps no cache and batches nothing.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gyre_core.engine import Engine, EngineCapability, FinishReason, GenerateChunk, GenerateRequest, SamplingParams
from gyre_core.engine import WeightSource as WeightSource


@dataclass(frozen=True, slots=True)
class EngineRig:
    """What the suite needs to know of an engine.

    `make` gives a new engine, not started; two made at once must not disturb each other if it offers `KV_MOVE` or
    `KV_HANDOVER`. `sources` are two or more policy versions, ascending, of one small random model on disk, with 256
    positions or more; their weights must differ enough that greedy tokens do.
    """

    make: Callable[[], Engine]
    sources: Sequence[WeightSource]
    vocab: int
    tolerance: float = 1e-3
    """Allowed difference of logprobs from transformers in float32."""
    cache_block: int = 1
    """Prompt tokens are found in the prefix cache in multiples of this."""
    max_context: int = 256
    """Prompt plus sampled tokens that one call may have; calls beyond it end with LENGTH or are refused."""
    patience: float = 120.0
    """Seconds after which a call counts as hung."""
    kill: Callable[[Engine], Awaitable[None]] | None = None
    """Ends the server of a started engine as an accident would and returns when it is gone; None where there is none,
    or one that others use too."""

    @asynccontextmanager
    async def started(self, version: int = 0) -> AsyncIterator[Engine]:
        """An engine with `sources[version]`, closed afterwards."""
        engine = self.make()
        await engine.start(self.sources[version])
        try:
            yield engine
        finally:
            await engine.close()

    def prompt(self, count: int, seed: int = 0) -> list[int]:
        """Token ids, the same for the same seed."""
        rng = random.Random(seed)
        return [rng.randrange(self.vocab) for _ in range(count)]

    async def within(self, awaitable: Awaitable[Any]) -> Any:
        """The result, or a failed test when it takes longer than `patience`."""
        return await asyncio.wait_for(awaitable, self.patience)

    def oracle(self, version: int = 0) -> Oracle:
        """Plain transformers with that version's weights; skips the test when transformers is not installed."""
        return _oracle(self.sources[version].location)


@dataclass(frozen=True, slots=True)
class Called:
    """A finished call."""

    chunks: tuple[GenerateChunk, ...]

    @property
    def ids(self) -> list[int]:
        """Sampled token ids."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Their behaviour logprobs."""
        return [value for chunk in self.chunks for value in chunk.logprobs]

    @property
    def versions(self) -> list[int]:
        """Policy versions that sampled them."""
        return [version for chunk in self.chunks for version in chunk.versions]

    @property
    def finish(self) -> FinishReason | None:
        """Why it ended."""
        return self.chunks[-1].finish

    @property
    def cached(self) -> int:
        """Prompt tokens that were found in the cache."""
        return sum(chunk.cached_tokens or 0 for chunk in self.chunks)


def request_of(
    prompt: Sequence[int], tokens: int, *, name: str = "call", session: str | None = None, **sampling: Any
) -> GenerateRequest:
    """A request; greedy unless `sampling` says otherwise."""
    return GenerateRequest(name, session or name, prompt, SamplingParams(tokens, **({"temperature": 0.0} | sampling)))


async def call(engine: Engine, prompt: Sequence[int], tokens: int, **how: Any) -> Called:
    """Run a call to its end (see `request_of`)."""
    return Called(tuple([chunk async for chunk in engine.generate(request_of(prompt, tokens, **how))]))


class Watched:
    """A call that runs while the test does other things."""

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        self.chunks: list[GenerateChunk] = []
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._run(engine, request))

    async def _run(self, engine: Engine, request: GenerateRequest) -> Called:
        try:
            async for chunk in engine.generate(request):
                self.chunks.append(chunk)
                self._more.set()
        finally:
            self._more.set()
        return Called(tuple(self.chunks))

    async def until(self, tokens: int) -> None:
        """Wait until so many tokens were handed out, or the call is over."""
        while len(Called(tuple(self.chunks)).ids if self.chunks else []) < tokens and not self.task.done():
            self._more.clear()
            await self._more.wait()


async def eventually(what: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> bool:
    """Whether `what` becomes true in time."""
    for _ in range(max(1, int(seconds / 0.02))):
        if await what():
            return True
        await asyncio.sleep(0.02)
    return await what()


async def is_idle(engine: Engine) -> bool:
    """Whether no call runs or waits and no KV is held for one."""
    load = await engine.load()
    return load.slots_running == load.waiting == load.kv_tokens_used == 0


def needs(engine: Engine, capability: EngineCapability) -> None:
    """Skip the test, saying why, when the engine does not offer it."""
    if capability not in engine.capabilities:
        pytest.skip(f"this engine does not offer {capability.name}")


class Oracle:
    """Plain transformers in float32: the whole sequence computed afresh for every token."""

    def __init__(self, model: Any, torch: Any) -> None:
        self._model, self._torch = model, torch

    def logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> Any:
        """float32 [n, vocab]: row i is the distribution of the token after ids[: i + 1]."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([list(ids)])).logits[0].float()
        return self._torch.log_softmax(logits / temperature, -1)

    def of_sampled(self, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each sampled token after what precedes it."""
        rows = self.logprobs([*prompt, *sampled], temperature)[len(prompt) - 1 : -1]
        return [float(row[token]) for row, token in zip(rows, sampled, strict=True)]

    def margin(self, prompt: Sequence[int], sampled: Sequence[int]) -> float:
        """The largest gap between the best token's logprob and the chosen one's: 0 when all were the best."""
        rows = self.logprobs([*prompt, *sampled])[len(prompt) - 1 : -1]
        return max(float(row.max() - row[token]) for row, token in zip(rows, sampled, strict=True))


@functools.lru_cache(maxsize=8)
def _oracle(location: str) -> Oracle:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    return Oracle(model.eval(), torch)


def assert_greedy(rig: EngineRig, version: int, prompt: Sequence[int], called: Called) -> None:
    """Every token is the oracle's best, up to ties within the tolerance, and its logprob is the oracle's."""
    oracle = rig.oracle(version)
    assert oracle.margin(prompt, called.ids) <= rig.tolerance, "a greedy token is not the most probable one"
    assert called.logprobs == pytest.approx(oracle.of_sampled(prompt, called.ids), abs=rig.tolerance)
