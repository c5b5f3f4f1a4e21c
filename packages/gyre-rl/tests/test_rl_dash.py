"""The pages of `gyre dash` over a made-up tree and a real server."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from aiohttp import ClientSession, web
from gyre_core import ConfigError
from gyre_rl.dash.pages import TOKENS_SHOWN, tree_markup
from gyre_rl.dash.server import make_dash
from gyre_rl.views import events as ev
from gyre_tito import ExecutionSpec, Score, Status, Store, TreeArrays


def arrays(parents, sizes):
    total = sum(sizes)
    sampled = np.arange(total) % 2 == 1
    return TreeArrays(
        np.array(parents, np.int32),
        np.cumsum([0, *sizes]).astype(np.int64),
        np.arange(total, dtype=np.int32),
        sampled,
        np.where(sampled, -0.5, np.nan).astype(np.float32),
        np.where(sampled, 3, -1).astype(np.int32),
        np.zeros(total, np.int32),
    )


def test_each_token_is_shown_once_inside_the_node_that_owns_it():
    markup = tree_markup(arrays([-1, 0, 1, 0, -1], [2, 3, 1, 2, 1]), lambda ids: f"<{ids[0]}>")
    root = ElementTree.fromstring(f"<x>{markup}</x>")
    assert [span.text for span in root.iter("span")] == [f"<{i}>" for i in range(9)]
    depth = {}

    def walk(element, level):
        for child in element:
            if child.tag == "span":
                depth[child.text] = level
            walk(child, level + (child.tag == "div"))

    walk(root, 0)
    assert [depth[f"<{i}>"] for i in range(9)] == [1, 1, 2, 2, 2, 3, 2, 2, 1]
    first = next(span for span in root.iter("span") if span.get("class") == "s")
    assert first.get("title") == "id 1, logprob -0.5000, version 3, call 0"


def test_a_page_has_an_end_and_says_so():
    markup = tree_markup(arrays([-1, 0, 0], [10, TOKENS_SHOWN, 50]), None)
    root = ElementTree.fromstring(f"<x>{markup}</x>")
    assert len(list(root.iter("span"))) == TOKENS_SHOWN
    assert "… 50 tokens more" in markup


async def test_the_pages_are_served(tmp_path):
    with pytest.raises(ConfigError, match=r"no events\.jsonl"):
        make_dash(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(ev.encode(ev.RunStarted("r<", "x", 1, 1).at(1.0)) + b"\n")
    runner = web.AppRunner(make_dash(tmp_path).app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with ClientSession() as http:

            async def get(path):
                async with http.get(base + path) as answer:
                    return answer.status, await answer.text()

            status, text = await get("/")
            assert (status, "r&lt;" in text, 'http-equiv="refresh"' in text) == (200, True, True)
            assert "No execution was recorded yet" in (await get("/executions"))[1]
            with Store.open(tmp_path / "trajectories.db", writable=True) as store:
                await store.add_execution(ExecutionSpec("a/b.0", task="t<", group="g", step=3))
                told = [{"name": "out/x", "passed": True, "weight": 1.0, "evidence": "as long as <it> should be"}]
                await store.close_execution(
                    "a/b.0", Status.COMPLETED, Score(0.5, {"out/x": 1.0}), metadata={"verdict": {"milestones": told}}
                )
            status, text = await get("/executions")
            assert "t&lt;" in text
            (link,) = re.findall(r'href="(/executions/[^"]+)"', text)
            status, text = await get(link)
            assert (status, "Score 0.500" in text, "out/x" in text) == (200, True, True)
            assert "as long as &lt;it&gt; should be" in text
            assert (await get("/executions/no"))[0] == 404
            (tmp_path / "events.jsonl").open("ab").write(ev.encode(ev.RunEnded("finished").at(2.0)) + b"\n")
            assert 'http-equiv="refresh"' not in (await get("/"))[1]
    finally:
        await runner.cleanup()
