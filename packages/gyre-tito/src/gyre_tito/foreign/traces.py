"""Episodes of verifiers v1: `traces.jsonl`, which its own evaluations and prime-rl's runs write.

A line is an episode: one attempt, with a trace for every agent that took part. A trace is a graph of messages, and a
message holds the tokens that it adds to the path before it, with a mask of those that the model sampled. So a call is a
sampled message: its prompt is its path up to the first sampled token. The policy's versions are told for the whole
episode, as the first and the last one that were live. Raw tensors (routed experts) are not in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_tito.foreign.base import ForeignFileError, lines, text_of
from gyre_tito.records import Status
from gyre_tito.rollouts import Rollout, Turn

_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
_STOPS = {"stop": "stop", "tool_calls": "stop", "length": "length"}

Node = Mapping[str, Any]


def read(where: Path) -> Iterator[Rollout]:
    """A rollout for every trace; an episode that failed before its first trace is one without calls."""
    for number, row in lines(where):
        episode = row if "traces" in row else {**row, "traces": [row]}
        traces: list[Node] = episode["traces"]
        for at, trace in enumerate(traces):
            place = f"line {number}" + (f", trace {at}" if len(traces) > 1 else "")
            yield _rollout(episode, trace, place, alone=len(traces) == 1)
        if not traces:
            yield Rollout(
                execution=str(episode.get("id") or f"line-{number}"),
                turns=(),
                group=_group(episode),
                task=_task(episode),
                step=_work(episode).get("step"),
                status=Status.FAILED if episode.get("errors") else None,
                place=f"line {number}",
                purpose="eval" if _work(episode).get("type") == "eval" else "train",
            )


def _rollout(episode: Node, trace: Node, place: str, *, alone: bool) -> Rollout:
    agent: Node = trace.get("agent") or {}
    name = str(agent.get("name") or "agent")
    trains = agent.get("trainable") is not False
    work = _work(episode)
    policy = work.get("policy") or {}
    span = tuple(int(policy[end]) for end in ("start", "end") if end in policy) if trains else ()
    turns = tuple(_turns(trace, span[0] if len(set(span)) == 1 else None, place))
    group = _group(episode)
    nodes: Sequence[Node] = trace.get("nodes") or ()
    return Rollout(
        execution=str(episode.get("id") or trace.get("id") or place) + ("" if alone else f"/{name}"),
        turns=turns,
        group=group if alone or group is None else f"{group}/{name}",
        task=_task(trace) or _task(episode),
        step=work.get("step"),
        status=_status(trace),
        score=_score(trace),
        place=place,
        text=None if turns else text_of([node.get("message") for node in nodes]),
        prompt_text=None if turns else "",
        version_span=span,
        metadata={"agent": name, "trainable": trains, "stop_condition": trace.get("stop_condition")},
        purpose="train" if trains and work.get("type") != "eval" else "eval",
    )


def _work(episode: Node) -> Node:
    """What a training run used the episode for: its step, `train` or `eval`, the policies that were live."""
    return (episode.get("run") or {}).get("work") or {}


def _group(episode: Node) -> str | None:
    group = (episode.get("group") or {}).get("id")
    return None if group is None else str(group)


def _task(one: Node) -> str | None:
    task: Node = one.get("task") or {}
    found = task.get("key") or task.get("hash")
    return None if found is None else str(found)


def _turns(trace: Node, version: int | None, place: str) -> Iterator[Turn]:
    nodes: Sequence[Node] = trace.get("nodes") or ()
    calls = {call["node"]: call for call in trace.get("calls") or () if call.get("node") is not None}
    turn_of: dict[int, int] = {}
    path_len: dict[int, int] = {}
    for at, node in enumerate(nodes):
        if not node.get("sampled") or not node.get("token_ids"):
            continue
        before, context = _up_to_a_call(nodes, at, turn_of, place)
        ids, mask = list(node["token_ids"]), list(node.get("mask") or ())
        first = mask.index(True) if True in mask else len(ids)
        prompt = [token for one in context for token in one.get("token_ids") or ()] + ids[:first]
        sampled, trains = ids[first:], mask[first:]
        call = calls.get(at) or {}
        time = call.get("time") or {}
        yield Turn(
            prompt=prompt,
            sampled=sampled,
            logprobs=_spread(node.get("logprobs"), trains),
            versions=None if version is None else [version] * len(sampled),
            trains=trains,
            prompt_trains=[flag for one in context for flag in one.get("mask") or ()] + mask[:first],
            stop_after=_STOPS.get(str(call.get("finish_reason"))),
            cached=(call.get("usage") or {}).get("cached_input_tokens"),
            parent=None if before is None else turn_of[before],
            continues=0 if before is None else path_len[before],
            started_at=time.get("start"),
            ended_at=time.get("end"),
            place=f"{place}, message {at}",
        )
        turn_of[at] = len(turn_of)
        path_len[at] = (0 if before is None else path_len[before]) + len(prompt) + len(sampled)


def _up_to_a_call(
    nodes: Sequence[Node], at: int, turn_of: Mapping[int, int], place: str
) -> tuple[int | None, list[Node]]:
    """(the nearest sampled message above `at`, the messages between them in order)."""
    between: list[Node] = []
    below, up = at, nodes[at].get("parent")
    while up is not None and up not in turn_of:
        if not 0 <= up < below:
            raise ForeignFileError(f"{place}: message {below} has message {up} as its parent, which is not before it")
        between.append(nodes[up])
        below, up = up, nodes[up].get("parent")
    return up, between[::-1]


def _spread(values: Sequence[float] | None, trains: Sequence[bool]) -> list[float] | None:
    """Logprobs, which the file has for sampled tokens only, beside the tokens; lengths that disagree stay so."""
    if not values:
        return None
    if len(values) != sum(map(bool, trains)):
        return list(values)
    rest = iter(values)
    return [next(rest) if flag else math.nan for flag in trains]


def _status(trace: Node) -> Status | None:
    """How the trace ended. Its own rule for what was cut: a limit of the framework, or a last answer that was."""
    stop = str(trace.get("stop_condition") or "")
    if not trace.get("ok"):
        errors = trace.get("errors") or ()
        if errors and str(errors[-1].get("message") or "").startswith("agent timeout"):
            return Status.TIMEOUT
        if errors or stop == "error":
            return Status.FAILED
    answered = [call for call in trace.get("calls") or () if not call.get("error")]
    if stop in _LIMITS or (answered and answered[-1].get("finish_reason") == "length"):
        return Status.TRUNCATED
    return Status.COMPLETED if trace.get("is_completed") else None


def _score(trace: Node) -> float | None:
    """The weighted sum of the rewards that were given; None if scoring did not run."""
    given = [one for one in (trace.get("rewards") or {}).values() if one is not None]
    return sum(one["score"] * one.get("weight", 1.0) for one in given) if given else None
