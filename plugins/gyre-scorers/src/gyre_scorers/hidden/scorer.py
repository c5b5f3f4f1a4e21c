"""Scorer `pytest`: runs a hidden suite on fresh copies of the workspace.

Invariant: the workspace's own files are not changed by us; the agent's tests, conftest, pytest configuration, start-up
hooks and compiled files do not take part; each test counts by a signed result (see `guard`), a test without one has
failed. What passed is judged again in another fresh copy, with tests in it that must fail (see `probes`). A suite that
ends its process early is run again without the test that did it, in a copy of its own. Work that does not let itself be
judged earns nothing (see `copying`). Not here: what a result is worth.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import secrets
import time
from collections.abc import Mapping

from gyre_core import ComponentContext, Score, ScoringJob, Task, Workspace

from gyre_scorers.hidden import guard
from gyre_scorers.hidden.copying import Copies, UnfitError, no_python
from gyre_scorers.hidden.probes import with_probes
from gyre_scorers.hidden.suite import Results, Suite, milestones, read_suite, signed_records
from gyre_scorers.options import PytestOptions


class PytestScorer:
    """Options of a task: the fields of `gyre_scorers.hidden.suite.Suite`, with `folder` (relative to the run's
    configuration) in place of `files` where the suite is on disk.
    """

    def __init__(self, options: PytestOptions | None, context: ComponentContext) -> None:
        self.options = options or PytestOptions()
        self._base_dir = context.base_dir

    def check(self, task: Task) -> None:
        """ConfigError when the task's options are wrong, or its suite is not there."""
        read_suite(task, self._base_dir)

    async def score(self, job: ScoringJob, workspace: Workspace) -> Score:
        """One milestone per test."""
        suite = await asyncio.to_thread(read_suite, job.task, self._base_dir)
        copies, results = Copies(suite, self.options, job.task, workspace), Results()
        try:
            await self._run(suite, copies, results, suite.files)
            if suite.probes and results.void is None and results.passed:
                await self._judge_again(suite, copies, results)
        except UnfitError as error:
            results.void = str(error)
        finally:
            await copies.remove()
        partial = job.end.status.partial
        why = f"void: {results.void}" if results.void else job.end.reason if partial else ""
        return Score.of_milestones(milestones(suite, results), complete=not partial, why=why)

    async def _judge_again(self, suite: Suite, copies: Copies, results: Results) -> None:
        chance = random.Random(secrets.token_bytes(16))
        probes = await asyncio.to_thread(with_probes, suite.files, chance, results.passed)
        again = Results()
        if probes.names:
            await self._run(suite, copies, again, probes.files, _AGAIN)
        results.judged_again(again, probes)

    async def _run(
        self, suite: Suite, copies: Copies, results: Results, files: Mapping[str, bytes], times: float = 1.0
    ) -> None:
        """All runs of one judging."""
        deadline = time.monotonic() + times * (suite.timeout_s or self.options.timeout_s)
        for _ in range(self.options.most_runs):
            began = time.monotonic()
            scratch = await copies.fresh(files)
            deadline += time.monotonic() - began
            left = deadline - time.monotonic()
            if left <= 0:
                break
            key = secrets.token_bytes(32)
            run = await copies.judge(scratch, self._program(suite, key, sorted(results.outcomes)), left)
            records = signed_records(run.stdout, key)
            if not records and run.limit is None:
                raise no_python(run, copies.python[0])
            if not results.add(records, run.limit):
                break

    def _program(self, suite: Suite, key: bytes, done: list[str]) -> bytes:
        config = {
            "key": key.hex(),
            "seed": secrets.randbits(32),
            "skip": done,
            "targets": list(suite.targets),
            "files": list(suite.files),
            "arguments": list(suite.arguments),
            "paths": list(suite.paths),
            "test_timeout_s": suite.test_timeout_s or self.options.test_timeout_s,
        }
        return (
            f"{inspect.getsource(guard)}\nimport os\n_c = {config!r}\n_s = os.path.abspath('..')\n" + _START
        ).encode()


_AGAIN = 1.5
"""Times of a suite's time that a second judging may take: what just held the limit must not fail by it."""
_START = """
_c.update(root=os.getcwd(), tools=_s + "/tools.zip", ini=_s + "/suite.ini", temporary=_s + "/tmp", log=_s + "/log")
_c["paths"] = [os.path.join(os.getcwd(), path) if path != "." else os.getcwd() for path in _c["paths"]]
os.environ["PYTHONPATH"] = os.pathsep.join(_c["paths"])  # for what the tests start
main(_c)
"""
