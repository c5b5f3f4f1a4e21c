"""Two real servers that leave KV pages for one another: a session that goes over is not prefilled again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from gyre_core import ComponentContext, FinishReason, WeightSource
from gyre_core.testing.engine_rig import EngineRig, Watched, assert_greedy, call, request_of
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.options import SGLangOptions
from gyre_sglang.sharing import shared_folder

PROMPT = [(11 * i + 5) % 320 for i in range(100)]


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("named", ["", "pages"], ids=["in memory", "in a folder"])
async def test_a_session_finds_its_pages_on_the_other_cell(
    named: str, python: str, folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "pages").mkdir()
    sources = [WeightSource(n, str(folder_of(n))) for n in range(2)]
    options = SGLangOptions(
        python=python, dtype="float32", kv_tokens=8192, context_length=256, chunk_s=0.0, kv_share_gb=0.05,
        kv_share_folder=named,
    )  # fmt: skip
    rig = EngineRig(lambda: a, sources, vocab=320)
    here = {"run_dir": str(tmp_path), "base_dir": str(tmp_path)}
    a, b = (SGLangEngine(options, ComponentContext(name=f"cell-{n}", seed=n, **here)) for n in range(2))
    pages = shared_folder(str(tmp_path), named, str(tmp_path))
    try:
        await asyncio.gather(a.start(sources[0]), b.start(sources[0]))
        running = Watched(a, request_of(PROMPT, 150, name="r", session="s"))
        await running.until(40)
        await a.abort("r")
        part = await running.task
        assert part.finish is FinishReason.ABORT
        context = [*PROMPT, *part.ids]
        on = await call(b, context, 20, name="r", session="s")
        assert on.cached >= (len(context) - 1) // 16 * 16 - 16
        assert_greedy(rig, 0, context, on)
        assert on.ids == (await call(a, context, 20, name="here")).ids

        mixed = Watched(a, request_of(PROMPT[::-1], 140, name="m", session="t"))
        await mixed.until(20)
        await a.update_weights(sources[1])
        through = await mixed.task
        assert set(through.versions) == {0, 1}
        border = len(PROMPT) + through.versions.count(0)
        there = await call(b, [*PROMPT[::-1], *through.ids], 5, name="old", session="t")
        assert there.cached <= border
        assert_greedy(rig, 0, [*PROMPT[::-1], *through.ids], there)
        await b.update_weights(sources[1])
        new = await call(b, PROMPT, 5, name="new", session="u")
        assert new.cached == 0
        assert_greedy(rig, 1, PROMPT, new)
        assert (await call(a, PROMPT, 5, name="shared", session="u")).cached == 96
    finally:
        await asyncio.gather(a.close(), b.close())
    assert pages.is_dir() == bool(named), "memory is given back, a folder of the user's stays"
