"""`gyre score` and `gyre agent`: what people do while they write a task.

One judges a folder as if an agent had left it; the other lets one agent work on one task against any OpenAI-compatible
end point, shows it live and judges what it left. Invariant: both use the sandbox, the scorer and the harness that a run
would use, and leave nothing behind but the folder that was asked for.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gyre_core.agents import ExecutionJob, Harness, ModelEndpoint, Sandbox, Scorer, ScoringJob, Workspace
from gyre_core.errors import ConfigError, GyreError
from gyre_core.execution import ExecutionEnd, ExecutionStatus, Limits, Purpose, Score, Task, TaskSet
from gyre_core.plugins import PluginManager
from gyre_core.registration import ComponentContext, Kind

from gyre_rl.agents.carrying import at_start, carry_in, carry_out
from gyre_rl.cli.console import FAILED, STOPPED, Console
from gyre_rl.cli.relay import Relay
from gyre_rl.cli.signals import Stopped, until_stopped
from gyre_rl.cli.taskcheck import Readers
from gyre_rl.config import PluginChoice, RunConfigError
from gyre_rl.config.convert import Converter
from gyre_rl.config.load import merge, set_layer
from gyre_rl.config.problems import nearest

T = TypeVar("T")
SPLITS = ("heldout", "train")
DEFAULTS = {Kind.HARNESS: "shell", Kind.SANDBOX: "local"}


@dataclass(frozen=True, slots=True)
class Bench:
    """The components that a task is tried with, chosen by name and `--set`."""

    plugins: PluginManager
    tasks: PluginChoice
    sandbox: PluginChoice
    harness: PluginChoice
    limits: Limits
    scorers: tuple[PluginChoice, ...] = ()

    def make(self, kind: Kind, choice: PluginChoice, folder: str) -> Any:
        """An instance that may use `folder`."""
        return self.plugins.create(kind, choice.name, choice.options, self.context(folder))

    def context(self, folder: str) -> ComponentContext:
        """What components are told of their place."""
        return ComponentContext(folder, "bench", base_dir=".")


def make_bench(tasks: str, sets: Sequence[str], plugins: PluginManager | None = None) -> Bench:
    """Check names and options; RunConfigError with every problem."""
    plugins = plugins or PluginManager.installed()
    table: dict[str, Any] = {"tasks": {"name": tasks}}
    places: dict[str, str] = {}
    for text in sets:
        layer = set_layer(text)
        table = merge(table, layer.table)
        places.update(layer.places)
    converter = Converter(plugins.options_type, lambda path: places.get(path, ""))
    for key in set(table) - {"tasks", "sandbox", "harness", "scorers", "limits"}:
        converter.report(key, "unknown key; expected tasks, sandbox, harness, scorers or limits")
    chosen = {
        kind: converter.choice(kind, table.get(key, {}), key, DEFAULTS.get(kind))
        for kind, key in ((Kind.TASKSET, "tasks"), (Kind.SANDBOX, "sandbox"), (Kind.HARNESS, "harness"))
    }
    scorers = [
        converter.choice(Kind.SCORER, item, f"scorers.{number}", None)
        for number, item in enumerate(table.get("scorers", []))
    ]
    limits = converter.build(Limits, table.get("limits", {}), "limits")
    if converter.problems:
        raise RunConfigError("of the command line", converter.problems)
    return Bench(plugins, chosen[Kind.TASKSET], chosen[Kind.SANDBOX], chosen[Kind.HARNESS], limits, tuple(scorers))  # type: ignore[arg-type]


def find_task(taskset: TaskSet, name: str, split: str | None = None) -> Task:
    """The task whose id is `name`, or ends in "/name"; ConfigError naming the nearest one."""
    named = getattr(taskset, "named", None)
    if named is not None and split is None:
        one: Task = named(name)  # a set that would have to fetch all others to list them
        return one
    known: dict[str, Task] = {}
    for each in (split,) if split else SPLITS:
        try:
            known.update({task.id: task for task in taskset.tasks(each)})
        except ValueError:
            if split:
                raise
    found = [task for key, task in known.items() if key == name or key.endswith(f"/{name}")]
    if len(found) == 1:
        return found[0]
    near = nearest(name, known)
    some = ", ".join([near] if near else list(known)[:5])
    raise ConfigError(
        f"looking for the task {name!r}",
        got=f"{len(found)} tasks of that name" if found else f"none among {len(known)} tasks",
        expected=f"a task's id such as {some}" if some else "a task set with tasks",
    )


async def judge(bench: Bench, task: Task, end: ExecutionEnd, workspace: Workspace, folder: str) -> Score:
    """What the workspace earns."""
    name = task.scorer.name
    choice = next((each for each in bench.scorers if each.name == name), PluginChoice(name))
    scorer: Scorer = bench.make(Kind.SCORER, choice, folder)
    return await scorer.score(ScoringJob(task, end), workspace)


def score(bench: Bench, name: str, folder: Path | None, split: str | None, console: Console) -> None:
    """Judge a folder (or the task's own beginning) and print each milestone."""

    async def work(scratch: str) -> tuple[Task, Score]:
        task = find_task(bench.make(Kind.TASKSET, bench.tasks, scratch), name, split)
        sandbox: Sandbox = bench.make(Kind.SANDBOX, bench.sandbox, scratch)
        try:
            if folder is None:
                workspace = await at_start(sandbox, "score", task)
            else:
                workspace = await carry_in(sandbox, "score", folder)
            end = ExecutionEnd(ExecutionStatus.COMPLETED, "judged by hand")
            return task, await judge(bench, task, end, workspace, scratch)
        finally:
            await sandbox.close()

    task, result = carried_out(work, "score")
    console.result({"ok": True, "task": task.id, **as_plain(result)}, f"{task.id}\n{as_text(result)}")


@dataclass(slots=True)
class Told:
    """What happens in an execution, each thing a line on standard error."""

    console: Console
    began: float = field(default_factory=time.monotonic)

    def say(self, session: str, text: str) -> None:
        """A line of what happens in a session."""
        self.console.say(f"[{time.monotonic() - self.began:7.1f} s] {session}: {text}")

    def turn(self, session: str, number: int) -> None:
        """A model call was answered."""
        self.say(session, f"turn {number}")

    def tool_started(self, session: str, name: str) -> None:
        """The session waits for a tool."""
        self.say(session, f"{name} ...")

    def tool_ended(self, session: str, name: str, seconds: float) -> None:
        """The tool ended."""
        self.say(session, f"{name} took {seconds:.2f} s")

    def compacted(self, session: str) -> None:
        """The history was rewritten."""
        self.say(session, "history compacted")

    async def resting(self, state: Callable[[], bytes]) -> None:
        """Nothing is kept: the command runs one execution to its end."""


def agent(
    bench: Bench,
    name: str,
    endpoint: ModelEndpoint,
    console: Console,
    *,
    split: str | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    keep: Path | None = None,
) -> None:
    """Let one agent work on a task, show it, judge what it left; exit status 1 when it failed by our fault."""
    told = Told(console)

    async def work(scratch: str) -> tuple[ExecutionEnd, Score | None]:
        task = find_task(bench.make(Kind.TASKSET, bench.tasks, scratch), name, split)
        Readers(bench.plugins, bench.scorers, bench.context(scratch)).read(task)
        harness: Harness = bench.make(Kind.HARNESS, bench.harness, scratch)
        sandbox: Sandbox = bench.make(Kind.SANDBOX, bench.sandbox, scratch)
        try:
            workspace = await at_start(sandbox, "agent", task)
            async with kept(workspace, keep, console), Relay(endpoint, told.say) as model:
                job = ExecutionJob("agent-1", task, model, bench.limits, Purpose.EVAL, seed, temperature)
                end = await harness.run(job, workspace, told)
                failed = end.status is ExecutionStatus.FAILED
                return end, None if failed else await judge(bench, task, end, workspace, scratch)
        finally:
            close = getattr(harness, "aclose", None)
            if close is not None:
                await close()
            await sandbox.close()

    end, result = carried_out(work, "agent")
    plain = {"status": end.status.value, "reason": end.reason, "turns": end.turns, "tool_calls": end.tool_calls}
    text = f"{end.status}: {end.reason} ({end.turns} turns, {end.tool_calls} tool calls)"
    scored = {} if result is None else as_plain(result)
    console.result(
        {"ok": result is not None, **plain, **scored}, text if result is None else f"{text}\n{as_text(result)}"
    )
    if result is None:
        sys.exit(FAILED)


@asynccontextmanager
async def kept(workspace: Workspace, target: Path | None, console: Console) -> AsyncIterator[None]:
    """Whatever happens inside, the workspace is then copied to `target`, if there is one."""
    try:
        yield
    finally:
        if target is not None:
            try:
                await carry_out(workspace, target)
            except (GyreError, OSError) as error:  # what came of the agent stands
                console.say(f"The workspace was not kept whole: {error}")


def carried_out(work: Callable[[str], Coroutine[Any, Any, T]], what: str) -> T:
    """`work`, given a folder that is gone afterwards; also after Ctrl-C or SIGTERM, with the status of a stop then."""
    with tempfile.TemporaryDirectory(prefix=f"gyre-{what}-") as scratch:
        if threading.current_thread() is not threading.main_thread():  # no signal comes to another one
            return asyncio.run(work(scratch))
        try:
            return asyncio.run(until_stopped(work(scratch), lambda: None))
        except Stopped:
            sys.exit(STOPPED)


def as_plain(score: Score) -> dict[str, Any]:
    """A score as JSON-able data."""
    milestones = [
        {"name": m.name, "passed": m.passed, "weight": m.weight, "evidence": m.evidence} for m in score.milestones
    ]
    return {"score": score.value, "complete": score.complete, "why": score.why, "milestones": milestones}


def as_text(score: Score) -> str:
    """A score for a person: each milestone with the end of its evidence; `--json` has all of it."""
    lines = []
    for milestone in score.milestones:
        said = milestone.evidence.strip().splitlines()[-1:]
        told = f"  {'passed' if milestone.passed else 'missed'}  {milestone.name}"
        lines.append(told + "".join(f"  ({line.strip()})" for line in said))
    passed = sum(m.passed for m in score.milestones)
    why = f", {score.why}" if score.why else ""
    return "\n".join([*lines, f"score {score.value:.3f} ({passed} of {len(score.milestones)} milestones{why})"])
