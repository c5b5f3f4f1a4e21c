"""Scorer `commands`: each milestone is a command run in the workspace with an expected result.

Invariant: commands run through the workspace, so under its isolation and limits, in the task's order; a command that
fails, hangs or floods is a milestone not passed. The agent's files can influence the commands: what must not be
influenced belongs into `files` checks or a hidden suite. Not here: judging text beyond equality and patterns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gyre_core import ComponentContext, ExecRequest, ExecResult, Milestone, Score, ScoringJob, Task, Workspace

from gyre_scorers.files import difference, stripped
from gyre_scorers.options import CommandsOptions
from gyre_scorers.reading import fault, milestone_specs, value

_KEYS = ("run", "exit", "stdout", "contains", "matches", "stdin", "timeout_s", "weight", "name", "cwd")


class CommandsScorer:
    """Options of a task: `{"milestones": [{"run": "…" or [argv], "exit": 0, …}]}`.

    `run`: a text for `bash -c`, or argv. `exit`: expected exit code (null: any). `stdout`: expected output, white space
    at line ends ignored. `contains`: texts that all stand in stdout. `matches`: a regular expression found in stdout.
    `stdin`, `cwd`, `timeout_s`, `weight`, `name`: as they say.
    """

    def __init__(self, options: CommandsOptions | None, context: ComponentContext) -> None:
        self.options = options or CommandsOptions()

    def check(self, task: Task) -> None:
        """ConfigError when the task's options are wrong."""
        _specs(task)

    async def score(self, job: ScoringJob, workspace: Workspace) -> Score:
        """One milestone per command, in the task's order."""
        specs = _specs(job.task)
        milestones = [await self._milestone(spec, workspace) for spec in specs]
        partial = job.end.status.partial
        return Score.of_milestones(milestones, complete=not partial, why=job.end.reason if partial else "")

    async def _milestone(self, spec: Mapping[str, Any], workspace: Workspace) -> Milestone:
        run = spec["run"]
        argv = ["bash", "-c", run] if isinstance(run, str) else list(run)
        request = ExecRequest(
            argv,
            float(spec.get("timeout_s", self.options.timeout_s)),
            self.options.output_bytes,
            stdin=spec.get("stdin", "").encode(),
            cwd=spec.get("cwd", "."),
        )
        try:
            result = await workspace.run(request)
        except OSError as error:
            problem = f"cannot run in {request.cwd!r}: {error.strerror}"
        else:
            problem = judge(spec, result)
        label = spec.get("name") or (run if isinstance(run, str) else " ".join(run))
        return Milestone(label, not problem, float(spec.get("weight", 1.0)), problem)


def _specs(task: Task) -> list[Mapping[str, Any]]:
    specs = milestone_specs(task, task.scorer.options, known=_KEYS)
    for index, spec in enumerate(specs):
        _check(task, spec, f"milestone {index}")
    return specs


def _check(task: Task, spec: Mapping[str, Any], where: str) -> None:
    run = spec.get("run")
    argv = isinstance(run, list | tuple) and run and all(isinstance(word, str) for word in run)
    if not (argv or (isinstance(run, str) and run)):
        raise fault(task, f"{where}, 'run'", run, "a command line or a list of words")
    value(task, spec, where, "exit", (int, type(None)), 0)
    for key in ("stdout", "matches", "stdin", "name", "cwd"):
        value(task, spec, where, key, str, None)
    value(task, spec, where, "timeout_s", (int, float), None)
    texts = spec.get("contains", [])
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise fault(task, f"{where}, 'contains'", texts, "a list of texts")
    try:
        re.compile(spec.get("matches", ""))
    except re.error as error:
        raise fault(task, f"{where}, 'matches'", spec["matches"], f"a regular expression ({error})") from error


def judge(spec: Mapping[str, Any], result: ExecResult) -> str:
    """What is wrong with a result, empty when nothing is."""
    if result.limit is not None:
        return f"killed at the limit of {result.limit} after {result.seconds:.1f} s"
    expected = spec.get("exit", 0)
    if expected is not None and result.exit_code != expected:
        tail = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-200:]
        return f"exit {result.exit_code}, expected {expected}" + (f": {tail}" if tail else "")
    if "stdout" in spec:
        got, want = stripped(result.stdout), stripped(spec["stdout"].encode())
        if got != want:
            return f"stdout: {difference(got, want)}"
    text = result.stdout.decode("utf-8", "replace")
    missing = [part for part in spec.get("contains", []) if part not in text]
    if missing:
        return f"stdout lacks {missing[0]!r:.80}"
    if "matches" in spec and re.search(spec["matches"], text) is None:
        return f"stdout does not match {spec['matches']!r:.80}"
    return ""
