"""The laws, held against recorded rollouts of any origin: calls and paths.

Pure: rollouts in, findings out. With a `Reader` (a tokenizer's view) causes are named more exactly; without one the
tokens alone decide. Groups and statuses are `gyre_tito.check_groups`, files and stores `gyre_tito.check_files`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_tito.check_cache import check_cache, turn_before
from gyre_tito.check_groups import check_groups
from gyre_tito.findings import Finding
from gyre_tito.rollouts import Ids, Rollout, Turn
from gyre_tito.tree import common_prefix

_AROUND = 6
_PADDING_RUN = 4
# Engine against trainer, in natural logarithms. Two sound stacks in bfloat16 stay well below these.
_MEAN_GAP = 0.05
_WIDE_GAP = 1.0
_WIDE_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Reader:
    """What a model's tokenizer knows: text of ids, stop tokens, tokens that only templates write, vocabulary size."""

    decode: Callable[[Sequence[int]], str]
    stop_ids: tuple[int, ...] = ()
    template_ids: tuple[int, ...] = ()
    vocabulary: int | None = None


def check_rollout(rollout: Rollout, reader: Reader | None = None) -> Iterator[Finding]:
    """Everything that one rollout shows by itself."""
    if not rollout.turns and rollout.text is not None:
        yield Finding("no-tokens", rollout.execution, "text without token ids", rollout.place)
    for number, turn in enumerate(rollout.turns):
        yield from _lengths(rollout, number, turn)
        yield from _logprobs(rollout, number, turn)
        yield from _trains(rollout, number, turn, reader)
        yield from _ids(rollout, number, turn, reader)
        yield from _finish(rollout, number, turn, reader)
    yield from _versions(rollout)
    yield from _paths(rollout, reader)


def _at(code: str, rollout: Rollout, number: int, message: str, token: int | None = None, ids: Ids = ()) -> Finding:
    turn = rollout.turns[number]
    around = () if token is None else tuple(int(one) for one in ids[max(0, token - _AROUND) : token + _AROUND])
    return Finding(code, rollout.execution, message, turn.place or rollout.place, number, token, around)


def _lengths(rollout: Rollout, number: int, turn: Turn) -> Iterator[Finding]:
    for name, values, expected in (
        ("logprobs", turn.logprobs, len(turn.sampled)),
        ("versions", turn.versions, len(turn.sampled)),
        ("loss mask", turn.trains, len(turn.sampled)),
        ("prompt mask", turn.prompt_trains, len(turn.prompt)),
    ):
        if values is not None and len(values) != expected:
            yield _at("length-mismatch", rollout, number, f"{expected} tokens but {len(values)} {name}")


def _logprobs(rollout: Rollout, number: int, turn: Turn) -> Iterator[Finding]:
    if turn.logprobs is None:
        if len(turn.sampled):
            yield _at("logprob-missing", rollout, number, f"{len(turn.sampled)} sampled tokens without logprobs")
        return
    values = np.asarray(turn.logprobs, dtype=np.float64)
    missing = np.flatnonzero(np.isnan(values))
    if len(missing):
        message = f"{len(missing)} of {len(values)} sampled tokens have no logprob"
        yield _at("logprob-missing", rollout, number, message, int(missing[0]), turn.sampled)
    wrong = np.flatnonzero((values > 0) | np.isinf(values))
    if len(wrong):
        at = int(wrong[0])
        yield _at("logprob-impossible", rollout, number, f"logprob {values[at]:g}", at, turn.sampled)
    start, length = longest_run(values == 0.0)
    if length >= _PADDING_RUN and length * 4 >= len(values):
        message = f"{length} tokens in a row have a logprob of exactly 0"
        yield _at("logprob-padding", rollout, number, message, start, turn.sampled)


def longest_run(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """(start, length) of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    best = int(np.argmax(ends - starts))
    return int(starts[best]), int(ends[best] - starts[best])


def _trains(rollout: Rollout, number: int, turn: Turn, reader: Reader | None) -> Iterator[Finding]:
    if turn.prompt_trains is not None and len(turn.prompt_trains) == len(turn.prompt) and any(turn.prompt_trains):
        first = next(at for at, flag in enumerate(turn.prompt_trains) if flag)
        message = f"{sum(map(bool, turn.prompt_trains))} prompt tokens carry loss"
        yield _at("context-trains", rollout, number, message, first, turn.prompt)
    trains = turn.trains if turn.trains is not None else [1] * len(turn.sampled)
    if len(trains) != len(turn.sampled):
        return
    if reader is not None and reader.template_ids:
        for at, (token, flag) in enumerate(zip(turn.sampled, trains, strict=True)):
            if flag and token in reader.template_ids:
                text = reader.decode(turn.sampled[max(0, at - 2) : at + 6])
                message = f"a template's own token is among the trained ones: {text!r}"
                yield _at("context-trains", rollout, number, message, at, turn.sampled)
                break
    idle = len(trains) - sum(map(bool, trains))
    if idle:
        yield _at("sampled-does-not-train", rollout, number, f"{idle} of {len(trains)} sampled tokens carry no loss")


def _ids(rollout: Rollout, number: int, turn: Turn, reader: Reader | None) -> Iterator[Finding]:
    top = reader.vocabulary if reader is not None else None
    for name, ids in (("prompt", turn.prompt), ("sampled", turn.sampled)):
        values = np.asarray(ids, dtype=np.int64)
        wrong = np.flatnonzero((values < 0) | (values >= top if top is not None else False))
        if len(wrong):
            at = int(wrong[0])
            yield _at("token-out-of-range", rollout, number, f"{name} token {values[at]}", at, ids)


def _finish(rollout: Rollout, number: int, turn: Turn, reader: Reader | None) -> Iterator[Finding]:
    if reader is None or not reader.stop_ids or not len(turn.sampled):
        return
    stopped = int(turn.sampled[-1]) in reader.stop_ids
    if turn.stop_after == "stop" and not stopped:
        text = reader.decode(turn.sampled[-4:])
        message = f"the engine stopped, but the last sampled tokens say {text!r}: its stop token was not recorded"
        yield _at("finish-mismatch", rollout, number, message, len(turn.sampled) - 1, turn.sampled)
    if turn.stop_after == "length" and stopped:
        yield _at("finish-mismatch", rollout, number, "cut by length, yet the last token is a stop token")


def _versions(rollout: Rollout) -> Iterator[Finding]:
    seen: list[int] = []
    unknown = 0
    for number, turn in enumerate(rollout.turns):
        if turn.versions is None:
            unknown += len(turn.sampled)
            continue
        known = [int(one) for one in turn.versions if one >= 0]
        unknown += len(turn.versions) - len(known)
        drops = [at for at in range(1, len(known)) if known[at] < known[at - 1]]
        if drops:
            message = f"version {known[drops[0] - 1]} is followed by {known[drops[0]]} inside one call"
            yield _at("version-decreases", rollout, number, message, drops[0], turn.sampled)
        yield from _between(rollout, number, turn, known)
        seen.extend(known)
    span = sorted({*seen, *rollout.version_span})
    if unknown and not rollout.version_span:
        yield Finding("version-missing", rollout.execution, f"{unknown} sampled tokens", rollout.place)
    if len(span) > 1:
        told = not unknown and not rollout.version_span
        message = f"policy versions {', '.join(map(str, span))}" + ("" if told else "; no token says which is its own")
        yield Finding("version-mixed", rollout.execution, message, rollout.place, level="note" if told else "warning")


def _between(rollout: Rollout, number: int, turn: Turn, known: list[int]) -> Iterator[Finding]:
    """Versions never go down from one turn to the next."""
    before = turn_before(rollout, number)
    if before is None or not before.versions or not known:
        return
    if known[0] < max(before.versions):
        message = f"sampled under version {known[0]}, the turn before it under {max(before.versions)}"
        yield _at("version-decreases", rollout, number, message)


def _paths(rollout: Rollout, reader: Reader | None) -> Iterator[Finding]:
    """Does each prompt continue what its session sampled before? Where the file itself says so, it does."""
    last: dict[str, tuple[int, NDArray[np.int32], int]] = {}
    for number, turn in enumerate(rollout.turns):
        if turn.continues is not None:
            continue
        prompt = np.asarray(turn.prompt, dtype=np.int32)
        sampled = np.asarray(turn.sampled, dtype=np.int32)
        if turn.session in last and len(prompt):
            before, path, begin = last[turn.session]
            shared = common_prefix(path, prompt)
            if begin <= shared < len(path):
                code, message = _cause(path, prompt, begin, shared, reader)
                message = f"{message}; turn {before} sampled {len(path) - begin} tokens, {shared - begin} are continued"
                yield _at(code, rollout, number, message, shared, prompt.tolist())
        last[turn.session] = (number, np.concatenate([prompt, sampled]), len(prompt))


def _cause(
    path: NDArray[np.int32], prompt: NDArray[np.int32], begin: int, shared: int, reader: Reader | None
) -> tuple[str, str]:
    """Why a prompt leaves what was sampled (path[begin:]) at `shared`: a code and a sentence."""
    left = len(path) - shared
    if left <= 1:
        return "turn-end", "the turn ends differently"
    if reader is None:
        rest = prompt[shared:]
        meets = any(common_prefix(path[shared + skip :], rest[:left]) >= 2 for skip in range(min(left, 3)))
        return ("retokenized" if meets else "prompt-diverges"), "the prompt leaves the sampled tokens"
    said = reader.decode(path[begin:].tolist())
    rest_text = reader.decode(prompt[begin : begin + 4 * (len(path) - begin) + 64].tolist())
    return _cause_in_text(said, rest_text)


def _cause_in_text(said: str, now: str) -> tuple[str, str]:
    thought = re.search(r"<think>.*?</think>\s*", said, re.DOTALL)
    if thought and thought.group(0).strip() not in now and _begins(now, said.replace(thought.group(0), "")):
        return "reasoning-stripped", "the reasoning is gone from the history"
    if now.startswith(said):
        return "retokenized", f"the text is the same ({said[:40]!r}...) but its tokens are not"
    calls = re.findall(r"<tool_call>(.*?)</tool_call>", said, re.DOTALL)
    again = re.findall(r"<tool_call>(.*?)</tool_call>", now, re.DOTALL)
    if calls and len(again) < len(calls):
        return "tool-call-dropped", f"{len(calls) - len(again)} tool call(s) are missing from the history"
    if calls and again[: len(calls)] != calls:
        same = all(_same_json(a, b) for a, b in zip(calls, again, strict=False))
        what = "means the same but is spelled otherwise" if same else "means something else"
        return "tool-call-rendered", f"a tool call {what}: {calls[0].strip()[:60]!r} became {again[0].strip()[:60]!r}"
    if _begins(now, said):
        return "turn-end", "only white space or the end of the turn differs"
    return "prompt-diverges", f"{said[:40]!r} became {now[:40]!r}"


def _begins(text: str, start: str) -> bool:
    """Whether `text` begins with `start`, white space and turn ends aside."""
    strip = re.compile(r"\s+|<\|[a-z_]+\|>")
    short = strip.sub("", start)
    return strip.sub("", text)[: len(short)] == short


def _same_json(a: str, b: str) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return a.split() == b.split()


def check_rollouts(rollouts: Iterable[Rollout], reader: Reader | None = None) -> list[Finding]:
    """All findings of a set of rollouts, groups and statuses included."""
    kept = list(rollouts)
    found = [finding for rollout in kept for finding in check_rollout(rollout, reader)]
    return [*found, *_gap(kept), *check_cache(kept), *check_groups(kept)]


def _gap(rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    """How far the engine's and the trainer's logprobs are apart, where the file has both; once for all of it."""
    pairs = [
        (turn.logprobs, turn.trainer_logprobs)
        for rollout in rollouts
        for turn in rollout.turns
        if turn.logprobs is not None and turn.trainer_logprobs is not None
    ]
    both = [np.asarray(one, dtype=np.float64) for pair in pairs if len(pair[0]) == len(pair[1]) for one in pair]
    if not both:
        return
    gap = np.abs(np.concatenate(both[::2]) - np.concatenate(both[1::2]))
    gap = gap[np.isfinite(gap)]
    if not len(gap):
        return
    mean, wide = float(gap.mean()), float((gap > _WIDE_GAP).mean())
    message = (
        f"mean {mean:.4f}, largest {gap.max():.3f}, {100 * wide:.2f} % of {len(gap)} tokens differ by more than "
        f"{_WIDE_GAP:g}"
    )
    bad = mean > _MEAN_GAP or wide > _WIDE_SHARE
    yield Finding("logprob-gap", rollouts[0].execution, message, level="warning" if bad else "note")
