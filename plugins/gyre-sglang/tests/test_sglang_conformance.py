"""gyre-sglang passes the suite of engines against a real server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, WeightSource
from gyre_core.testing.engines import EngineConformance, EngineRig
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.options import SGLangOptions

OWN_SERVER = ("sleep", "outside_its_life")
"""Tests that need a server of their own; the others share one, which each takes over as it comes."""


async def kill(engine: Any) -> None:
    """What a sleeping engine has: its server, or on a CPU the spare one."""
    process = engine._starter._spare or engine._server.process
    os.killpg(process._process.pid, signal.SIGKILL)
    await process.exited


@pytest.mark.engine
@pytest.mark.timeout(900)
class TestSGLang(EngineConformance):
    @pytest.fixture
    def rig(
        self, request: pytest.FixtureRequest, folder_of: Callable[..., Path], context: ComponentContext
    ) -> EngineRig:
        sources = [WeightSource(seed, str(folder_of(seed))) for seed in range(2)]
        own = any(part in request.node.name for part in OWN_SERVER)
        if own:
            python = request.getfixturevalue("python")
            options = SGLangOptions(python=python, dtype="float32", kv_tokens=8192, context_length=256, chunk_s=0.0)
        else:
            url = request.getfixturevalue("server_url")
            options = SGLangOptions(url=url, context_length=256, chunk_s=0.0)
        return EngineRig(lambda: SGLangEngine(options, context), sources, vocab=320, cache_block=16, patience=300.0,
                         kill=kill if own else None)  # fmt: skip
