"""Foreign rollouts into a store, with what their files could not say marked unknown.

Unknown logprobs become NaN, unknown policy versions -1, unknown links `unknown`; the execution's metadata names the
file and format. Where a later prompt does not continue what was sampled, a branch is made from the longest true prefix,
as the proxy would have done; nothing is stitched together. Text without tokens can only be imported with a chat format,
and is then marked as encoded from text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gyre_tito.chat_format import ChatFormat
from gyre_tito.foreign import read_rollouts
from gyre_tito.records import CallRecord, ExecutionSpec, Link, Score, SessionInfo, Status
from gyre_tito.rollouts import Rollout, Turn
from gyre_tito.store import Store
from gyre_tito.tree import TrajectoryTree


def calls_of(rollout: Rollout) -> list[CallRecord]:
    """A rollout's turns as call records. Error: ValueError where lengths disagree (see `check`)."""
    tree = TrajectoryTree()
    calls: list[CallRecord] = []
    for index, turn in enumerate(rollout.turns):
        prompt = np.asarray(turn.prompt, dtype=np.int32)
        if turn.continues is not None and turn.parent is not None:
            parent, prefix, context = turn.parent, turn.continues, prompt
        else:
            parent, prefix = tree.longest_prefix(prompt)
            context = prompt[prefix:]
        sampled = np.asarray(turn.sampled, dtype=np.int32)
        call = CallRecord(
            index=index,
            session=turn.session,
            parent=parent,
            prefix_len=prefix,
            context_ids=context,
            sampled_ids=sampled,
            logprobs=_or_unknown(turn.logprobs, len(sampled)),
            versions=_versions(turn, len(sampled)),
            finish=turn.stop_after or "unknown",
            link=Link.UNKNOWN,
            cached_tokens=turn.cached,
            started_at=turn.started_at or 0.0,
            ended_at=turn.ended_at or 0.0,
            meta={"place": turn.place},
        )
        tree.insert(call)
        calls.append(call)
    return calls


def _or_unknown(values: Sequence[float] | None, size: int) -> NDArray[np.float32]:
    return np.full(size, np.nan, dtype=np.float32) if values is None else np.asarray(values, dtype=np.float32)


def _versions(turn: Turn, size: int) -> NDArray[np.int32]:
    return np.full(size, -1, dtype=np.int32) if turn.versions is None else np.asarray(turn.versions, dtype=np.int32)


def encoded_text(rollout: Rollout, chat: ChatFormat) -> Rollout:
    """A text-only rollout with tokens made from its text; they are not the ones that were sampled."""
    turn = Turn(
        chat.encode(rollout.prompt_text or "").tolist(), chat.encode(rollout.text or "").tolist(), place=rollout.place
    )
    return Rollout(
        **{name: getattr(rollout, name) for name in rollout.__slots__}
        | {"turns": (turn,), "metadata": {**rollout.metadata, "encoded_from_text": True}}
    )


async def import_file(
    path: str | Path, store: Store, *, form: str | None = None, chat: ChatFormat | None = None, prefix: str = ""
) -> int:
    """Read a rollout file into `store`; returns how many executions came in. `prefix` goes before their names.

    Errors: `ForeignFileError`; ValueError for rollouts whose lengths disagree, or text without `chat`.
    """
    name, rollouts = read_rollouts(path, form)
    for number, rollout in enumerate(rollouts):
        await _import(rollout, number, name, Path(path), store, chat, prefix)
    return len(rollouts)


async def _import(
    rollout: Rollout, number: int, form: str, path: Path, store: Store, chat: ChatFormat | None, prefix: str
) -> None:
    if not rollout.turns and rollout.text is not None:
        if chat is None:
            raise ValueError(
                f"importing {path}, {rollout.place}: it has text but no tokens; pass a chat format to encode it "
                "(such tokens are not what the engine sampled, and are marked so)"
            )
        rollout = encoded_text(rollout, chat)
    execution = f"{prefix}{rollout.execution}" + (f"#{rollout.row}" if rollout.row else "")
    metadata = {**rollout.metadata, "imported_from": path.name, "format": form, "advantage": rollout.advantage}
    if rollout.version_span:
        metadata["version_span"] = list(rollout.version_span)
    known = {one.execution for one in store.executions(execution=execution)}
    if known:
        execution = f"{execution}#{number}"
    spec = ExecutionSpec(
        execution, rollout.task or "", rollout.group or "", rollout.step or 0, rollout.purpose, metadata
    )
    calls = calls_of(rollout)
    await store.add_execution(spec)
    for session in dict.fromkeys(call.session for call in calls):
        await store.add_session(execution, SessionInfo(session, "main", None, True))
    for call in calls:
        await store.add_call(execution, call)
    if rollout.status is not None or rollout.score is not None:
        score = None if rollout.score is None else Score(rollout.score)
        status = rollout.status or Status.COMPLETED
        cause = "" if rollout.status else "the file does not say how it ended"
        await store.close_execution(execution, status, score, cause)
