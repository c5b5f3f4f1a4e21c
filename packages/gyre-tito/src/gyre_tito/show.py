"""Trajectory trees as text for people: lists, trees, tokens, differences. Pure: data in, lines out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from gyre_tito.records import CallRecord, ExecutionInfo
from gyre_tito.tree import TrajectoryTree, common_prefix

Decode = Callable[[Sequence[int]], str]


def list_lines(infos: Iterable[ExecutionInfo]) -> list[str]:
    """One line for every execution."""
    lines = [f"{'execution':<28} {'status':<10} {'score':>6} {'step':>5} {'calls':>5} {'context':>9} {'sampled':>8}"]
    for info in infos:
        score = "-" if info.score is None else f"{info.score.value:.3f}"
        lines.append(
            f"{info.execution:<28} {info.status:<10} {score:>6} {info.step:>5} {info.calls:>5} "
            f"{info.context_tokens:>9} {info.sampled_tokens:>8}"
        )
    return lines


def tree_lines(tree: TrajectoryTree, calls: Sequence[CallRecord], decode: Decode | None = None) -> list[str]:
    """The tree, one line for every node: tokens, who owns it, policy versions, the beginning of its text."""
    by_index = {call.index: call for call in calls}
    ending: dict[int, list[int]] = {}
    for index in tree.calls:
        ending.setdefault(tree.place(index).leaf, []).append(index)
    lines: list[str] = []
    stack = [(node, "") for node in reversed(tree.children())]
    while stack:
        at, indent = stack.pop()
        node = tree.node(at)
        call = by_index.get(node.call)
        size = node.end - node.start
        text = "" if decode is None else " " + _short(decode(tree.node_ids(at).tolist()))
        if node.sampled and call is not None:
            versions = sorted({*call.versions.tolist()})
            marks = [str(call.link) if call.link is not None else "", f"v{','.join(map(str, versions))}", call.finish]
            what = f"sampled {size:>6}  call {node.call} ({call.session}; {'; '.join(marks)})"
        else:
            what = f"context {size:>6}  first in call {node.call}"
        others = [one for one in ending.get(at, []) if one != node.call]
        shared = f" (also call {', '.join(map(str, others))})" if others else ""
        lines.append(f"{indent}{'●' if node.sampled else '○'} {what}{shared}{text}")
        children = tree.children(at)
        deeper = indent + ("  " if len(children) > 1 else "")
        stack.extend((child, deeper) for child in reversed(children))
    return lines


def token_lines(tree: TrajectoryTree, call: int, decode: Decode | None = None, last: int | None = None) -> list[str]:
    """One line for every token of a call's path: place, id, sampled or not, logprob, version, text."""
    view = tree.path(call)
    begin = 0 if last is None else max(0, len(view.token_ids) - last)
    lines = [f"{'at':>7} {'id':>7}  own  {'logprob':>9} {'version':>7}  text"]
    for at in range(begin, len(view.token_ids)):
        token = int(view.token_ids[at])
        sampled = bool(view.sampled[at])
        logprob = f"{view.logprobs[at]:9.4f}" if sampled else " " * 9
        version = f"{view.versions[at]:7d}" if sampled else " " * 7
        text = "" if decode is None else repr(decode([token]))[1:-1]
        lines.append(f"{at:>7} {token:>7}  {'S' if sampled else '.'}    {logprob} {version}  {text}")
    return lines


def diff_lines(tree: TrajectoryTree, first: int, second: int, decode: Decode | None = None) -> list[str]:
    """Where two calls' paths part, and what each goes on with."""
    a, b = tree.path_ids(first), tree.path_ids(second)
    shared = common_prefix(a, b)
    lines = [f"calls {first} and {second} share {shared} of {len(a)} and {len(b)} tokens"]
    for name, ids in ((first, a), (second, b)):
        rest = ids[shared : shared + 40].tolist()
        text = "" if decode is None else f" {_short(decode(rest))}"
        lines.append(f"  {name:>4}: {' '.join(map(str, rest[:12]))}{' ...' if len(rest) > 12 else ''}{text}")
    return lines


def _short(text: str, size: int = 60) -> str:
    shown = repr(text)[1:-1]
    return f"'{shown}'" if len(shown) <= size else f"'{shown[: size // 2]} … {shown[-size // 2 :]}'"


def summary(tree: TrajectoryTree) -> dict[str, int]:
    """Counts of one tree: calls, nodes, leaves, branch points, tokens, sampled tokens."""
    sampled = int(np.sum([tree.node(node).sampled for node in tree.preorder()])) if tree.node_count else 0
    return {
        "calls": len(tree.calls),
        "nodes": tree.node_count,
        "sampled_nodes": sampled,
        "leaves": len(tree.leaves()),
        "branch_points": len(tree.branch_points()),
        "tokens": tree.token_count,
        "sampled_tokens": tree.sampled_count,
    }
