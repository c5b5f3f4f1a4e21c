"""A run over three machines that share files and nothing else: no loopback, no shared memory, no local sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gyre_core import ComponentContext
from gyre_rl.procs.machines import MachinesLauncher, MachinesOptions
from gyre_rl.ring import run
from gyre_rl.run.directory import RunDirectory
from gyre_rl.views import events as ev
from gyre_tito import Store
from machines import COMMAND, Machines, machines, why_not
from small import Probe, check_counted_once, compare_logprobs, processes_of, small_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=f"no machines can be made here: {why_not()}"),
]


@pytest.fixture
def others():
    with machines(3) as made:
        yield made


def placed(others: Machines) -> list[str]:
    """The core beside the run, a cell on each other machine; one of them trains from the beginning."""
    words, hosts = json.dumps(list(COMMAND)), json.dumps(["localhost", *others.hosts])
    return [
        f"network.address={others.address}", "launcher.name=machines", f"launcher.hosts={hosts}",
        f"launcher.command={words}", "launcher.shell=false", "trainer.handover=memory", "trainer.publish=shm",
        "cells.count=4", "cells.train=2", "scheduler.max_lease_batches=1", "kv.transport=tcp",
    ]  # fmt: skip


def test_a_run_goes_through_with_cells_on_other_machines(tmp_path: Path, others: Machines) -> None:
    """Weights are fetched, gradients handed over, tokens sampled and KV moved from machine to machine; what was sampled
    there is what the weights of its version give."""
    root, kept = tmp_path / "run", tmp_path / "kept"
    config, directory = small_config(root, *placed(others), "steps=3"), RunDirectory(root)
    fetched: set[str] = set()

    def look(event: ev.Event) -> None:
        fetched.update(host for host in others.hosts if others.shared_memory(host))
        if isinstance(event, ev.StepApplied):  # the memory is given back at the end
            version = f"v{event.step + 1}"
            shutil.copytree(directory.weights / version, kept / version)

    probe = Probe(look)
    summary = asyncio.run(run(config, view=probe))
    assert (summary.status, summary.steps, summary.lost_calls) == ("finished", 3, 0)
    check_counted_once(probe.seen, steps=3)
    assert {"cell-0#1", "cell-1#1"} <= {e.cell for e in probe.of(ev.Contributed)}
    assert fetched == set(others.hosts), "a machine never had weights in its own memory"
    assert not [e for e in probe.of(ev.CellStateChanged) if e.state == "LOST"]
    returned = [e.reason for e in probe.of(ev.LeaseReturned) if "recalled" not in e.reason]
    assert returned == [], "a snapshot or a gradient did not get across"
    assert processes_of(root) == []
    assert [others.shared_memory(host) for host in others.hosts] == [[], [], []]
    with contextlib.closing(Store.open(directory.store)) as store:
        weights = [str(config.model_dir), *(str(kept / f"v{version}") for version in (1, 2, 3))]
        compared, sampled = compare_logprobs(store, weights, every=5, bound=1e-4)
        assert compared > 0.9 * sampled


@pytest.mark.checked
async def test_machines_are_looked_at_before_a_run(tmp_path: Path, others: Machines) -> None:
    context = ComponentContext(str(tmp_path), "run", address=others.address)
    launcher = MachinesLauncher(MachinesOptions(hosts=others.hosts, command=COMMAND, shell=False), context)
    assert await launcher.probe(3, str(tmp_path)) == []
    others.cut_off(others.hosts[1])
    (said,) = await launcher.probe(3, str(tmp_path))
    assert said.startswith(f"{others.hosts[1]}: it does not reach this machine"), said


@pytest.mark.checked
def test_a_machine_that_falls_silent_costs_its_cell_alone(tmp_path: Path, others: Machines) -> None:
    """No connection breaks, no process ends: its calls go on elsewhere, and the run comes to its end."""
    silent = others.hosts[2]
    config = small_config(tmp_path, *placed(others), "scheduler.policy=static", "cells.restarts=0")
    ended = 0

    def cut(event: ev.Event) -> None:
        nonlocal ended
        ended += isinstance(event, ev.ExecutionEnded) and event.purpose == "train"
        if ended == 3:
            ended += 1000
            others.cut_off(silent)

    probe = Probe(cut)
    summary = asyncio.run(run(config, view=probe))
    assert (summary.status, summary.steps, summary.lost_calls) == ("finished", 2, 0)
    assert [e.cell for e in probe.of(ev.CellStateChanged) if e.state == "LOST"] == ["cell-3#1"]
    check_counted_once(probe.seen, steps=2)
    assert [e for e in probe.of(ev.ExecutionEnded) if e.status == "failed" and e.score is not None] == []
    assert processes_of(tmp_path) == []
