"""Stand-ins for tests and benchmarks: a small tokenizer with a Qwen-style chat format, and engines that are token-true.

The engines here obey the whole `Backend` protocol and keep what they were asked and what they answered, so that a test
can hold the recorded tree against the engine's own books. They are not models. Needs no test framework.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from gyre_tito.backend import BackendError, GenerateCall, GenerateChunk
from gyre_tito.chat_format import ChatFormat, HistoryMode
from gyre_tito.families import make_format
from gyre_tito.tokenizer import FastTokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_CORPUS = (
    "You are a helpful agent. Read the files, compute the sum and write the result to out.txt.",
    '{"name": "read_file", "arguments": {"path": "data/input.txt"}}',
    "system user assistant tool the and of to in is that it for on with as 0 1 2 3 4 5 6 7 8 9 10 100",
)


def tiny_tokenizer(vocabulary: int = 400) -> FastTokenizer:
    """A byte-level BPE tokenizer of about `vocabulary` tokens with Qwen3's special tokens; any text round-trips."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(_CORPUS, trainer)
    model.add_tokens([tokenizers.AddedToken(text, normalized=False, special=False) for text in MARKUP])
    return FastTokenizer(model, name="tiny", eos_token="<|im_end|>", chat_template=TEMPLATE)


def tiny_format(family: str = "qwen3", history: HistoryMode = "exact") -> ChatFormat:
    """The tiny tokenizer with a chat format."""
    return make_format(tiny_tokenizer(), family=family, history=history)


def save_tiny_model(folder: Path) -> Path:
    """Write the tiny tokenizer as a model folder that `load_format` reads; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(folder)
    return folder


def rambling_engine() -> BookkeepingEngine:
    """A backend factory for `python -m gyre_tito serve`."""
    return BookkeepingEngine(rambling(tiny_format()))


@dataclass(frozen=True, slots=True, eq=False)
class EngineEntry:
    """One call in an engine's books."""

    call: GenerateCall
    prompt: NDArray[np.int32]
    sampled: list[int]
    logprobs: list[float]
    versions: list[int]


Reply = Sequence[int] | Callable[[GenerateCall], Sequence[int]]


class BookkeepingEngine:
    """Yields ids that `reply` chooses for a call, `chunk` at a time, `delay` seconds apart, and keeps the books.

    `version` may change at any time, also in the middle of a call; every token carries the one of its moment.
    `fail_after`: raise `BackendError` after that many tokens. `gate`: no more than
    `gate_after` tokens are sampled before this event is set. `bump_after`: a new policy version after that many tokens.
    """

    def __init__(
        self,
        reply: Callable[[GenerateCall], Sequence[int]],
        *,
        chunk: int = 4,
        delay: float = 0.0,
        fail_after: int | None = None,
    ) -> None:
        self._reply = reply
        self.chunk = chunk
        self.delay = delay
        self.fail_after = fail_after
        self.version = 0
        self.gate: asyncio.Event | None = None
        self.gate_after = 0
        self.bump_after: int | None = None
        self.books: list[EngineEntry] = []
        self.cancelled = 0

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        """Answer one call."""
        entry = EngineEntry(call, np.array(call.prompt_ids), [], [], [])
        self.books.append(entry)
        ids = list(self._reply(call))[: call.sampling.max_tokens]
        chunks = [ids[at : at + self.chunk] for at in range(0, len(ids), self.chunk)] or [[]]
        finished = False
        try:
            for number, piece in enumerate(chunks):
                if self.gate is not None and len(entry.sampled) >= self.gate_after:
                    await self.gate.wait()
                if self.bump_after is not None and len(entry.sampled) >= self.bump_after:
                    self.version, self.bump_after = self.version + 1, None
                await asyncio.sleep(self.delay)
                if self.fail_after is not None and len(entry.sampled) >= self.fail_after:
                    raise BackendError("the fake engine was told to fail here")
                logprobs = [-(token % 97) / 97 - 0.01 for token in piece]
                entry.sampled.extend(piece)
                entry.logprobs.extend(np.asarray(logprobs, dtype=np.float32).tolist())
                entry.versions.extend([self.version] * len(piece))
                last = number == len(chunks) - 1
                stopped = bool(ids) and ids[-1] in call.sampling.stop_token_ids
                finished = last
                yield GenerateChunk(
                    piece,
                    logprobs,
                    [self.version] * len(piece),
                    ("stop" if stopped else "length") if last else None,
                    cached_tokens=call.new_from,
                )
        finally:
            self.cancelled += not finished


def scripted(chat: ChatFormat, *texts: str) -> Callable[[GenerateCall], list[int]]:
    """Replies with these texts, one a call, in order, each closed by the format's stop token."""
    queue: Iterator[str] = iter(texts)

    def reply(_: GenerateCall) -> list[int]:
        return [*chat.tokenizer.encode(next(queue)), chat.stop_ids[0]]

    return reply


def rambling(chat: ChatFormat, seed: int = 0, longest: int = 24) -> Callable[[GenerateCall], list[int]]:
    """Replies with random ids of the vocabulary (text that does not re-encode to itself), closed at random."""
    rng = random.Random(seed)
    size = len(chat.tokenizer)
    stops = set(chat.stop_ids)

    def reply(_: GenerateCall) -> list[int]:
        ids = [token for token in (rng.randrange(size) for _ in range(rng.randint(1, longest))) if token not in stops]
        return [*ids, chat.stop_ids[0]] if rng.random() < 0.8 or not ids else ids

    return reply
