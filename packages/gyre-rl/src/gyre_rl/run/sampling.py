"""Load against capacity, about once a second, for the views."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gyre_rl.views.events import LoadSampled

if TYPE_CHECKING:
    from gyre_rl.run.parts import Parts

EVERY_S = 1.0


async def sample_loads(parts: Parts) -> None:
    """Emit a `sample` event every second until cancelled."""
    while True:
        await asyncio.sleep(EVERY_S)
        picture = parts.runner.state.picture()
        loads = list(parts.loads.values())
        rolling = [cell for cell in picture.cells if cell.state.value == "ROLLOUT"]
        capacity = float(sum(cell.slots for cell in rolling))
        parts.bus.emit(
            LoadSampled(
                in_flight=parts.rollout.in_flight,
                waiting=sum(load.waiting for load in loads),
                running=sum(load.slots_running for load in loads),
                demand=picture.utilisation * capacity,
                capacity=capacity,
                low=picture.low * capacity,
                high=picture.high * capacity,
                ready_tokens=picture.ready_tokens,
                leased_tokens=picture.leased_tokens,
                kv_used=sum(load.kv_tokens_used for load in loads),
                kv_total=sum(load.kv_tokens_total for load in loads),
                sampled_tokens=sum(load.sampled_tokens for load in loads),
                prefilled_tokens=sum(load.prefilled_tokens for load in loads),
                cached_tokens=sum(load.cached_tokens for load in loads),
                trained_tokens=parts.training.trained_tokens,
            )
        )
