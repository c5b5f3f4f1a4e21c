"""Scorer `pytest`: runs a hidden suite on a fresh copy of the workspace.

Invariant: the workspace's own files are not changed; the agent's tests, conftest, pytest configuration, start-up hooks
and compiled files do not take part; each test counts by a signed result (see `guard`), a test without one has failed.
What passed is judged again in another fresh copy, with tests in it that must fail (see `probes`). A suite that ends its
process early is run again without the test that did it. Not here: what a result is worth.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import random
import secrets
import shlex
import time

from gyre_core import ComponentContext, ExecRequest, ExecResult, InfrastructureError, Score, ScoringJob, Workspace

from gyre_scorers.hidden import guard
from gyre_scorers.hidden.probes import with_probes
from gyre_scorers.hidden.suite import Results, Suite, milestones, read_suite, signed_records
from gyre_scorers.hidden.tools import pytest_archive
from gyre_scorers.options import PytestOptions

_REMOVED = ("__pycache__", "*.pyc", "*.pth", "conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini")
_INI = b"[pytest]\n"


class PytestScorer:
    """Options of a task: the fields of `gyre_scorers.hidden.suite.Suite`, with `folder` (relative to the run's
    configuration) in place of `files` where the suite is on disk.
    """

    def __init__(self, options: PytestOptions | None, context: ComponentContext) -> None:
        self.options = options or PytestOptions()
        self._base_dir = context.base_dir

    async def score(self, job: ScoringJob, workspace: Workspace) -> Score:
        """One milestone per test."""
        suite = await asyncio.to_thread(read_suite, job.task, self._base_dir)
        scratch = f".gyre-{secrets.token_hex(8)}"
        try:
            await self._lay_out(suite, workspace, scratch)
            results = await self._run(suite, workspace, scratch)
            if suite.probes and results.void is None and results.passed:
                await self._judge_again(suite, results, workspace, scratch)
        finally:
            with contextlib.suppress(OSError):
                await workspace.run(ExecRequest(["rm", "-rf", scratch], 600.0, 1000))
        partial = job.end.status.partial
        why = f"void: {results.void}" if results.void else job.end.reason if partial else ""
        return Score.of_milestones(milestones(suite, results), complete=not partial, why=why)

    async def _judge_again(self, suite: Suite, results: Results, workspace: Workspace, scratch: str) -> None:
        chance = random.Random(secrets.token_bytes(16))
        probes = await asyncio.to_thread(with_probes, suite.files, chance)
        if not probes.names:
            return
        changed = dataclasses.replace(suite, files=probes.files)
        await workspace.run(ExecRequest(["rm", "-rf", scratch], self.options.setup_s, 1000))
        await self._lay_out(changed, workspace, scratch)
        results.judged_again(await self._run(changed, workspace, scratch, _AGAIN), probes)

    async def _run(self, suite: Suite, workspace: Workspace, scratch: str, times: float = 1.0) -> Results:
        """All runs of one judging. The tools are brought anew for each: a run before may have been at them."""
        results = Results()
        deadline = time.monotonic() + times * (suite.timeout_s or self.options.timeout_s)
        for _ in range(self.options.most_runs):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await workspace.write(f"{scratch}/tools.zip", pytest_archive())
            await workspace.write(f"{scratch}/suite.ini", _INI)
            key = secrets.token_bytes(32)
            program = self._program(suite, scratch, key, sorted(results.outcomes))
            run = await self._python(suite, workspace, scratch, program, left)
            records = signed_records(run.stdout, key)
            if not records and run.limit is None:
                raise InfrastructureError(
                    f"running the hidden suite with {suite.python or self.options.python}",
                    got=(run.stderr or run.stdout).decode("utf-8", "replace")[-500:],
                    expected="a Python of at least 3.10 in the sandbox that can run the pytest brought along",
                    fix="Install one in the sandbox, or set the scorer's option python.",
                )
            if not results.add(records, run.limit):
                break
        return results

    async def _lay_out(self, suite: Suite, workspace: Workspace, scratch: str) -> None:
        names = " -o ".join(f"-name {shlex.quote(name)}" for name in _REMOVED)
        lines = (
            f"mkdir -p {scratch}/repo {scratch}/home",
            f"find . -mindepth 1 -maxdepth 1 ! -name '.gyre-*' -exec cp -RP {{}} {scratch}/repo/ ';'",
            f"chmod -R u+rwX {scratch}",
            f"cd {scratch}/repo",
            f"find . '(' {names} ')' -prune -exec rm -rf {{}} +",
        )
        copied = await workspace.run(ExecRequest(["sh", "-c", "\n".join(lines)], self.options.setup_s, 10_000))
        if copied.limit is not None:
            raise InfrastructureError(
                "copying a workspace to score it",
                got=f"killed at the limit of {copied.limit}",
                expected="room and time for a second copy",
                fix="Raise the sandbox's disk limit or the scorer's option setup_s.",
            )
        await self._put_suite(suite, workspace, scratch)
        for line in suite.setup:
            await workspace.run(
                ExecRequest(["sh", "-c", line], self.options.setup_s, 1 << 16, cwd=f"{scratch}/repo", env=_ENV)
            )
        if suite.setup:
            await self._put_suite(suite, workspace, scratch)

    async def _put_suite(self, suite: Suite, workspace: Workspace, scratch: str) -> None:
        """Whatever the agent, or its set-up, left where the suite goes is replaced."""
        await workspace.run(ExecRequest(["sh", "-c", _CLEAR, "sh", *suite.targets], 600.0, 1000, cwd=f"{scratch}/repo"))
        gone = [f"{scratch}/repo/{path}" for path in suite.files]
        for start in range(0, len(gone), 200):
            await workspace.run(ExecRequest(["rm", "-rf", "--", *gone[start : start + 200]], 600.0, 1000))
        for path, data in suite.files.items():
            try:
                await workspace.write(f"{scratch}/repo/{path}", data)
            except OSError:
                # A file or a link of the agent's stands where the suite needs a folder.
                top = path.split("/")[0]
                await workspace.run(ExecRequest(["rm", "-rf", "--", f"{scratch}/repo/{top}"], 600.0, 1000))
                await workspace.write(f"{scratch}/repo/{path}", data)

    def _program(self, suite: Suite, scratch: str, key: bytes, done: list[str]) -> bytes:
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

    async def _python(
        self, suite: Suite, workspace: Workspace, scratch: str, program: bytes, timeout_s: float
    ) -> ExecResult:
        argv = [suite.python or self.options.python, "-I", "-B", *([] if suite.site_packages else ["-S"]), "-"]
        return await workspace.run(
            ExecRequest(argv, timeout_s, self.options.output_bytes, _ENV, program, f"{scratch}/repo")
        )


_AGAIN = 1.5
"""Times of a suite's time that a second judging may take: what just held the limit must not fail by it."""
_CLEAR = """
for target in "$@"; do
    if [ -L "$target" ]; then rm -f -- "$target"; fi
    if [ -d "$target" ]; then find "./$target" '(' -name 'test_*.py' -o -name '*_test.py' ')' -exec rm -rf {} +; fi
done
"""
_START = """
_c.update(root=os.getcwd(), tools=_s + "/tools.zip", ini=_s + "/suite.ini", temporary=_s + "/tmp", log=_s + "/log")
_c["paths"] = [os.path.join(os.getcwd(), path) if path != "." else os.getcwd() for path in _c["paths"]]
os.environ["PYTHONPATH"] = os.pathsep.join(_c["paths"])  # for what the tests start
main(_c)
"""


_ENV = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
