"""Small real runs of the quickstart's recipe, and what their event logs say."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gyre_core import RunEvent
from gyre_rl.config import RunConfig, load
from gyre_rl.views import events as ev
from gyre_tito import Store
from transformers import AutoModelForCausalLM

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
SMALL = (
    "steps=2",
    "cells.count=3",
    "cells.start_s=300",
    "tasks.train=64",
    "tasks.heldout=4",
    "eval.tasks=4",
    "rollout.tasks_per_step=4",
    "rollout.group_size=8",
    "loss.micro_batch_tokens=512",
    "trainer.keep_versions=20",
    "scheduler.dwell_s=0.0",
    "scheduler.switch_margin=0.0",
    "scheduler.low=2.0",
    "scheduler.high=3.0",
)
"""Marks above 1: a rollout cell may go however many sessions it has, so that short runs turn and move. Cells may
take as long to start as on a machine that does much else."""


@contextmanager
def scripted(folder: Path) -> Iterator[None]:
    """Let this process and its children find the plugin `scripted.py`, as if its distribution lay in `folder`."""
    info = folder / "gyre_scripted-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gyre-scripted\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[gyre]\nscripted = scripted\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(Path(__file__).parent))), prepend=os.pathsep)
        yield


def small_config(run_dir: Path, *sets: str) -> RunConfig:
    """The quickstart, cut down."""
    return replace(load(QUICKSTART, [*SMALL, *sets]), dir=str(run_dir))


@dataclass
class Probe:
    """A view that remembers, and may act on an event."""

    act: Callable[[ev.Event], None] | None = None
    seen: list[ev.Event] = field(default_factory=list)

    def emit(self, event: RunEvent) -> None:
        """Take an event."""
        parsed = ev.parse(event)
        if parsed is not None:
            self.seen.append(parsed)
            if self.act is not None:
                self.act(parsed)

    def close(self) -> None:
        """Nothing is held."""

    def of(self, kind: type) -> list:
        """Events of one kind, in order."""
        return [event for event in self.seen if isinstance(event, kind)]


def pid_of(run_dir: Path, cell: str) -> int:
    """Process id of a cell `name#incarnation` of the run."""
    spec = str(run_dir / "procs" / (cell.replace("#", ".") + ".json"))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if spec.encode() in argv:
                return int(entry.name)
    raise LookupError(f"no process of {cell}")


def kill(run_dir: Path, cell: str) -> None:
    """kill -9."""
    os.kill(pid_of(run_dir, cell), signal.SIGKILL)


def processes_of(run_dir: Path) -> list[int]:
    """Every living process that names the run directory in its arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(run_dir).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def check_counted_once(events: Sequence[ev.Event], steps: int) -> None:
    """Each applied step counted each of its micro-batches exactly once, over all lives of the run.

    A core that died took its sum with it, so its step's contributions before the death do not count.
    """
    wanted: dict[int, dict[str, int]] = defaultdict(dict)
    counted: dict[int, int] = defaultdict(int)
    applied: list[int] = []
    for event in events:
        match event:
            case ev.GroupReady():
                wanted[event.step][event.group] = event.batches
            case ev.Contributed():
                counted[event.step] += event.batches
            case ev.CellStateChanged(state="LOST", core=True):
                counted[len(applied)] = 0
            case ev.StepApplied():
                applied.append(event.step)
    assert applied == list(range(steps))
    for step in applied:
        assert counted[step] == sum(wanted[step].values()), f"step {step}"


def compare_logprobs(store: Store, weights: Sequence[str], *, every: int, bound: float) -> tuple[int, int]:
    """Compare the recorded log-probabilities of every `every`-th execution with transformers', on the path that the
    engine saw: each call that one version of `weights` sampled alone. Returns tokens compared and tokens sampled."""
    torch.set_num_threads(1)
    chosen = store.executions()[::every]
    compared = 0
    for version, folder in enumerate(weights):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for info in chosen:
            tree = store.load_tree(info.execution)
            for call in store.calls(info.execution):
                if len(call.sampled_ids) == 0 or set(call.versions.tolist()) != {version}:
                    continue
                path = np.asarray(tree.path_ids(call.index))
                assert path[call.prompt_len :].tolist() == call.sampled_ids.tolist()
                with torch.no_grad():
                    logits = model(torch.as_tensor(path[None], dtype=torch.long)).logits[0].float()
                logprobs = torch.log_softmax(logits, -1)[call.prompt_len - 1 : len(path) - 1]
                theirs = logprobs.gather(1, torch.as_tensor(call.sampled_ids, dtype=torch.long)[:, None])[:, 0]
                gap = float((torch.as_tensor(call.logprobs) - theirs).abs().max())
                assert gap < bound, f"{info.execution} call {call.index}: {gap}"
                compared += len(call.sampled_ids)
    return compared, sum(info.sampled_tokens for info in chosen)
