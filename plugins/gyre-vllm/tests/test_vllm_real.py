"""The real server: the conformance suite, on one vLLM for all of it.

Needs the environment built by `tools/engine_env.py vllm`, or GYRE_VLLM_PYTHON.
"""

from __future__ import annotations

from typing import Any

import pytest
from gyre_core import ComponentContext
from gyre_core.testing.engines import EngineConformance, EngineRig
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.options import VLLMOptions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.parametrize("how", ["default", "gathered", "recompute"], scope="class")
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
