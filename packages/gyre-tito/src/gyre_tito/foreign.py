"""Readers for the rollout files that other frameworks write: verifiers, prime-rl, slime, verl.

Formats as their public code writes them (2025-2026): verifiers `results.jsonl` (one rollout a line, `trajectory` with
`tokens` when saved), prime-rl `rollouts.bin` / `train_rollouts.bin` (msgpack arrays), slime debug dumps (`.pt`, a zip
with a pickle of plain data) and JSON lines of the same samples, verl `<step>.jsonl` (text only). What a format cannot
say stays unknown. Pickles are read by an unpickler that builds plain data only and runs no code.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gyre_tito.records import Status
from gyre_tito.rollouts import Rollout, Turn, packed_turns


class ForeignFileError(ValueError):
    """A rollout file cannot be read; the message says where and what was expected."""


def read_rollouts(path: str | Path, form: str | None = None) -> tuple[str, list[Rollout]]:
    """(format, rollouts) of a file; `form` is one of `FORMATS`, None looks at the content."""
    where = Path(path)
    name = form or _guess(where)
    if name not in FORMATS:
        raise ForeignFileError(f"reading {where}: format {name!r} is unknown; use {', '.join(FORMATS)}")
    try:
        return name, list(FORMATS[name](where))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ForeignFileError(f"reading {where} as {name}: {type(error).__name__}: {error}") from error


def _guess(where: Path) -> str:
    if where.suffix == ".pt":
        return "slime"
    if where.suffix in (".bin", ".msgpack"):
        return "prime-rl"
    first = next(_lines(where), None)
    if first is None:
        raise ForeignFileError(f"reading {where}: the file is empty")
    _, row = first
    if "trajectory" in row or "example_id" in row:
        return "verifiers"
    if "tokens" in row and "response_length" in row:
        return "slime"
    if "input" in row and "output" in row:
        return "verl"
    raise ForeignFileError(
        f"reading {where}: the fields {', '.join(sorted(row)[:8])} fit none of {', '.join(FORMATS)}; name the format"
    )


def _lines(where: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with where.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ForeignFileError(f"reading {where}, line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ForeignFileError(f"reading {where}, line {number}: a {type(row).__name__}, expected an object")
            yield number, row


# -- verifiers ---------------------------------------------------------------------------------------------------


def _verifiers(where: Path) -> Iterator[Rollout]:
    for number, row in _lines(where):
        place = f"line {number}"
        turns = tuple(
            _verifiers_turn(step, f"{place}, step {at}", at, row)
            for at, step in enumerate(row.get("trajectory") or ())
            if step.get("tokens")
        )
        group = str(row["example_id"]) if row.get("example_id") is not None else None
        yield Rollout(
            execution=str(row.get("trajectory_id") or f"{group}/{number}"),
            turns=turns,
            group=group,
            task=row.get("task"),
            status=_verifiers_status(row),
            score=row.get("reward"),
            advantage=row.get("advantage"),
            place=place,
            text=None if turns else _text_of(row.get("completion")),
            prompt_text=None if turns else _text_of(row.get("prompt")),
            metadata={"stop_condition": row.get("stop_condition")},
        )


def _verifiers_turn(step: Mapping[str, Any], place: str, at: int, row: Mapping[str, Any]) -> Turn:
    tokens = step["tokens"]
    cut = bool(step.get("is_truncated") or tokens.get("is_truncated"))
    extras = step.get("extras") or {}
    return Turn(
        prompt=tokens["prompt_ids"],
        sampled=tokens["completion_ids"],
        logprobs=tokens.get("completion_logprobs"),
        trains=tokens.get("completion_mask"),
        prompt_trains=tokens.get("prompt_mask"),
        stop_after="length" if cut else None,
        session=str(extras.get("session") or step.get("trajectory_id") or "main"),
        place=place,
    )


def _verifiers_status(row: Mapping[str, Any]) -> Status | None:
    if row.get("error"):
        return Status.FAILED
    condition = str(row.get("stop_condition") or "")
    if "timeout" in condition:
        return Status.TIMEOUT
    if row.get("is_truncated") and row.get("is_completed") is not True:
        return Status.TRUNCATED
    return Status.COMPLETED if row.get("is_completed") else None


def _text_of(messages: Any) -> str | None:
    if isinstance(messages, list):
        return "\n".join(str(one.get("content") or "") for one in messages if isinstance(one, dict))
    return messages if isinstance(messages, str) else None


# -- prime-rl ----------------------------------------------------------------------------------------------------


def _prime_rl(where: Path) -> Iterator[Rollout]:
    try:
        batch = msgspec.msgpack.decode(where.read_bytes())
    except msgspec.DecodeError as error:
        raise ForeignFileError(f"reading {where}: no msgpack ({error})") from error
    fields = list(batch.values()) if isinstance(batch, dict) else batch
    examples = next((one for one in fields if isinstance(one, list) and one and isinstance(one[0], list | dict)), None)
    if examples is None:
        raise ForeignFileError(f"reading {where}: no list of training examples inside")
    numbers = [one for one in fields if isinstance(one, int) and not isinstance(one, bool)]
    step = batch.get("step") if isinstance(batch, dict) else numbers[-1] if numbers else None
    for at, example in enumerate(examples):
        yield _prime_example(example, at, step)


_PRIME_FIELDS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")


def _prime_example(example: Any, at: int, step: int | None) -> Rollout:
    named: dict[str, Any] = example if isinstance(example, dict) else dict(zip(_PRIME_FIELDS, example, strict=False))
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


# -- slime -------------------------------------------------------------------------------------------------------

_SLIME_STATUS = {
    "completed": Status.COMPLETED,
    "truncated": Status.TRUNCATED,
    "aborted": Status.FAILED,
    "failed": Status.FAILED,
}


def _slime(where: Path) -> Iterator[Rollout]:
    if zipfile.is_zipfile(where):
        loaded = _load_pickle(where)
        samples: Iterable[tuple[str, Mapping[str, Any]]] = (
            (f"sample {at}", sample) for at, sample in enumerate(_flat(loaded["samples"]))
        )
        step = loaded.get("rollout_id")
    else:
        samples = ((f"line {number}", row) for number, row in _lines(where))
        step = None
    for place, sample in samples:
        yield _slime_sample(sample, place, step)


def _flat(samples: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for one in samples:
        if isinstance(one, list):
            yield from _flat(one)
        else:
            yield one


def _slime_sample(sample: Mapping[str, Any], place: str, step: int | None) -> Rollout:
    ids = list(sample["tokens"])
    prompt_len = len(ids) - int(sample["response_length"])
    named = [int(one) for one in sample.get("weight_versions") or () if str(one).lstrip("-").isdigit()]
    size = len(ids) - prompt_len
    versions = [named[0]] * size if len(set(named)) == 1 else None
    reward = sample.get("reward")
    value = str(sample.get("status") or "")
    removed = bool(sample.get("remove_sample"))
    mask: list[int] | None = sample.get("loss_mask")
    return Rollout(
        execution=str(sample.get("index", place)),
        turns=packed_turns(ids, prompt_len, mask, sample.get("rollout_log_probs"), place, versions),
        group=None if sample.get("group_index") is None else str(sample["group_index"]),
        task=_text_of(sample.get("prompt")),
        step=step,
        status=_SLIME_STATUS.get(value),
        score=float(reward) if isinstance(reward, int | float) else None,
        place=place,
        version_span=tuple(named),
        metadata={
            "removed": removed,
            "all_masked": mask is not None and len(mask) > 0 and not any(mask),
            "status": value,
        },
        in_progress=value == "pending",
    )


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain containers only; anything else is refused, so that a rollout file can run no code."""

    _ALLOWED = {("builtins", name): kind for name, kind in (("set", set), ("frozenset", frozenset))}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) in self._ALLOWED:
            return self._ALLOWED[module, name]
        raise ForeignFileError(
            f"the file holds {module}.{name} objects; only plain lists, numbers and text are read. "
            "Save the samples with to_dict() and without tensors"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise ForeignFileError(f"the file holds tensors ({pid!r:.60}); only plain lists and numbers are read")


def _load_pickle(where: Path) -> dict[str, Any]:
    with zipfile.ZipFile(where) as archive:
        name = next((one for one in archive.namelist() if one.endswith("data.pkl")), None)
        if name is None:
            raise ForeignFileError(f"reading {where}: no data.pkl inside; is it a torch.save file?")
        data = archive.read(name)
    loaded = _PlainUnpickler(io.BytesIO(data)).load()
    if not isinstance(loaded, dict) or "samples" not in loaded:
        raise ForeignFileError(f"reading {where}: expected a mapping with 'samples'")
    return loaded


# -- verl --------------------------------------------------------------------------------------------------------


def _verl(where: Path) -> Iterator[Rollout]:
    for number, row in _lines(where):
        score = row.get("score")
        yield Rollout(
            execution=str(row.get("request_id") or row.get("uid") or f"line-{number}"),
            turns=(),
            group=None if row.get("uid") is None else str(row["uid"]),
            task=row.get("input"),
            step=row.get("step"),
            score=float(score) if isinstance(score, int | float) else None,
            place=f"line {number}",
            prompt_text=row["input"],
            text=row["output"],
        )


FORMATS: dict[str, Callable[[Path], Iterator[Rollout]]] = {
    "verifiers": _verifiers,
    "prime-rl": _prime_rl,
    "slime": _slime,
    "verl": _verl,
}
