"""What the proxy asks of an inference engine: token ids in, sampled token ids out.

Invariant: the engine never sees text, messages or tools, and the proxy never invents a sampled token. Everything
that depends on a model's chat format (stop strings, tool calls, reasoning) is the proxy's business.

This module holds plain data and one protocol. It performs no I/O; adapters live with the engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one call are drawn.

    `max_tokens` counts sampled tokens. `top_k=0`, `top_p=1`, `min_p=0` switch the filters off; `temperature=0` is
    greedy. A sampled token that is in `stop_token_ids` ends the call and is returned (it was sampled, so it trains).
    `top_logprobs` asks for that many alternatives at each position (0: none).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GenerateCall:
    """One request to the engine.

    `prompt_ids` is a read-only int32 array [P]: the whole context, usually a view into the proxy's own buffer (it
    stays valid and unchanged as long as somebody holds it, so it may be kept, but must not be written).
    `new_from` is the index in `prompt_ids` where tokens begin that this session has not sent or sampled before: an
    engine that kept the session's KV has at most `P - new_from` tokens to prefill. `call_id` is unique in the store
    (`<execution>#<index>`); several calls of one execution may run at once.
    """

    call_id: str
    execution: str
    session: str
    prompt_ids: NDArray[np.int32]
    new_from: int
    sampling: Sampling
    purpose: str = "train"


@dataclass(frozen=True, slots=True, eq=False)
class GenerateChunk:
    """Tokens that came out of the engine since the last chunk, in order.

    `token_ids`, `logprobs` and `versions` have the same length. `logprobs` are natural logarithms of the probability
    with which the token was really drawn (the behaviour policy). `versions` is the policy version that sampled each
    token; it may change inside a call. `finish_reason` is set on the last chunk only: `stop` (a stop token was
    sampled, and is included), `length` (the token limit), `abort` (the engine gave up; what came so far is kept).
    `cached_tokens`: prompt tokens that needed no prefill, when the engine knows. `routed_experts` is an integer array
    [R, layers, top_k] whose first row belongs to absolute position `routed_from` of prompt + sampled tokens; without
    `routed_from` it is aligned with `token_ids`. `top_logprobs`: for each token its (token id, logprob) alternatives.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    routed_experts: NDArray[np.integer] | None = None
    routed_from: int | None = None
    top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None


class Backend(Protocol):
    """An engine, a router in front of engines, or a fake: anything that continues token ids.

    Closing the iterator (`aclose`, or cancelling the task that reads it) must stop the generation. A backend may
    move a running call between engines; chunks simply go on. Errors: raise `BackendError` (or a subclass).
    """

    def generate(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        """Start `call` and yield what is sampled until a chunk carries a `finish_reason`."""
        ...


class BackendError(RuntimeError):
    """The engine could not answer. The call is recorded as aborted with whatever was sampled before."""


class BackendOverloadedError(BackendError):
    """The engine has no room now; the client is told to try again."""


class PromptTooLongError(BackendError):
    """The prompt does not fit the engine's context; the client gets its dialect's context-length error."""
