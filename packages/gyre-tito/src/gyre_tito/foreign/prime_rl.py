"""prime-rl: the files between its orchestrator and its trainer, and what the trainer exports.

Its rollouts themselves are `traces.jsonl` (see `gyre_tito.foreign.traces`). Micro-batches (`rank_<r>.bin`, msgpack) and
token exports (`token_exports/step_<n>/rank_<r>.jsonl`) are rows of tokens with a loss mask: a message that several
branches share carries loss in the first of them only. Earlier versions wrote `rollouts.bin` with a prompt and a
completion for each example. None of these say groups, scores, statuses or policy versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gyre_tito.foreign import traces
from gyre_tito.foreign.base import ForeignFileError, lines
from gyre_tito.rollouts import Rollout, Turn, packed_turns


def read(where: Path) -> Iterator[Rollout]:
    """Rollouts of any of these files."""
    if where.suffix == ".jsonl":
        _, first = next(lines(where), (0, {}))
        return _exports(where) if "token_ids" in first else traces.read(where)
    return _binary(where)


def _exports(where: Path) -> Iterator[Rollout]:
    for number, row in lines(where):
        name = "/".join(str(row.get(part, "")) for part in ("step", "rank", "micro_step", "micro_sequence_idx"))
        place = f"line {number}"
        turns = _row_turns(row["token_ids"], row["loss_mask"], row["inference_logprobs"], place)
        advantage = _advantage(row.get("advantages"), row["loss_mask"])
        turns = tuple(_with_trainer(turn, row.get("trainer_logprobs")) for turn in turns)
        yield Rollout(name, turns, step=row.get("step"), advantage=advantage, place=place)


def _binary(where: Path) -> Iterator[Rollout]:
    try:
        batch = msgspec.msgpack.decode(where.read_bytes())
    except msgspec.DecodeError as error:
        raise ForeignFileError(f"reading {where}: no msgpack ({error})") from error
    if _is_micro_batches(batch):
        for at, micro in enumerate(batch):
            yield from _micro_batch(micro, at)
        return
    fields = list(batch.values()) if isinstance(batch, dict) else batch
    examples = next((one for one in fields if isinstance(one, list) and one and isinstance(one[0], list | dict)), None)
    if examples is None:
        raise ForeignFileError(f"reading {where}: no list of training examples inside")
    numbers = [one for one in fields if isinstance(one, int) and not isinstance(one, bool)]
    step = batch.get("step") if isinstance(batch, dict) else numbers[-1] if numbers else None
    for at, example in enumerate(examples):
        yield _example(example, at, step)


def _is_micro_batches(batch: Any) -> bool:
    """Whether a file is a list of rows of tokens (and not a list whose first item is a list of examples)."""
    first = batch[0] if isinstance(batch, list) and batch else None
    ids = first[0] if isinstance(first, list) and first else None
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], int)


def _micro_batch(micro: Sequence[Any], at: int) -> Iterator[Rollout]:
    """The sequences that are packed into one micro-batch; padding at the end of the last one is left out."""
    ids, mask, advantages, logprobs, _, sizes, _, names = micro[:8]
    if not len(ids) == len(mask) == len(logprobs) == sum(sizes):
        raise ForeignFileError(
            f"micro-batch {at}: {len(ids)} tokens with {len(mask)} mask entries, {len(logprobs)} logprobs and "
            f"sequences of {sum(sizes)} tokens together; they must agree"
        )
    begin = 0
    for number, size in enumerate(sizes):
        end = begin + size
        while end > begin and not mask[end - 1] and end <= len(names) and names[end - 1] == "":
            end -= 1
        place = f"micro-batch {at}, sequence {number}"
        turns = _row_turns(ids[begin:end], mask[begin:end], logprobs[begin:end], place)
        advantage = _advantage(advantages[begin:end], mask[begin:end])
        yield Rollout(f"{at}/{number}", turns, advantage=advantage, place=place)
        begin += size


def _row_turns(ids: Sequence[int], mask: Sequence[bool], logprobs: Sequence[float], place: str) -> tuple[Turn, ...]:
    first = next((at for at, flag in enumerate(mask) if flag), len(ids))
    return packed_turns(ids, first, [int(flag) for flag in mask[first:]], logprobs[first:], place)


def _with_trainer(turn: Turn, values: Sequence[float | None] | None) -> Turn:
    """A turn of a packed row with the trainer's logprobs, which cover the whole row."""
    begin = (turn.continues or 0) + len(turn.prompt)
    return turn if values is None else replace(turn, trainer_logprobs=values[begin : begin + len(turn.sampled)])


def _advantage(values: Sequence[float | None] | None, mask: Sequence[bool]) -> float | None:
    """The advantage of a row whose tokens all have the same one."""
    own = {value for value, flag in zip(values or (), mask, strict=False) if flag}
    return own.pop() if len(own) == 1 else None


_FIELDS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")


def _example(example: Any, at: int, step: int | None) -> Rollout:
    named: Mapping[str, Any] = example if isinstance(example, dict) else dict(zip(_FIELDS, example, strict=False))
    prompt, completion = named["prompt_ids"], named["completion_ids"]
    place = f"example {at}"
    prompt_mask: list[int] = list(named.get("prompt_mask") or [])
    if any(prompt_mask):
        turn = Turn(
            prompt,
            completion,
            named.get("completion_logprobs"),
            None,
            named.get("completion_mask"),
            prompt_mask,
            place=place,
        )
        turns: tuple[Turn, ...] = (turn,)
    else:
        turns = packed_turns(
            [*prompt, *completion],
            len(prompt),
            named.get("completion_mask"),
            named.get("completion_logprobs"),
            place,
        )
    advantage = named.get("advantage") if isinstance(example, dict) else None
    if advantage is None and not isinstance(example, dict):
        advantage = next((one for one in example[5:] if isinstance(one, float)), None)
    return Rollout(f"example-{at}", turns, step=step, advantage=advantage, place=place)
