"""One model call over OpenAI chat completions, with patience for an endpoint that is busy or restarting.

Invariant: a call returns the assistant message exactly as it came, or raises `ContextFullError` (the model's limit) or
InfrastructureError (ours); nothing else. Every try of one call bears the same `Idempotency-Key`, so that it is sampled
once. When an execution goes on after a restart, calls since its last rest are told again by their keys; where a tool
answered otherwise than before, the endpoint refuses the key and the call takes another. Not here: what the conversation
is about.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from gyre_core import InfrastructureError, ModelEndpoint

_LONGEST_PAUSE_S = 10.0
_KEY = "idempotency-key"
_CONTEXT_CODES = ("context_length_exceeded", "context_window_exceeded")
_CONTEXT_WORDS = ("context length", "maximum context", "context window", "max_model_len", "too many tokens")
_KEPT_OF_MESSAGE = ("role", "content", "tool_calls", "reasoning_content", "reasoning")


class ContextFullError(Exception):
    """The prompt, or prompt plus answer, does not fit the model's context."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call gave. Token counts are the endpoint's; 0 when it does not say."""

    message: Mapping[str, Any]
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int

    @property
    def text(self) -> str:
        """The message's text, empty when it has none."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Its tool calls, as they came."""
        return self.message.get("tool_calls") or ()


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how fast a call is tried again."""

    retries: int
    first_pause_s: float


class ChatClient:
    """Calls one execution's endpoint through a shared HTTP session."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: ModelEndpoint, patience: Patience) -> None:
        self._http, self._endpoint, self._patience = http, endpoint, patience
        self._url = endpoint.base_url.rstrip("/") + "/chat/completions"
        self.trouble = ""
        """What went wrong in the tries since the last answer; empty when nothing did."""

    async def call(self, body: Mapping[str, Any], *, session: str, parent: str | None, key: str) -> Answer:
        """POST `body`; see the module for what is raised."""
        headers = {
            "authorization": f"Bearer {self._endpoint.api_key}",
            "content-type": "application/json",
            _KEY: key,
            self._endpoint.session_header: session,
        }
        if parent is not None:
            headers[self._endpoint.parent_header] = parent
        data = json.dumps({"model": self._endpoint.model, **body}).encode()
        pause, problem = self._patience.first_pause_s, ""
        for attempt in range(self._patience.retries + 1):
            if attempt:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                async with self._http.post(self._url, data=data, headers=headers) as response:
                    status, text = response.status, await response.text()
            except (aiohttp.ClientError, OSError) as error:
                self.trouble = problem = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                self.trouble = ""
                return self._answer(text)
            self.trouble = problem = f"HTTP {status}: {text[:300]}"
            if status == 422 and _KEY in text.lower():
                headers[_KEY] = f"{key}/{attempt + 2}"
                continue
            if status < 500 and status not in (408, 429):
                self._refused(status, text, problem)
        raise self._failed(problem, f"an answer within {self._patience.retries + 1} tries")

    def _refused(self, status: int, text: str, problem: str) -> None:
        lowered = text.lower()
        if status in (400, 413, 422) and any(word in lowered for word in (*_CONTEXT_CODES, *_CONTEXT_WORDS)):
            raise ContextFullError(problem)
        raise self._failed(problem, "a request that the endpoint accepts")

    def failed(self) -> InfrastructureError:
        """Time ran out while the endpoint was in trouble: ours, not the agent's."""
        return self._failed(self.trouble, "an answer before the execution's time was up")

    def _failed(self, got: str, expected: str) -> InfrastructureError:
        return InfrastructureError(f"calling the model at {self._url}", got=got, expected=expected)

    def _answer(self, text: str) -> Answer:
        try:
            body = json.loads(text)
            choice = body["choices"][0]
            message = {
                key: value for key, value in choice["message"].items() if key in _KEPT_OF_MESSAGE and value is not None
            }
            message.setdefault("content", "")
            usage = body.get("usage") or {}
            return Answer(
                message,
                choice.get("finish_reason") or "stop",
                int(usage.get("prompt_tokens") or 0),
                int(usage.get("completion_tokens") or 0),
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._failed(f"{type(error).__name__} in {text[:300]!r}", "a chat completion") from error
