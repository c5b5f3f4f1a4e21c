"""Conformance suite for engines: subclass `EngineConformance` in a test file and give the fixture `rig`.

    class TestMine(EngineConformance):
        @pytest.fixture
        def rig(self, two_versions):
            return EngineRig(lambda: MyEngine(MyOptions(), context), two_versions, vocab=320)

The tests are coroutines: run them with pytest-asyncio in its "auto" mode. They compare with plain transformers, which
(like torch) is imported only then. What an engine does not offer is skipped with the reason.
Invariant: each check is a fault that some engine of today has, or a promise of `gyre_core.engine` the ring relies on.
"""

from __future__ import annotations

import pytest

from gyre_core.testing.engine_calls import CallChecks
from gyre_core.testing.engine_faults import FaultChecks
from gyre_core.testing.engine_handover import HandoverChecks
from gyre_core.testing.engine_kv import KVChecks
from gyre_core.testing.engine_rig import EngineRig
from gyre_core.testing.engine_versions import VersionChecks

__all__ = ["EngineConformance", "EngineRig"]


class EngineConformance(CallChecks, VersionChecks, KVChecks, HandoverChecks, FaultChecks):
    """All checks of engines."""

    @pytest.fixture
    def rig(self) -> EngineRig:
        """To be given by the subclass."""
        raise NotImplementedError("a subclass of EngineConformance gives the fixture `rig`: an EngineRig")
