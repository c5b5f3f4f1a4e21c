"""One call in flight: reads the engine's chunks, watches for stop strings, keeps what was sampled whatever happens.

Invariant: every token the engine yielded is kept with its logprob and version, also when the client goes away, a stop
string cuts the answer, or the engine fails half way. The engine's generator is always closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre_tito.backend import Backend, BackendError, GenerateCall, GenerateChunk
from gyre_tito.chat_format import TAIL_TOKENS, ChatFormat, ParsedTurn, Tools
from gyre_tito.execution import Plan
from gyre_tito.growable import Growable
from gyre_tito.notes import RetryNote
from gyre_tito.records import CallRecord
from gyre_tito.requests import SamplingRequest, TokenLogprob

Outcome = Literal["running", "stop", "length", "abort", "stop_string", "disconnect", "error"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a call's tokens are read as text: which tools exist, whether calls are looked for, what stops the answer."""

    tools: Tools = ()
    read_calls: bool = True
    one_call: bool = False
    stop: tuple[str, ...] = ()
    chat: bool = True


class CallRun:
    """The running state of one call."""

    def __init__(self, plan: Plan, call: GenerateCall, chat: ChatFormat, reading: Reading) -> None:
        self.plan = plan
        self.call = call
        self.retry: RetryNote | None = None
        self.reading = reading
        self.queued = True
        self.outcome: Outcome = "running"
        self.error: Exception | None = None
        self.stop_string: str | None = None
        self.cached_tokens: int | None = None
        self.started_at = time.time()
        self.first_token_at: float | None = None
        self._chat = chat
        self._name = hashlib.blake2b(call.call_id.encode(), digest_size=9).hexdigest()
        self.ids: Growable[np.int32] = Growable(np.int32)
        self.logprobs: Growable[np.float32] = Growable(np.float32)
        self.versions: Growable[np.int32] = Growable(np.int32)
        self._top: list[Any] = []
        self._routed: list[tuple[int, NDArray[np.integer[Any]]]] = []

    async def run(self, backend: Backend, progress: Callable[[], None]) -> None:
        """Drive the engine to the call's end. `progress` is called after every chunk. Cancelling means: client gone."""
        stream = backend.generate(self.call)
        try:
            async for chunk in stream:
                self._take(chunk)
                if chunk.finish_reason is not None:
                    self.outcome = chunk.finish_reason
                    break
                if self.reading.stop and self._stopped():
                    self.outcome = "stop_string"
                    break
                progress()
            else:
                self.outcome = "abort"
        except asyncio.CancelledError:
            self.outcome = "disconnect"
        except BackendError as error:
            self.outcome, self.error = "error", error
        except Exception as error:  # noqa: BLE001 - the boundary to foreign engine code: the call is recorded as cut
            self.outcome, self.error = "error", error
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        if self.outcome in ("stop", "length") and self.reading.stop:
            self._stopped()
        progress()

    def _take(self, chunk: GenerateChunk) -> None:
        sizes = (len(chunk.token_ids), len(chunk.logprobs), len(chunk.versions))
        if len(set(sizes)) != 1:
            raise BackendError(
                f"call {self.call.call_id}: the engine sent {sizes[0]} token ids with {sizes[1]} logprobs and "
                f"{sizes[2]} versions; every sampled token needs one of each"
            )
        if sizes[0] and self.first_token_at is None:
            self.first_token_at = time.time()
        if chunk.routed_experts is not None:
            here = len(self.plan.prompt_ids) + len(self.ids)
            self._routed.append((here if chunk.routed_from is None else chunk.routed_from, chunk.routed_experts))
        self.ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.versions.extend(chunk.versions)
        if chunk.top_logprobs is not None:
            self._top.extend(chunk.top_logprobs)
        if chunk.cached_tokens is not None:
            self.cached_tokens = chunk.cached_tokens

    def _stopped(self) -> bool:
        """Whether a stop string is in the newest text; a string of k characters spans at most 4k tokens."""
        window = 4 * max(len(text) for text in self.reading.stop) + 64
        ids = self.ids.view(max(0, len(self.ids) - window)).tolist()
        text = self._chat.decode(ids)
        hits = [(text.find(stop), stop) for stop in self.reading.stop if stop in text]
        if hits:
            self.stop_string = min(hits)[1]
        return bool(hits)

    # -- reading it ----------------------------------------------------------------------------------------------

    def turn(self) -> ParsedTurn:
        """What was sampled so far, as a turn; text after a stop string is cut off."""
        ids = [*self.plan.forced.tolist(), *self.ids.view().tolist()]
        if self.reading.chat:
            turn = self._parse(ids)
        else:
            turn = ParsedTurn(self._chat.decode(self._without_stop(ids)), None, (), False, 0)
        if self.stop_string is None:
            return turn
        content, found, _ = turn.content.partition(self.stop_string)
        calls = () if found else turn.tool_calls
        return ParsedTurn(content, turn.reasoning, calls, turn.reasoning_open, turn.broken_calls)

    def _parse(self, ids: list[int]) -> ParsedTurn:
        prompt = self.plan.prompt_ids[: len(self.plan.prompt_ids) - len(self.plan.forced)]
        turn = self._chat.parse(
            ids,
            tools=self.reading.tools,
            prompt_tail=prompt[-TAIL_TOKENS:].tolist(),
            call_id=self._name,
            read_calls=self.reading.read_calls,
        )
        if self.reading.one_call and len(turn.tool_calls) > 1:
            return ParsedTurn(turn.content, turn.reasoning, turn.tool_calls[:1], turn.reasoning_open, turn.broken_calls)
        return turn

    def _without_stop(self, ids: list[int]) -> list[int]:
        """Ids without the stop token at their end, which a plain completion does not show."""
        stops = {*self.call.sampling.stop_token_ids}
        return ids[:-1] if ids and ids[-1] in stops else ids

    def token_logprobs(self, start: int = 0) -> tuple[TokenLogprob, ...]:
        """Sampled tokens from `start` on with their logprobs, as a client sees them."""
        text = self._chat.tokenizer.token_text
        tops = self._top[start:] or [()] * (len(self.ids) - start)
        return tuple(
            TokenLogprob(text(token), token, logprob, tuple((text(other), value) for other, value in top))
            for token, logprob, top in zip(
                self.ids.view(start).tolist(), self.logprobs.view(start).tolist(), tops, strict=False
            )
        )

    def retry_note(self) -> RetryNote | None:
        """What tells a restarted proxy which named request this call answered."""
        if self.retry is None:
            return None
        top = [list(one) for one in self._top] if self._top else []
        return msgspec.structs.replace(self.retry, stop_string=self.stop_string, top=top)

    def recorded(self, call: CallRecord, retry: RetryNote) -> None:
        """Take over what the store kept of this call."""
        self.ids.extend(call.sampled_ids)
        self.logprobs.extend(call.logprobs)
        self.versions.extend(call.versions)
        self.outcome, self.queued = cast("Outcome", call.finish), False
        self.stop_string, self.cached_tokens, self.started_at = retry.stop_string, call.cached_tokens, call.started_at
        self._top = list(retry.top)

    def record(self, requested: SamplingRequest, meta: dict[str, Any]) -> CallRecord:
        """The call as it goes to tree and store."""
        sampling = self.call.sampling
        kept = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "repetition_penalty": sampling.repetition_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "stop": list(requested.stop),
        }
        if self.error is not None:
            meta = {**meta, "error": f"{type(self.error).__name__}: {self.error}"}
        routed_from, routed = _joined(self._routed)
        return CallRecord(
            index=self.plan.index,
            session=self.plan.session.info.session,
            parent=self.plan.parent,
            prefix_len=self.plan.prefix_len,
            context_ids=self.plan.context_ids,
            sampled_ids=self.ids.view(),
            logprobs=self.logprobs.view(),
            versions=self.versions.view(),
            finish=self.outcome,
            link=self.plan.link,
            cached_tokens=self.cached_tokens,
            started_at=self.started_at,
            ended_at=time.time(),
            sampling=kept,
            routed_experts=routed,
            routed_from=routed_from,
            meta=meta,
        )


def _joined(parts: Sequence[tuple[int, NDArray[np.integer[Any]]]]) -> tuple[int, NDArray[np.int16] | None]:
    """Rows that came in parts, each from its own position on, as one array and where it begins. Rows in between that
    nobody gave are -1; of rows that came twice the later ones stand."""
    if not parts:
        return 0, None
    first = min(start for start, _ in parts)
    last = max(start + len(rows) for start, rows in parts)
    joined = np.full((last - first, *parts[0][1].shape[1:]), -1, np.int16)
    for start, rows in parts:
        joined[start - first : start - first + len(rows)] = rows
    return first, joined
