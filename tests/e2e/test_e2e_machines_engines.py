"""Cells on other machines whose engines are servers: a session's KV and a version's weights go from machine to machine.

Beside network and shared memory, a cell here has processes and System V memory of its own, so that no server takes
another machine's for its neighbour: UCX asks the kernel, and there is but one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engine_there import There
from gyre_core import WeightSource
from gyre_core.environments import build, read_spec
from gyre_core.testing.support import load_module
from gyre_rl.ring import run
from gyre_rl.run.directory import RunDirectory
from gyre_rl.run.summary import RunSummary
from gyre_rl.views import events as ev
from gyre_tito import Store
from machines import COMMAND, Machines, machines, why_not
from small import Probe, check_counted_once, compare_logprobs, processes_of, small_config

TINY = Path(__file__).parents[2] / "plugins" / "gyre-local" / "tests" / "tiny_models.py"
APART = ("unshare", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc", "--")


def why_not_apart() -> str:
    """Why there can be no such machines here; empty when there can."""
    if reason := why_not():
        return reason
    return subprocess.run([*APART, "true"], capture_output=True, text=True, check=False).stderr.strip()


pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not_apart()), reason=f"no machines can be made here: {why_not_apart()}"),
]
SETS = (
    "cells.start_s=900", "cells.switch_s=600", "limits.wall_s=600", "rollout.tasks_per_step=2", "trainer.publish=shm",
    "scheduler.priors.prefill_tps=50.0",
)  # fmt: skip
"""Versions lie in the memory of the core's machine alone; contexts of a few hundred tokens are worth carrying."""


@pytest.fixture
def others():
    with machines(2) as made:
        yield made


def ours_in_memory(others: Machines, host: str) -> list[str]:
    """What Gyre keeps in a machine's shared memory: versions, pages. Servers that are ended leave some of theirs."""
    return [name for name in others.shared_memory(host) if name.startswith("gyre-")]


class FinishedRun:
    """A run whose core is beside this process, and whose other cells are on the two machines."""

    def __init__(self, root: Path, others: Machines, engine: str, options: str) -> None:
        build(read_spec(Path(str(files(f"gyre_{engine}") / "environment.toml"))))
        hosts, words = json.dumps(["localhost", *others.hosts]), json.dumps([*COMMAND, *APART])
        self.root, self.kept = root / "run", root / "kept"
        self.directory, self.probe = RunDirectory(self.root), Probe(self._keep)
        self.config = small_config(
            self.root, f'engine={{name="{engine}", dtype="float32", max_running=16, {options}}}', *SETS,
            f"network.address={others.address}", "launcher.name=machines", f"launcher.hosts={hosts}",
            f"launcher.command={words}", "launcher.shell=false",
        )  # fmt: skip
        self.summary: RunSummary = asyncio.run(run(self.config, view=self.probe))

    def _keep(self, event: ev.Event) -> None:
        if isinstance(event, ev.StepApplied):  # the memory is given back at the end
            name = f"v{event.step + 1}"
            shutil.copytree(self.directory.weights / name, self.kept / name)

    def check(self) -> None:
        """It came to its end and lost nothing, and every token is one of its version's model."""
        assert (self.summary.status, self.summary.steps, self.summary.lost_calls) == ("finished", 2, 0)
        check_counted_once(self.probe.seen, steps=2)
        assert not [e for e in self.probe.of(ev.Switched) if not e.ok]
        assert not [e for e in self.probe.of(ev.CellStateChanged) if e.state == "LOST"]
        assert processes_of(self.root) == []
        weights = [str(self.config.model_dir), *(str(self.kept / f"v{version}") for version in (1, 2))]
        with contextlib.closing(Store.open(self.directory.store)) as store:
            compared, sampled = compare_logprobs(store, weights, every=2, bound=1e-3)
        assert compared > 0.8 * sampled, "the rest saw weights change in mid-call"


def test_vllm_hands_sessions_from_machine_to_machine(tmp_path: Path, others: Machines) -> None:
    finished = FinishedRun(
        tmp_path, others, "vllm", 'kv_cache_gb=0.25, transfers=true, arguments=["--block-size", "32"]'
    )
    finished.check()
    carried = [move for move in finished.probe.of(ev.SessionMoved) if move.carried]
    assert finished.summary.kv_moved_sessions == len(carried) > 0
    assert all(move.tokens > 0 and move.bytes > 0 and move.src[:6] != move.dst[:6] for move in carried)
    assert [ours_in_memory(others, host) for host in others.hosts] == [[], []]


PROMPT = [(11 * i + 5) % 320 for i in range(100)]


@pytest.mark.parametrize("named", ["", "pages"], ids=["in memory", "in a folder that all see"])
async def test_sglangs_pages_are_found_where_they_can_be_seen(named: str, tmp_path: Path, others: Machines) -> None:
    """From another machine's memory nothing is found, at once, and the context is computed; a common folder serves
    both. The tokens are the same either way."""
    build(read_spec(Path(str(files("gyre_sglang") / "environment.toml"))))
    (tmp_path / "pages").mkdir()
    model = load_module(TINY).save("qwen3", tmp_path / "model", 0)
    options = {
        "dtype": "float32", "kv_tokens": 8192, "context_length": 256, "kv_share_gb": 0.05, "kv_share_folder": named
    }  # fmt: skip
    a, b = [
        await There.make(
            [word.replace("{host}", host) for word in (*COMMAND, *APART)], "sglang", options,
            {"run_dir": str(tmp_path / "run"), "name": f"cell-{index}", "base_dir": str(tmp_path)}, tmp_path / "log",
        )
        for index, host in enumerate(others.hosts)
    ]  # fmt: skip
    try:
        await asyncio.gather(*(engine.start(WeightSource(0, str(model))) for engine in (a, b)))
        sampled, _ = await a.call(PROMPT, 60, "s")
        context = [*PROMPT, *sampled]
        there, cached = await b.call(context, 20, "s")
        here, _ = await a.call(context, 20, "t")
        assert there == here
        assert cached >= (len(context) - 1) // 16 * 16 - 16 if named else cached == 0
        assert [len(ours_in_memory(others, host)) for host in others.hosts] == ([0, 0] if named else [1, 1])
    finally:
        await asyncio.gather(a.end(), b.end())
    assert [ours_in_memory(others, host) for host in others.hosts] == [[], []]
    assert bool(list((tmp_path / "pages").glob("*/*/*"))) == bool(named)
