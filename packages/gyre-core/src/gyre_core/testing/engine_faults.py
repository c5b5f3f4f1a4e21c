"""Checks of what an engine does when its server dies.

Part of `gyre_core.testing.engines.EngineConformance`; see there.
"""

from __future__ import annotations

import pytest

from gyre_core.engine import EngineCapability
from gyre_core.testing.engine_rig import EngineRig, assert_greedy, call, needs


class FaultChecks:
    """Only where the rig can `kill`."""

    async def test_a_server_that_dies_asleep_is_followed_by_another(self, rig: EngineRig) -> None:
        """A cell that trains asks its engine for one thing, to wake: unless that starts another server, it never
        samples again. Until then the load can be asked for."""
        if rig.kill is None:
            pytest.skip("the rig has no `kill`: this engine runs no server of its own here")
        async with rig.started() as engine:
            needs(engine, EngineCapability.SLEEP)
            prompt = rig.prompt(40)
            await call(engine, prompt, 4, name="before")
            await rig.within(engine.sleep())
            await rig.kill(engine)
            assert (await rig.within(engine.load())).slots_running == 0
            await rig.within(engine.wake(rig.sources[1]))
            assert engine.version == rig.sources[1].version
            result = await rig.within(call(engine, prompt, 6, name="after"))
            assert result.versions == [rig.sources[1].version] * 6
            assert result.cached == 0
            assert_greedy(rig, 1, prompt, result)
