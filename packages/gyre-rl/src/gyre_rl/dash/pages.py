"""Pages about executions: the list, and a trajectory tree down to its tokens.

Invariant: a token is shown once, in the node that owns it; whether it was sampled, with which logprob, under which
policy version and in which call is said for each. Pure functions from records to HTML; text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from urllib.parse import quote

from gyre_tito import ExecutionInfo, TreeArrays

from gyre_rl.views.style import CSS

TOKENS_SHOWN = 20_000
"""Tokens of a tree that one page shows; a page of a million would stall a browser."""
ROWS = 500
STYLE = """
.tree{font:12.5px/1.75 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.node{border-left:2px solid var(--rule);padding-left:10px;margin:4px 0}
.t{color:var(--soft)}.s{border-radius:3px;background:color-mix(in srgb,var(--c1) calc(var(--p)*1%),transparent)}
nav{margin-bottom:14px}nav a{margin-right:16px}a{color:var(--c1)}
"""
Decode = Callable[[Sequence[int]], str]


def page(title: str, body: str, *, refresh_s: int | None = None) -> str:
    """A whole page with the navigation on top; loaded again every `refresh_s` seconds."""
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{again}<title>{escape(title)} · Gyre</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{CSS}{STYLE}</style></head>'
        f'<body><main><nav><a href="/">run</a><a href="/executions">executions</a></nav>{body}</main></body></html>'
    )


def execution_list(infos: Sequence[ExecutionInfo]) -> str:
    """The newest executions first."""
    rows = []
    for info in sorted(infos, key=lambda i: -i.opened_at)[:ROWS]:
        score = "" if info.score is None else f"{info.score.value:.3f}"
        cells = [
            f'<a href="/executions/{quote(info.execution, safe="")}">{escape(info.execution)}</a>',
            escape(info.task),
            str(info.step),
            escape(info.purpose),
            escape(info.status.value),
            score,
            str(info.calls),
            str(info.context_tokens),
            str(info.sampled_tokens),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    names = ("execution", "task", "step", "purpose", "status", "score", "calls", "context tokens", "sampled tokens")
    head = "".join(f"<th>{name}</th>" for name in names)
    more = f'<p class="sub">{len(infos) - ROWS} older ones are not listed.</p>' if len(infos) > ROWS else ""
    return f"<h1>Executions</h1><section><table><tr>{head}</tr>{''.join(rows)}</table></section>{more}"


def execution_page(info: ExecutionInfo, tree: TreeArrays, decode: Decode | None) -> str:
    """How an execution ended, its milestones, and its tree."""
    facts = [info.task, f"step {info.step}", info.status.value, info.cause, f"{info.calls} calls"]
    facts.append(f"{len(tree.token_ids)} tokens in {len(tree.node_parent)} nodes")
    score = "" if info.score is None else f"<section><h2>Score {info.score.value:.3f}</h2>{_milestones(info)}</section>"
    return (
        f'<h1>{escape(info.execution)}</h1><p class="sub">{escape(" · ".join(f for f in facts if f))}</p>{score}'
        "<section><h2>Trajectory tree</h2><p>Indented nodes branch off the one above. Coloured tokens were sampled, "
        "the stronger the likelier; hover for id, logprob, version and call. Only these carry loss, each once.</p>"
        f'<div class="tree">{tree_markup(tree, decode)}</div></section>'
    )


def tree_markup(tree: TreeArrays, decode: Decode | None) -> str:
    """The nodes in preorder, each inside its parent."""
    parts: list[str] = []
    open_nodes: list[int] = []
    for node, parent in enumerate(tree.node_parent.tolist()):
        while open_nodes and open_nodes[-1] != parent:
            open_nodes.pop()
            parts.append("</div>")
        start, end = int(tree.node_start[node]), int(tree.node_start[node + 1])
        if start >= TOKENS_SHOWN:
            parts.append(f"<p>… {len(tree.token_ids) - start} tokens more; `gyre tree` shows them.</p>")
            break
        open_nodes.append(node)
        parts.append(f'<div class="node">{_tokens(tree, start, min(end, TOKENS_SHOWN), decode)}')
    return "".join(parts) + "</div>" * len(open_nodes)


def _tokens(tree: TreeArrays, start: int, end: int, decode: Decode | None) -> str:
    parts = []
    for i in range(start, end):
        token = int(tree.token_ids[i])
        text = escape(f"{token} " if decode is None else decode([token]))
        if tree.sampled[i]:
            logprob = float(tree.logprobs[i])
            strength = round(8 + 42 * math.exp(min(0.0, logprob)))
            tip = f"id {token}, logprob {logprob:.4f}, version {int(tree.versions[i])}, call {int(tree.call_id[i])}"
            parts.append(f'<span class="s" style="--p:{strength}" title="{tip}">{text}</span>')
        else:
            parts.append(f'<span class="t" title="id {token}, call {int(tree.call_id[i])}">{text}</span>')
    return "".join(parts)


def _milestones(info: ExecutionInfo) -> str:
    milestones = {} if info.score is None else info.score.milestones
    told = {each["name"]: each["evidence"] for each in info.metadata.get("verdict", {}).get("milestones", ())}
    rows = "".join(
        f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td><td>{escape(str(told.get(k, '')))}</td></tr>"
        for k, v in milestones.items()
    )
    return f"<table>{rows}</table>"
