"""What an event costs the machine, how that grows, and how fast the simulator is against SimPy.

``machine``: 2,000 cells with 200,000 live sessions, against as many sessions on 100 (larger) cells, and against 100
cells with 10,000 sessions, where the machine's memory fits into the processor's caches; the mix of a run (calls asked
for and answered, half of the sessions in a call, executions that end, load reports, ticks), each ``handle`` timed.
All three are timed over the same stretch of a session's life (after one event per session, for half an event more), the
small one on several machines one after another until it has as many events; garbage collection is on as in a run.
``memory``: allocations per session, by tracemalloc. ``simulator``: the same model, with the same machine deciding, on
this package's engine and on SimPy, where every call is a process that is interrupted when the speed of its cell
changes; both end at the same virtual time up to the order of simultaneous events. Prints one JSON object as its last
line.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
import tracemalloc
import zlib
from collections import deque
from dataclasses import replace

from gyre_sched import CellId, EndStatus, Role, SchedConfig, Scheduler
from gyre_sched import commands as c
from gyre_sched import events as e
from gyre_sched.plan import elastic_config
from gyre_sched.policies import watermark
from gyre_sched.sim.models import Hardware
from gyre_sched.sim.run import Simulation
from gyre_sched.sim.workload import Shape

GROUP = 20


class Load:
    """A cluster full of sessions, and a stream of events that keeps it so."""

    def __init__(self, cells: int, sessions: int) -> None:
        groups = sessions // GROUP
        cfg = SchedConfig(groups_per_step=groups, max_staleness=1, story_keep=100)
        self.m = Scheduler(cfg)
        self.t = 0.0
        self.rng = random.Random(cells)
        self.asking: list[str] = []
        self.calling: list[str] = []
        self.pace = 1.0 / sessions
        """Seconds between events: every session at the same pace, however many there are."""
        self.context: dict[str, int] = {}
        self.arrivals: deque[tuple[int, str]] = deque()
        slots = max(128, 128 * sessions // (100 * cells))
        self.cells = [CellId(f"c{i}") for i in range(cells)]
        for i, cell in enumerate(self.cells):
            role = Role.ROLLOUT if i else Role.TRAIN
            self.tell(e.CellJoined(0.0, cell, role, slots, 400_000 * slots, core=i == 0))
        self.members: list[tuple[str, str]] = []
        for g in range(groups):
            self.tell(e.GroupQueued(self.t, f"g{g}", GROUP))

    def fill(self) -> None:
        for g in range(len(self.m._w.groups)):
            for i in range(GROUP):
                name = f"g{g}.{i}"
                self.tell(e.ExecutionStarted(self.t, name, f"g{g}"))
                self.tell(e.SessionStarted(self.t, name, name))
                self.context[name] = 1000
                self.asking.append(name)
        for _ in range(len(self.asking) // 2):
            self.tell(self._request())

    def tell(self, event: e.Event) -> list[c.Command]:
        return self.heard(self.m.handle(event))

    def heard(self, commands: list[c.Command]) -> list[c.Command]:
        """Moves are answered with the next events; everything else needs no answer here."""
        for command in commands:
            if isinstance(command, c.MoveSession):
                self.arrivals.append((command.move, command.session))
        return commands

    def next_event(self) -> e.Event:
        """Mostly calls; now and then the rest."""
        self.t += self.pace
        if self.arrivals:
            move, session = self.arrivals.popleft()
            return e.MoveDone(self.t, move, session, True, 10**8, 1000, 0.1)
        rng = self.rng
        dice = rng.random()
        if dice < 0.02:
            cell = self.cells[rng.randrange(1, len(self.cells))]
            return e.LoadReported(self.t, cell, 10, 0, 1000)
        if dice < 0.03:
            return e.Tick(self.t)
        if dice < 0.04 and len(self.calling) > 1000:
            name = self._take(self.calling)
            return e.ExecutionEnded(self.t, name, EndStatus.COMPLETED)
        if self.asking and (dice < 0.52 or not self.calling):
            return self._request()
        name = self._take(self.calling)
        self.asking.append(name)
        self.context[name] += 100
        return e.CallEnded(self.t, name, self.context[name])

    def _request(self) -> e.Event:
        name = self._take(self.asking)
        self.calling.append(name)
        self.context[name] += 200
        return e.CallRequested(self.t, name, self.context[name], (zlib.crc32(name.partition(".")[0].encode()),))

    def _take(self, names: list[str]) -> str:
        i = self.rng.randrange(len(names))
        names[i], names[-1] = names[-1], names[i]
        return names.pop()


def event_cost(cells: int, sessions: int, events: int) -> dict[str, float]:
    """What ``events`` events cost, on as many machines one after another as it takes."""
    times: list[int] = []
    moves = live = 0
    while len(times) < events:
        load = Load(cells, sessions)
        load.rng.seed(len(times))
        load.fill()
        for _ in range(sessions):
            load.tell(load.next_event())
        gc.collect()
        for _ in range(min(events, sessions // 2)):
            event = load.next_event()
            began = time.perf_counter_ns()
            out = load.m.handle(event)
            times.append(time.perf_counter_ns() - began)
            moves += isinstance(event, e.MoveDone)
            load.heard(out)
        live = len(load.m._w.sessions)
    times.sort()
    return {
        "cells": cells,
        "sessions": live,
        "events": len(times),
        "moves": moves,
        "mean_us": statistics.fmean(times) / 1e3,
        "trimmed_mean_us": statistics.fmean(times[: int(len(times) * 0.98)]) / 1e3,
        "p50_us": times[len(times) // 2] / 1e3,
        "p99_us": times[int(len(times) * 0.99)] / 1e3,
        "max_us": times[-1] / 1e3,
    }


def memory_per_session(cells: int = 200, sessions: int = 20_000) -> float:
    """Bytes that the machine allocates for a session that is in a call, its names included."""
    load = Load(cells, sessions)
    names = [f"g{g}.{i}" for g in range(sessions // GROUP) for i in range(GROUP)]
    for name in names:
        load.tell(e.ExecutionStarted(0.0, name, name.split(".")[0]))
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for name in names:
        session = name + "/main"
        load.tell(e.SessionStarted(0.0, session, name))
        load.tell(e.CallRequested(0.0, session, 1000))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / sessions


# --- the simulator against SimPy -----------------------------------------------------------------------------


def sim_case() -> tuple[Hardware, Shape]:
    """Many calls to a cell and nothing to prefill, so that both engines are pure processor sharing."""
    hw = Hardware(cells=6, slots=64, kv_tokens=10**9, step_s=0.01, seq_s=0.001, prefill_tps=1e12)
    load = Shape(steps=3, groups_per_step=24, group_size=8, turns=5.0, fed=0.0, sampled=300.0, first=0, pause_s=0.5)
    return hw, load


def simpy_simulation(hw: Hardware, load: Shape, cfg: SchedConfig) -> Simulation:
    import simpy
    from gyre_sched.sim.engine import Job

    env = simpy.Environment()

    class Engine:
        """Every call is a process; the others are interrupted when one comes or goes."""

        def __init__(self, owner: Simulation) -> None:
            self.owner, self.jobs, self.queue, self.resident, self.busy_s = owner, {}, [], {}, 0.0

        def submit(self, job: Job, now: float) -> None:
            self.queue.append(job)
            self.start()

        def start(self) -> None:
            fresh = []
            while self.queue and len(self.jobs) + len(fresh) < hw.slots:
                fresh.append(self.queue.pop(0))
            if fresh:
                self.wake()
                for job in fresh:
                    self.jobs[job.session] = env.process(self.call(job))

        def wake(self) -> None:
            for process in self.jobs.values():
                if process.is_alive and process is not env.active_process:
                    process.interrupt()

        def call(self, job: Job):
            left = job.sampled
            while left > 1e-9:
                pace = 1.0 / hw.decode_step_s(len(self.jobs), 0)
                began = env.now
                try:
                    yield env.timeout(left / pace)
                    left = 0.0
                except simpy.Interrupt:
                    left -= (env.now - began) * pace
                    self.owner.stage.events += 1
            del self.jobs[job.session]
            self.wake()
            context = job.context + job.fed + int(job.sampled)
            self.start()
            agents = self.owner.agents
            self.owner.stage.now = env.now
            agents.answered(agents.runs[job.session], context)

        def forget(self, session: str) -> int:
            return 0

        def advance(self, now: float) -> None:
            pass

        def clear(self) -> None:
            pass

    over = env.event()
    sim = Simulation(hw, load, cfg, watermark, train_cells=2)
    stage = sim.stage
    for cell in sim.cluster.cells.values():
        cell.engine = Engine(sim)

    def at(time, action, *args):
        def fire(_):
            stage.now = env.now
            stage.events += 1
            action(*args)
            if len(sim.training.step_ends) == load.steps and not over.triggered:
                over.succeed()

        env.timeout(max(0.0, time - env.now)).callbacks.append(fire)

    stage.at = at
    sim.agents.watch = lambda cell: None

    def run():
        sim.begin()
        env.run(until=over)
        stage.now = env.now
        return sim.result()

    sim.run = run
    return sim


def against_simpy() -> dict[str, float]:
    hw, load = sim_case()
    cfg = replace(elastic_config(hw, load), carry_kv=False, keep_rollout=hw.cells)
    began = time.perf_counter()
    ours = Simulation(hw, load, cfg, watermark, train_cells=2)
    mine = ours.run()
    took = time.perf_counter() - began
    began = time.perf_counter()
    theirs = simpy_simulation(hw, load, cfg).run()
    simpy_took = time.perf_counter() - began
    calls = sum(len(p.turns) for g in range(load.steps * load.groups_per_step) for p in load.group(g))
    return {
        "calls": calls,
        "virtual_s": mine.seconds,
        "virtual_s_simpy": theirs.seconds,
        "difference": abs(mine.seconds / theirs.seconds - 1.0),
        "wall_s": took,
        "wall_s_simpy": simpy_took,
        "model_events_per_s": mine.events / took,
        "model_events_per_s_simpy": mine.events / simpy_took,
        "speedup": simpy_took / took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--cells", type=int, default=2000, help="the larger cluster")
    args = parser.parse_args()
    sessions = args.cells * 100
    small, large = event_cost(100, 10_000, args.events), event_cost(args.cells, sessions, args.events)
    few = event_cost(100, sessions, args.events)
    out = {
        "benchmark": "sched_scale",
        "hardware": f"{platform.machine()}, one process, Python {platform.python_version()}",
        "small": {k: round(v, 2) for k, v in small.items()},
        "large": {k: round(v, 2) for k, v in large.items()},
        "few_cells": {k: round(v, 2) for k, v in few.items()},
        "p99_event_us": round(large["p99_us"], 2),
        "cost_ratio_by_cells": round(large["trimmed_mean_us"] / few["trimmed_mean_us"], 3),
        "cost_ratio_by_cells_and_sessions": round(large["trimmed_mean_us"] / small["trimmed_mean_us"], 3),
        "bytes_per_session": round(memory_per_session(), 1),
    }
    try:
        out["simulator"] = {k: round(v, 6) for k, v in against_simpy().items()}
        out["simulator_vs_simpy"] = round(out["simulator"]["speedup"], 2)
    except ImportError:
        out["simulator_vs_simpy"] = "simpy is not installed: pip install simpy"
    if not args.json:
        print(json.dumps(out, indent=1))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
