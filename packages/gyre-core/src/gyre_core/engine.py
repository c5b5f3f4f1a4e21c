"""The engine protocol: token ids in, sampled ids with behaviour logprobs and policy versions out.

Invariants an engine keeps (checked by `gyre_core.testing.engines`):
  * a sampled token's logprob is that of the distribution it was drawn from: log-softmax of logits /
    temperature over the full vocabulary (before top-k/top-p unless `logprob_space` says otherwise);
  * each token bears the version of the weights that produced it;
  * KV computed under one policy version is never used under another unless asked for;
  * aborting or pausing loses no token that was sampled before.
Not here: text, chat templates, stop strings, tools. Those belong to the recording proxy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Protocol

from gyre_core.arrays import Array
from gyre_core.kv import KVHolder


class FinishReason(StrEnum):
    """Why a call ended at the engine."""

    STOP = "stop"
    """A stop token was sampled; it is the last of the token ids."""
    LENGTH = "length"
    """`max_tokens` or the context limit was reached."""
    ABORT = "abort"
    """Cut from outside (abort, freeze for a move, drain); the caller may go on elsewhere from these tokens."""


class PauseMode(StrEnum):
    """What happens to running calls when the engine pauses."""

    KEEP = "keep"
    """They stay, with their KV, and go on at `resume`."""
    ABORT = "abort"
    """They end with `FinishReason.ABORT` and what was sampled so far."""


class EngineCapability(StrEnum):
    """What an engine may offer beyond `generate`, `abort`, `load` and `update_weights`."""

    PAUSE = "pause"
    SLEEP = "sleep"
    KV_MOVE = "kv_move"
    """Its blocks can be read and written in place; see `KVHolder`."""
    KV_HANDOVER = "kv_handover"
    """It gives a session's KV to another engine of its kind itself; see `KVHandover`."""
    ROUTED_EXPERTS = "routed_experts"
    SEED = "seed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 mean off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"sampling parameters: max_tokens is {self.max_tokens}, expected at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"sampling parameters: temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}; "
                "expected temperature >= 0, 0 < top_p <= 1 and top_k >= 0"
            )

    def rest(self, sampled: int) -> SamplingParams:
        """For a call that goes on with `sampled` of its tokens in the prompt: what is left to sample, with a seed that
        follows from the call's. An engine counts a call's random numbers from its first token; under the same seed it
        would draw the ones again that the tokens before were drawn with."""
        if not sampled:
            return self
        seed = None if self.seed is None else seed_of(self.seed, sampled)
        return replace(self, max_tokens=self.max_tokens - sampled, seed=seed)


def seed_of(seed: int, *parts: object) -> int:
    """A seed for each list of parts, in [0, 2**63), unlike that of any other list; the same in every process."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call. `prompt_ids` are all tokens of the context; the engine finds the cached prefix itself."""

    request_id: str
    session: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    routed_experts: bool = False
    routed_from: int | None = None
    """First position of the context whose experts are wanted too; None: only of the passes that sampled. An engine may
    give fewer rows than asked for, and says where they begin."""


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """Tokens sampled since the last chunk; the three sequences have equal length.

    The last chunk of a call has `finish` set and may be empty of tokens. `cached_tokens` is set on exactly one chunk,
    the first that can tell (some servers tell at the end): prompt tokens whose KV was found, not computed.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    routed_experts: Array | None = None
    """int32 [rows, layers, top_k], when asked for and offered: by default of the passes that sampled this chunk's
    tokens, each of which read the token before."""
    routed_from: int | None = None
    """Position in prompt and sampled tokens that the first row's pass read; None: the one before the chunk's first
    token."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the scheduler needs to know. Counts of now, not averages, but for the two speeds."""

    slots_total: int
    slots_running: int
    waiting: int
    kv_tokens_total: int
    kv_tokens_used: int
    """KV held by running calls (cached prefixes that can be evicted do not count)."""
    version: int
    prefill_tokens_per_s: float | None = None
    """Measured, None before the first measurement."""
    decode_tokens_per_s: float | None = None
    prefilled_tokens: int = 0
    """Prompt tokens computed since start."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache since start."""
    sampled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where a policy version's weights lie, in Hugging Face names."""

    version: int
    location: str
    """A folder with config.json and, for "disk" and "shm", safetensors; for "delta", what changed and a manifest that
    names its base beside it."""
    kind: str = "disk"
    """"disk", "shm" (a folder in this machine's shared memory) or "delta"; what the folder's manifest says counts."""
    digest: str = ""
    """Of the contents, where the publisher knows it: tells a version from another one that lay at the same place."""


class Engine(KVHolder, Protocol):
    """An inference engine on one cell. All methods may be called from one event loop concurrently.

    It may also have `async look() -> frozenset[EngineCapability]`: what it will offer, as a server that runs already
    says when it is asked. It is called before `start`, on an engine that is then thrown away, and starts nothing.
    """

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """What it offers; callers check before they ask."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1 before the first load."""

    async def start(self, source: WeightSource) -> None:
        """Load the model and its first weights and become ready. Called once."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Run a call. Closing the iterator early aborts it. Raises ContextLengthError for a prompt that can never
        fit, ValueError for ids outside the vocabulary or an empty prompt, InfrastructureError if the engine fails."""

    async def abort(self, request_id: str) -> bool:
        """End one call with `FinishReason.ABORT`; False when it is not running."""

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Stop sampling until `resume`, whatever becomes of changes of weights in between; calls that arrive wait."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def load(self) -> EngineLoad:
        """The present load; cheap."""

    async def update_weights(self, source: WeightSource) -> None:
        """Change to another version between two forward passes; running calls go on under it."""

    async def flush_cache(self) -> None:
        """Forget every cached prefix that no running call uses."""

    async def sleep(self) -> None:
        """Give the memory of weights and KV back; running calls end with ABORT."""

    async def wake(self, source: WeightSource) -> None:
        """Take memory and weights again and become ready."""

    async def close(self) -> None:
        """End for good."""
