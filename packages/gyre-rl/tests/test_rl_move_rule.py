"""What moves and prefills took in a run decides whether the next session is moved with its KV or prefilled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gyre_core import CellId as CoreCell
from gyre_core import Role as CoreRole
from gyre_core import WeightSource
from gyre_rl.cell.messages import CellReady, Drain, LeaveSession, Pulled, PullSession, SwitchTo, Took
from gyre_rl.procs.wire import Empty
from gyre_rl.run.cells import CellInfo, Cells
from gyre_rl.run.driver import RunDriver
from gyre_rl.views.events import SessionMoved
from gyre_sched import CellId, CostPriors, Role, SchedConfig, Scheduler
from gyre_sched import events as e
from gyre_sched.aio import SchedulerRunner

TOKENS = 600
PREFILL_S = 6.0
"""What prefilling a session is believed to take: 600 tokens at 100 a second."""

BELIEVED = SchedConfig(
    groups_per_step=4, tick_s=0.01, priors=CostPriors(to_train_s=0.0, to_rollout_s=0.0, prefill_tps=TOKENS / PREFILL_S)
)


@dataclass(slots=True)
class MeasuredCells(Cells):
    """The run's cells, with processes that only say how long a pull took."""

    pull: Pulled = field(default_factory=lambda: Pulled(False))
    asked: list[Any] = field(default_factory=list)

    async def _ask(self, cell: CoreCell, path: str, message: Any, as_type: Any, timeout_s: float = 60.0) -> Any:
        self.asked.append(message)
        match message:
            case PullSession():
                return self.pull
            case SwitchTo():
                return Took(0.001)
            case Drain() | LeaveSession():
                return Empty()
        raise AssertionError(f"nobody should ask {path}")


@dataclass
class Stage:
    """Three sampling cells and a training one, their driver and scheduler."""

    cells: MeasuredCells
    runner: SchedulerRunner
    seen: list[Any]

    async def drain(self, number: int, pulled: Pulled) -> list[SessionMoved]:
        """Turn a cell that has a session in a pause; the moves that were made."""
        self.cells.pull, before = pulled, len(self.seen)
        cell = CellId(f"c{number}")
        await self.runner.post(e.TurnAsked(0, cell, Role.TRAIN))
        async with asyncio.timeout(60):
            while not any(isinstance(m, SwitchTo) for m in self.cells.asked):
                await asyncio.sleep(0.005)
        self.cells.asked.clear()
        return [event for event in self.seen[before:] if isinstance(event, SessionMoved)]


@asynccontextmanager
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    nothing: Any = None
    config: Any = SimpleNamespace(cells=SimpleNamespace(switch_s=60.0))
    cells, seen = MeasuredCells(nothing, config, tmp_path, tmp_path), []
    cells.sources[0] = WeightSource(0, "nowhere")
    rollout: Any = SimpleNamespace(start_group=lambda group, version: None)
    training: Any = SimpleNamespace(applied=0)
    bus: Any = SimpleNamespace(emit=seen.append)
    driver = RunDriver(cells, rollout, training, bus, nothing)
    async with SchedulerRunner(Scheduler(BELIEVED), driver) as runner:
        for number in range(4):
            role = Role.ROLLOUT if number else Role.TRAIN
            ready = CellReady(CoreRole(role.value), 0, 4, 100_000, f"tcp://c{number}", 0.0)
            cells.infos[CoreCell(f"c{number}", 0)] = CellInfo(nothing, not number, ready)
            await runner.post(
                e.CellJoined(0, CellId(f"c{number}"), role=role, slots=4, kv_tokens=100_000, core=not number)
            )
        yield Stage(cells, runner, seen)


async def sessions_on_every_cell(runner: SchedulerRunner, sizes: tuple[int, ...] = (TOKENS,) * 3) -> None:
    """One session a sampling cell, with so many tokens, in a pause."""
    admitted = asyncio.ensure_future(runner.admit("g", 3))
    await asyncio.wait_for(admitted, 60)
    for i in range(3):
        await runner.post(e.ExecutionStarted(0, f"g.{i}", "g"))
        await runner.post(e.SessionStarted(0, f"g.{i}.s", f"g.{i}"))
    for i in range(3):
        await asyncio.wait_for(runner.route(f"g.{i}.s", sizes[i] - 1), 60)
    for i in range(3):
        await runner.call_ended(f"g.{i}.s", sizes[i])


def took(seconds: float) -> Pulled:
    return Pulled(True, 60_000_000, TOKENS, seconds, 0.0, "process_vm")


@pytest.mark.parametrize(("seconds", "again"), [(PREFILL_S / 60, True), (PREFILL_S * 3, False)])
async def test_a_measured_move_decides_about_the_next_one(tmp_path: Path, seconds: float, again: bool) -> None:
    async with stage(tmp_path) as run:
        await sessions_on_every_cell(run.runner)
        (first,) = await run.drain(1, took(seconds))
        assert first.carried
        assert first.bytes == 60_000_000
        moves = await run.drain(2, took(seconds))
        assert [move.carried for move in moves] == ([True, True] if again else [])


@pytest.mark.parametrize(("seconds", "again"), [(PREFILL_S / 60, True), (PREFILL_S / 2, False)])
async def test_a_measured_move_decides_about_a_small_session(tmp_path: Path, seconds: float, again: bool) -> None:
    """Half of what prefilling it takes is what the first one's move took. A tenth of the tokens is prefilled then: one
    move does not tell a set-up from a slow link, and links are believed to be fast."""
    small = TOKENS // 10
    async with stage(tmp_path) as run:
        await sessions_on_every_cell(run.runner, (TOKENS, small, small))
        (first,) = await run.drain(1, took(seconds))
        assert (first.carried, first.tokens) == (True, TOKENS)
        moves = await run.drain(2, took(seconds))
        assert any(move.session == "g.1.s" for move in moves) == again


async def test_a_measured_prefill_decides_too(tmp_path: Path) -> None:
    async with stage(tmp_path) as run:
        await sessions_on_every_cell(run.runner)
        (first,) = await run.drain(1, took(PREFILL_S / 60))
        assert first.carried
        await run.runner.post(e.LoadReported(0, CellId("c2"), 0, 0, 0, prefill_tps=1e6))
        assert await run.drain(2, took(PREFILL_S / 60)) == []
