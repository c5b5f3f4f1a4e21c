"""The runner on a foreign asyncio stack, with faults: time-outs, failures, roll-backs, losses, a full log."""

import asyncio
import contextlib

import pytest
from gyre_sched import CellId, CellState, EndStatus, MoveRefused, MoveReport, Role, SchedConfig, Scheduler
from gyre_sched import commands as c
from gyre_sched import events as e
from gyre_sched.aio import RunnerClosedError, SchedulerRunner, Timeouts
from gyre_sched.config import CostPriors
from gyre_sched.errors import LogError
from gyre_sched.log import EventLog, read_log
from gyre_sched.replay import replay, snapshot

CFG = SchedConfig(
    groups_per_step=2,
    tick_s=0.01,
    pause_wait_s=0.02,
    priors=CostPriors(to_train_s=0.001, to_rollout_s=0.001, train_tps=1000.0),
)


class FakeStack:
    """Cells as coroutines; every answer comes late."""

    def __init__(self):
        self.runner = None
        self.calls = []
        self.switch_fails = 0
        self.hang = set()
        self.refuse = False
        self.tasks = []
        self.applied = asyncio.Event()

    async def drain(self, cell):
        self.calls.append(("drain", cell))
        if "drain" in self.hang:
            await asyncio.sleep(600)

    async def undrain(self, cell):
        self.calls.append(("undrain", cell))

    async def switch(self, cell, role):
        self.calls.append(("switch", cell, role))
        await asyncio.sleep(0.002)
        if self.switch_fails:
            self.switch_fails -= 1
            raise RuntimeError("out of memory")
        return 0.002

    async def move_session(self, session, src, dst, *, carry_kv, interrupt):
        self.calls.append(("move", session, src, dst, carry_kv, interrupt))
        if self.refuse:
            raise MoveRefused("no room")
        await asyncio.sleep(0.002)
        return MoveReport(carry_kv, 100, 10, 0.002)

    async def sync_weights(self, cell, version):
        self.calls.append(("sync", cell, version))
        return 0.001

    async def admit(self, group, version):
        pass

    async def retry(self, execution, group, attempt):
        self.calls.append(("retry", execution, attempt))

    async def cut(self, execution, reason):
        self.calls.append(("cut", execution))

    async def build_group(self, group, step, executions, left_out):
        batches = tuple(e.Batch(f"{group}/{x}/{i}", 10) for x in executions for i in range(4))
        await self.runner.post(e.GroupBatched(0, group, batches))

    async def drop_group(self, group, reason):
        self.calls.append(("drop", group))

    async def lease(self, cell, lease, step, batches):
        async def compute():
            await asyncio.sleep(0.003)
            await self.runner.post(e.ContributionCommitted(0, cell, lease, batches, 0.003))

        self.tasks.append(asyncio.create_task(compute()))

    async def recall_lease(self, cell, lease):
        pass

    async def seal(self, step, groups):
        self.calls.append(("seal", step, groups))

    async def apply_step(self, step, groups):
        self.calls.append(("apply", step, groups))
        await self.runner.post(e.StepApplied(0, step))
        await self.runner.post(e.WeightsPublished(0, step + 1))
        self.applied.set()

    async def alarm(self, subject, reason):
        self.calls.append(("alarm", subject))


@contextlib.asynccontextmanager
async def stack(cells=4, config=CFG, log=None, timeouts=None):
    driver = FakeStack()
    runner = SchedulerRunner(Scheduler(config), driver, log, timeouts=timeouts)
    driver.runner = runner
    async with runner:
        for i in range(cells):
            role = Role.ROLLOUT if i else Role.TRAIN
            cell = CellId(f"c{i}")
            await runner.post(e.CellJoined(0, cell, role=role, slots=8, kv_tokens=100_000, core=not i))
        yield runner, driver
        for task in driver.tasks:
            task.cancel()


async def execute(runner, name, group, turns=3):
    await runner.post(e.ExecutionStarted(0, name, group))
    await runner.post(e.SessionStarted(0, f"{name}.s", name))
    context = 10
    for _ in range(turns):
        await runner.route(f"{name}.s", context)
        await asyncio.sleep(0.002)
        context += 10
        await runner.call_ended(f"{name}.s", context)
        await asyncio.sleep(0.002)
    await runner.post(e.ExecutionEnded(0, name, EndStatus.COMPLETED))


async def run_group(runner, group, size=3):
    await runner.admit(group, size)
    await asyncio.gather(*(execute(runner, f"{group}.{i}", group) for i in range(size)))


async def until(condition, limit=60.0):
    async with asyncio.timeout(limit):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_foreign_stack_trains_steps_and_its_log_replays(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", CFG, fsync="never")
    async with stack(log=log) as (runner, driver):
        async with asyncio.timeout(60):
            await asyncio.gather(*(run_group(runner, f"g{i}") for i in range(8)))
        await until(lambda: runner.state.step == 4)
        assert [x[1] for x in driver.calls if x[0] == "apply"] == [0, 1, 2, 3]
        want = snapshot(runner.scheduler)
    assert snapshot(replay(log.path)) == want
    assert runner.scheduler.story("g0").startswith("group g0 (over)")


async def test_a_half_done_switch_is_undone():
    async with stack() as (runner, driver):
        driver.switch_fails = 1
        await runner.post(e.TurnAsked(0, CellId("c1"), Role.TRAIN))
        await until(lambda: ("switch", CellId("c1"), Role.ROLLOUT) in driver.calls)
        await until(lambda: runner.state.rollout_count == 3)
        assert "out of memory" in runner.scheduler.story("c1")


async def test_a_switch_that_cannot_be_undone_loses_the_cell():
    async with stack() as (runner, driver):
        driver.switch_fails = 2
        await runner.post(e.TurnAsked(0, CellId("c1"), Role.TRAIN))
        await until(lambda: runner.state.living == 3)


async def test_a_drain_that_hangs_is_given_up():
    async with stack(timeouts=Timeouts(drain_s=0.02)) as (runner, driver):
        driver.hang.add("drain")
        await runner.post(e.TurnAsked(0, CellId("c1"), Role.TRAIN))
        await until(lambda: ("undrain", CellId("c1")) in driver.calls)
        await until(lambda: runner.state.rollout_count == 3)
        assert "no answer within 0.02 s" in runner.scheduler.story("c1")


async def test_route_waits_for_a_move_and_a_refused_one_ends_at_the_new_cell():
    cfg = SchedConfig(groups_per_step=1, tick_s=0.01, pause_wait_s=0.0, priors=CostPriors(prefill_tps=1.0))
    async with stack(config=cfg) as (runner, driver):
        await runner.admit("g", 1)
        await runner.post(e.ExecutionStarted(0, "x", "g"))
        await runner.post(e.SessionStarted(0, "s", "x"))
        src = await runner.route("s", 50)
        driver.refuse = True
        await runner.post(e.TurnAsked(0, src, Role.TRAIN))
        again = await asyncio.wait_for(runner.route("s", 60), 60)
        assert again != src
        moves = [x for x in driver.calls if x[0] == "move"]
        assert moves[0][5], "the running call is interrupted"
        assert "refused" in runner.scheduler.story("s")


async def test_a_killed_cell_reroutes_its_callers():
    async with stack(cells=3) as (runner, _):
        await runner.admit("g", 1)
        await runner.post(e.ExecutionStarted(0, "x", "g"))
        await runner.post(e.SessionStarted(0, "s", "x"))
        first = await runner.route("s", 50)
        await runner.post(e.CellLost(0, first, "kill -9"))
        assert await runner.route("s", 50) != first
        assert not await runner.post(e.DrainDone(0, first)), "an earlier life is dropped"
        assert "kill -9" in runner.dropped[0]


async def test_waiters_learn_that_the_runner_closed():
    async with stack(cells=1) as (runner, _):
        await runner.admit("g", 1)
        await runner.post(e.ExecutionStarted(0, "x", "g"))
        await runner.post(e.SessionStarted(0, "s", "x"))
        waiting = asyncio.create_task(runner.route("s", 50))
        await asyncio.sleep(0)
    with pytest.raises(RunnerClosedError):
        await waiting


async def test_a_full_disk_stops_the_machine_before_it_acts(tmp_path):
    class Full(EventLog):
        full = False

        def append(self, event):
            if self.full:
                raise LogError("cannot append: no space left")
            super().append(event)

    log = Full(tmp_path / "x.jsonl", CFG)
    async with stack(log=log) as (runner, driver):
        log.full = True
        with pytest.raises(LogError):
            await runner.post(e.TurnAsked(0, CellId("c1"), Role.TRAIN))
        assert not any(x[0] == "drain" for x in driver.calls)
        with pytest.raises(LogError):
            await runner.post(e.Tick(0))


def test_a_torn_last_line_is_left_out_and_a_log_can_be_continued(tmp_path):
    path = tmp_path / "x.jsonl"
    log = EventLog(path, CFG)
    log.append(e.CellJoined(0.5, CellId("a"), Role.TRAIN, 1, 1, core=True))
    log.close()
    with path.open("ab") as f:
        f.write(b'{"kind":"Tick","ti')
    assert len(list(read_log(path))) == 1
    again = EventLog(path, CFG)
    again.append(e.Tick(1.0))
    again.close()
    assert list(read_log(path))[-1] == e.Tick(1.0)
    assert replay(path).now == 1.0
    with path.open("ab") as f:
        f.write(b"broken\n")
    with pytest.raises(LogError, match="line 4"):
        list(read_log(path))


def test_every_command_is_carried_out_somewhere():
    import inspect

    source = inspect.getsource(SchedulerRunner)
    assert [k.__name__ for k in c.ALL_COMMANDS if f"c.{k.__name__}" not in source] == []
    assert CellState.LOST
