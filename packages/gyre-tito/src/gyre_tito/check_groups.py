"""The laws about executions and groups: endings, scores, baselines. Pure: rollouts in, findings out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gyre_tito.findings import Finding
from gyre_tito.records import Status
from gyre_tito.rollouts import Rollout


def check_groups(rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    """Everything that only shows across rollouts, and everything about how one ended."""
    for rollout in rollouts:
        yield from _ending(rollout)
    yield from _rows(rollouts)
    groups: dict[tuple[int | None, str], list[Rollout]] = defaultdict(list)
    trained = [rollout for rollout in rollouts if rollout.purpose != "eval"]  # a held-out task needs no baseline
    for rollout in trained:
        if rollout.group not in (None, ""):
            groups[rollout.step, str(rollout.group)].append(rollout)
    ungrouped = sum(rollout.group in (None, "") for rollout in trained)
    if ungrouped and len(trained) > 1:
        yield Finding("group-missing", trained[0].execution, f"{ungrouped} of {len(trained)} rollouts have no group")
    yield from _sizes(groups)
    for (_, name), members in groups.items():
        yield from _members(name, members)


def _ending(rollout: Rollout) -> Iterator[Finding]:
    def found(code: str, message: str) -> Finding:
        return Finding(code, rollout.execution, message, rollout.place)

    if _running(rollout):
        yield found("unfinished", "no final status")
    if rollout.status is Status.FAILED and rollout.score is not None:
        yield found("failed-with-score", f"status failed, score {rollout.score:g}")
    last = rollout.turns[-1] if rollout.turns else None
    if rollout.status is Status.COMPLETED and last is not None and last.stop_after == "length":
        yield found("truncated-as-completed", "the last call was cut by a length limit")
    masked = bool(rollout.metadata.get("all_masked") or rollout.metadata.get("removed"))
    if not masked and rollout.turns:
        masks = [turn.trains for turn in rollout.turns]
        masked = all(mask is not None and len(mask) and not any(mask) for mask in masks)
    cut = rollout.status in (Status.TIMEOUT, Status.TRUNCATED, Status.FAILED)
    if cut and masked and rollout.score is not None:
        yield found("cut-in-baseline", f"status {rollout.status}, no token trains, score {rollout.score:g} is kept")


def _running(rollout: Rollout) -> bool:
    return rollout.in_progress or rollout.status is Status.OPEN


def _rows(rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    rows: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        rows[rollout.execution].append(rollout)
    for name, same in rows.items():
        scored = [one for one in same if one.score is not None or one.advantage is not None]
        if len(scored) > 1:
            places = ", ".join(one.place for one in scored[:4])
            yield Finding("rows-count-twice", name, f"{len(scored)} rows carry a reward ({places})", scored[0].place)


def _sizes(groups: dict[tuple[int | None, str], list[Rollout]]) -> Iterator[Finding]:
    """Sizes of groups that have ended. What the infrastructure failed is in no baseline and does not count."""
    ended = [members for members in groups.values() if not any(_running(one) for one in members)]
    sizes = [len({one.execution for one in members if one.status is not Status.FAILED}) for members in ended]
    sizes = [size for size in sizes if size]
    if not sizes:
        return
    first = next(iter(groups.values()))[0]
    if len(sizes) > 1 and max(sizes) == 1:
        yield Finding("group-of-one", first.execution, f"all {len(sizes)} groups have one member", first.place)
    elif min(sizes) != max(sizes):
        message = f"group sizes range from {min(sizes)} to {max(sizes)}"
        yield Finding("group-uneven", first.execution, message, first.place)


def _members(name: str, members: list[Rollout]) -> Iterator[Finding]:
    tasks = {one.task for one in members if one.task}
    if len(tasks) > 1:
        message = f"group {name!r} holds {len(tasks)} different tasks"
        yield Finding("group-mixed", members[0].execution, message, members[0].place)
    scores = [one.score for one in members if one.score is not None and one.status is not Status.FAILED]
    if len(scores) > 1 and len(set(scores)) == 1:
        message = f"group {name!r}: all {len(scores)} scores are {scores[0]:g}"
        yield Finding("group-flat", members[0].execution, message, members[0].place)
