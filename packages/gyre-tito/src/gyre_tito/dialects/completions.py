"""OpenAI completions: `POST /v1/completions`, prompts as text or token ids, streamed or not.

No chat format is involved: the prompt's ids are what the client says. Keeps nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from gyre_tito.dialects import common
from gyre_tito.dialects.chat import StreamOptions, finish_reason, logit_bias
from gyre_tito.requests import (
    Answer,
    ApiError,
    Choice,
    Delta,
    Piece,
    SamplingRequest,
    Started,
    TextRequest,
    TokenLogprob,
    invalid,
)


class CompletionBody(msgspec.Struct):
    """A request body; fields that are not named here are ignored."""

    prompt: str | list[str | int | list[int]] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None


def read(body: bytes, vocabulary: int) -> tuple[TextRequest, bool]:
    """Read a request body; returns it and whether to stream."""
    asked = common.decode(body, CompletionBody, "the request body")
    if asked.suffix:
        raise invalid("suffix is not supported; models here only continue text", "suffix")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise invalid("best_of must equal n; every sampled answer is returned", "best_of")
    common.in_range(asked.logprobs, 0, 128, "logprobs")
    if asked.echo and asked.logprobs is not None:
        raise invalid("echo with logprobs is not supported; logprobs exist for sampled tokens only", "echo")
    sampling = SamplingRequest(
        max_tokens=16 if asked.max_tokens is None else asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=None if asked.top_k == -1 else asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
        stop=common.stop_strings(asked.stop),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        ignore_eos=asked.ignore_eos,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        logit_bias=logit_bias(asked.logit_bias),
        logprobs=asked.logprobs is not None,
        top_logprobs=asked.logprobs or 0,
        n=1 if asked.n is None else asked.n,
    )
    prompts = _prompts(asked.prompt, vocabulary)
    if asked.echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid("echo works for prompts that are text; a prompt of token ids is not read as text", "echo")
    usage = bool(asked.stream_options and asked.stream_options.include_usage)
    request = TextRequest(prompts, common.check_sampling(sampling, vocabulary), bool(asked.echo), usage)
    return request, bool(asked.stream)


def _prompts(prompt: Any, vocabulary: int) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise invalid("prompt is missing or empty; send text, token ids, or a list of either", "prompt")
    if all(isinstance(item, int) for item in prompt):
        prompt = [prompt]
    out: list[str | tuple[int, ...]] = []
    for item in prompt:
        if isinstance(item, int):
            raise invalid("prompt mixes token ids with other things; send one list for every prompt", "prompt")
        if not item:
            raise invalid("one of the prompts is empty", "prompt")
        if isinstance(item, list) and not all(0 <= token < vocabulary for token in item):
            raise invalid(f"a prompt has token ids outside this model's vocabulary of {vocabulary}", "prompt")
        out.append(item if isinstance(item, str) else tuple(item))
    return tuple(out)


def response(request: TextRequest, answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """The whole answer, for one or several prompts."""
    choices = [
        _choice(request, choice, place * request.sampling.n, prompt)
        for place, (prompt, answer) in enumerate(zip(request.prompts, answers, strict=True))
        for choice in answer.choices
    ]
    return {
        "id": f"cmpl-{answers[0].answer_id}",
        "object": "text_completion",
        "created": answers[0].created,
        "model": model,
        "choices": choices,
        "usage": _usage(answers),
    }


def _choice(request: TextRequest, choice: Choice, offset: int, prompt: str | tuple[int, ...]) -> dict[str, Any]:
    text = choice.turn.content
    if request.echo:
        text = f"{prompt}{text}"
    return {
        "index": offset + choice.index,
        "text": text,
        "logprobs": _logprobs(choice.logprobs) if request.sampling.logprobs else None,
        "finish_reason": finish_reason(choice),
    }


def _logprobs(tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    offsets, at = [], 0
    for one in tokens:
        offsets.append(at)
        at += len(one.text)
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [dict(one.top) for one in tokens],
        "text_offset": offsets,
    }


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    prompt = sum(answer.prompt_tokens for answer in answers)
    sampled = sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


async def merged(streams: Sequence[AsyncGenerator[Piece]], n: int) -> AsyncGenerator[Piece]:
    """The streams of several prompts one after the other, with choices numbered through. Ends with one `Answer`."""
    answers: list[Answer] = []
    for place, stream in enumerate(streams):
        async with aclosing(stream):
            async for piece in stream:
                if isinstance(piece, Answer):
                    answers.append(piece)
                elif isinstance(piece, Delta):
                    yield replace(piece, index=place * n + piece.index)
                elif place == 0 or not isinstance(piece, Started):
                    yield piece
    choices = tuple(
        replace(choice, index=place * n + choice.index)
        for place, answer in enumerate(answers)
        for choice in answer.choices
    )
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    yield replace(answers[0], choices=choices, prompt_tokens=prompt_tokens)


class TextStream:
    """Chunks of a streamed completion."""

    def __init__(self, request: TextRequest, model: str) -> None:
        self._request = request
        self._base: dict[str, Any] = {"id": "", "object": "text_completion", "created": 0, "model": model}

    def start(self, started: Started) -> bytes:
        """The prompts, if they were to be echoed."""
        self._base = {**self._base, "id": f"cmpl-{started.answer_id}", "created": started.created}
        if not self._request.echo:
            return b""
        n = self._request.sampling.n
        return b"".join(
            self._chunk(place * n + number, str(prompt))
            for place, prompt in enumerate(self._request.prompts)
            for number in range(n)
        )

    def delta(self, delta: Delta) -> bytes:
        """New text."""
        logprobs = _logprobs(delta.logprobs) if delta.logprobs else None
        return self._chunk(delta.index, delta.content, logprobs=logprobs)

    def ping(self) -> bytes:
        """A comment, which clients skip."""
        return b": still working\n\n"

    def error(self, error: ApiError) -> bytes:
        """An error event; the stream ends after it."""
        return common.event(common.openai_error(error))

    def end(self, answer: Answer) -> bytes:
        """Finish reasons, usage, end mark."""
        out = b"".join(self._chunk(one.index, "", finish=finish_reason(one)) for one in answer.choices)
        if self._request.include_usage:
            out += common.event({**self._base, "choices": [], "usage": _usage([answer])})
        return out + b"data: [DONE]\n\n"

    def _chunk(self, index: int, text: str, finish: str | None = None, logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return common.event({**self._base, "choices": [choice]})
