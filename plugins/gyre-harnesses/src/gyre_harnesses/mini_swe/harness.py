"""Harness `mini-swe`: mini-swe-agent in a process beside us, its commands in the sandbox, its calls through a gate.

Invariant: the agent's process never runs a command itself; limits and faults are told apart at the gate, as for any
program. The process ends with the execution. Not here: the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import time
from typing import Any

import aiohttp
from gyre_core import (
    ComponentContext,
    ExecRequest,
    ExecutionEnd,
    ExecutionJob,
    ExecutionStatus,
    HarnessEvents,
    InfrastructureError,
    Workspace,
)

from gyre_harnesses.command.gate import Gate
from gyre_harnesses.command.tally import Tally
from gyre_harnesses.foreign import interpreter
from gyre_harnesses.options import MiniSweOptions

_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
_LINE_BYTES = 1 << 24
_START_S = 300.0
_ENDS = {
    "Submitted": (ExecutionStatus.COMPLETED, "the agent submitted its work"),
    "LimitsExceeded": (ExecutionStatus.TIMEOUT, "limit of turns"),
    "TimeExceeded": (ExecutionStatus.TIMEOUT, "limit of time"),
    "RepeatedFormatError": (ExecutionStatus.TIMEOUT, "limit of unreadable answers in a row"),
}
_BY_ITSELF = ("Submitted", "RepeatedFormatError")
"""Ends that follow from what the model said, whatever came after."""


class MiniSweHarness:
    """`Class(options, context)` as registrations require."""

    def __init__(self, options: MiniSweOptions | None, context: ComponentContext) -> None:
        self.options = options or MiniSweOptions()

    async def run(self, job: ExecutionJob, workspace: Workspace, events: HarnessEvents) -> ExecutionEnd:
        """Run the agent to its end; see `gyre_core.Harness.run`."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)) as http:
            gate = Gate(http, job.endpoint, job.limits, events)
            listener = socket.create_server(("127.0.0.1", 0), backlog=16)
            listener.setblocking(False)
            with tempfile.TemporaryDirectory(prefix="gyre-mini-swe-") as home:
                try:
                    base = await gate.serve(listener)
                    worker = await self._start(home, base, job)
                    try:
                        said, tools = await _Talk(job, workspace, worker, gate).run(self._job(job, base))
                    finally:
                        with contextlib.suppress(ProcessLookupError):
                            worker.kill()
                        await worker.wait()
                finally:
                    await gate.close()
        return _end(gate.tally, said, tools)

    async def _start(self, home: str, base: str, job: ExecutionJob) -> asyncio.subprocess.Process:
        env = {
            "PATH": os.defpath,
            "HOME": home,
            "LANG": "C.UTF-8",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": home,
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_BASE_URL": base,
            "OPENAI_API_BASE": base,
            "OPENAI_API_KEY": job.execution,
        }
        python = interpreter(self.options.python, "minisweagent")
        try:
            return await asyncio.create_subprocess_exec(
                python,
                "-I",
                _WORKER,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=env,
                cwd=home,
                limit=_LINE_BYTES,
            )
        except OSError as error:
            raise InfrastructureError("starting mini-swe-agent", got=str(error), expected=f"{python} to run") from error

    def _job(self, job: ExecutionJob, base: str) -> dict[str, Any]:
        limits = job.limits
        return {
            "config": self.options.config,
            "prompt": job.task.prompt,
            "model": self.options.model_prefix + job.endpoint.model,
            "model_kwargs": {
                "api_base": base,
                "api_key": job.execution,
                "temperature": job.temperature,
                "top_p": job.top_p,
                "max_tokens": limits.max_call_tokens,
                **self.options.model_kwargs,
            },
            "step_limit": limits.max_turns or 0,
            "tool_s": max(1, int(limits.tool_s)),
        }


class _Talk:
    """The conversation with one worker."""

    def __init__(self, job: ExecutionJob, workspace: Workspace, worker: asyncio.subprocess.Process, gate: Gate) -> None:
        self.limits, self.workspace, self.worker, self.gate = job.limits, workspace, worker, gate
        self.deadline: float | None = None
        self.started = asyncio.Event()
        self.tools = 0
        self.errors = bytearray()

    async def run(self, job: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """What the worker said of the agent's end, and how many commands were run."""
        listening = asyncio.ensure_future(self._keep_errors())
        over = asyncio.ensure_future(self.gate.over.wait())
        started = asyncio.ensure_future(self.started.wait())
        talking = asyncio.ensure_future(self._talk(job))
        try:
            # Importing the agent takes seconds; the limit of time is from the first call on.
            await asyncio.wait({talking, started}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
            if not started.done() and not talking.done():
                raise InfrastructureError(
                    "starting mini-swe-agent", got=f"nothing for {_START_S} s", expected="it to start"
                )
            await asyncio.wait({talking, over}, timeout=self.limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
            if over.done() and not talking.done():
                await asyncio.wait({talking}, timeout=5.0)
            if talking.done():
                return talking.result(), self.tools
            return {"end": "TimeExceeded", "text": ""}, self.tools
        finally:
            for task in (talking, over, listening, started):
                task.cancel()
            await asyncio.gather(talking, over, listening, started, return_exceptions=True)

    async def _keep_errors(self) -> None:
        assert self.worker.stderr is not None
        while chunk := await self.worker.stderr.read(1 << 16):
            self.errors += chunk
            del self.errors[:-2000]

    async def _talk(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        message: dict[str, Any] | None = job
        while True:
            if message is not None:
                self.worker.stdin.write(json.dumps(message).encode() + b"\n")
            try:
                line = await self.worker.stdout.readline()
            except ConnectionError:
                line = b""
            if not line:
                raise InfrastructureError(
                    "running mini-swe-agent",
                    got=f"its process ended: {self.errors.decode('utf-8', 'replace').strip()[-800:]}",
                    expected="an interpreter that has mini-swe-agent 2",
                    fix="Install mini-swe-agent there, build the environment `harnesses`, or set the option python.",
                )
            said: dict[str, Any] = json.loads(line)
            if "end" in said:
                return said
            if "ready" in said:
                self.started.set()
                self.deadline = None if self.limits.wall_s is None else time.monotonic() + self.limits.wall_s
            message = None if "ready" in said else await self._command(said)

    async def _command(self, asked: dict[str, Any]) -> dict[str, Any]:
        left = 1e9 if self.deadline is None else max(0.1, self.deadline - time.monotonic())
        limits = self.limits
        self.tools += 1
        command = str(asked["run"]).replace("\0", "").encode("utf-8", "replace").decode()
        request = ExecRequest(["bash", "-c", command], min(limits.tool_s, left), limits.tool_output_bytes)
        result = await self.workspace.run(request)
        text = (result.stdout + result.stderr).decode("utf-8", "replace")
        if result.dropped_bytes:
            text += f"\n[cut: {result.dropped_bytes} more bytes]"
        why = "" if result.limit is None else f"the command was killed at the limit of {result.limit}"
        return {
            "output": text,
            "returncode": -1 if result.exit_code is None else result.exit_code,
            "exception_info": why,
        }


def _end(tally: Tally, said: dict[str, Any], tools: int) -> ExecutionEnd:
    ended = str(said["end"])
    evidence = {**tally.evidence(), "exit_status": ended, "final": said["text"][:500]}
    if tally.refused in ("context", "sampled_tokens"):
        status, reason = ExecutionStatus.TRUNCATED, f"limit of {tally.refused.replace('_', ' ')}"
    elif tally.refused is not None and tally.fault is None:
        status, reason = ExecutionStatus.TIMEOUT, f"limit of {tally.refused}"
    elif ended in _ENDS and (tally.fault is None or ended in _BY_ITSELF):
        status, reason = _ENDS[ended]
    elif tally.answered and tally.fault is None and tally.turned_down is not None:
        status, reason = ExecutionStatus.COMPLETED, f"the agent ended with {ended} after a request that was turned down"
    else:
        raise InfrastructureError(
            "running mini-swe-agent",
            got=tally.fault or tally.turned_down or f"{ended}: {said['text'][-800:]}",
            expected="an agent that ends",
        )
    return ExecutionEnd(status, reason, tally.answered, tools, evidence=evidence)
