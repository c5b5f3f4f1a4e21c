"""The real server: the conformance suite, on one vLLM for all of it.

Needs the environment built by `tools/engine_env.py vllm`, or GYRE_VLLM_PYTHON.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, WeightSource
from gyre_core.testing.engines import EngineConformance, EngineRig
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.options import VLLMOptions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


LESS_USED = [pytest.param(how, marks=pytest.mark.slow) for how in ("gathered", "recompute")]
"""Run with whole runs, by name: each takes as long as all of the first."""


@pytest.mark.parametrize("how", ["default", *LESS_USED], scope="class")
class TestVLLM(EngineConformance):
    """Tokens one by one, gathered by the server, and with everything computed again when weights change."""

    @pytest.fixture
    def rig(self, how: str, real_server: Any, context: ComponentContext) -> EngineRig:
        options: dict[str, Any] = {
            "default": {}, "gathered": {"stream_tokens": 8}, "recompute": {"on_update": "recompute"}
        }[how]  # fmt: skip
        return EngineRig(
            lambda: VLLMEngine(VLLMOptions(url=real_server.url, **options), context),
            real_server.sources,
            vocab=real_server.vocab,
            cache_block=real_server.block,
            max_context=real_server.max_context,
        )


async def kill(engine: Any) -> None:
    """The server of its own, with all its processes; its keeper sees that and ends."""
    keeper = engine._state.server.process._process.pid
    (server,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    os.kill(int(server), signal.SIGKILL)
    while Path(f"/proc/{keeper}").exists():
        await asyncio.sleep(0.1)


@pytest.mark.slow  # every check has it with a stand-in, and with a real SGLang
async def test_a_server_that_dies_asleep_is_followed_by_another(
    vllm_python: str, tiny_sources: list[WeightSource], context: ComponentContext
) -> None:
    """The suite's check, on a server that nobody shares."""
    options = VLLMOptions(python=vllm_python, dtype="float32", max_context=512, max_running=4, kv_cache_gb=0.1)

    def make() -> VLLMEngine:
        return VLLMEngine(options, context)

    rig = EngineRig(make, tiny_sources, 320, cache_block=32, max_context=512, patience=600.0, kill=kill)
    await EngineConformance().test_a_server_that_dies_asleep_is_followed_by_another(rig)
