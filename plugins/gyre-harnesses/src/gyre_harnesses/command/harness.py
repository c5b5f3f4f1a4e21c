"""Harness `command`: starts an agent program in the workspace and says from what happened how it ended.

Invariant: the program reaches its model through the gate and, in an isolated sandbox, nothing else; every model call is
seen there, so that limits and faults are told apart by evidence, not by what the program prints. Not here: what the
program does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass

import aiohttp
from gyre_core import (
    CapabilityError,
    ComponentContext,
    ExecRequest,
    ExecResult,
    ExecutionEnd,
    ExecutionJob,
    ExecutionStatus,
    HarnessEvents,
    InfrastructureError,
    Workspace,
)

from gyre_harnesses.command.gate import Gate
from gyre_harnesses.command.tally import Tally
from gyre_harnesses.options import CommandOptions

_LONGEST_WORD = 100_000
"""Bytes; Linux takes 128 KiB for one word of an environment."""
_GRACE_S = 2.0
"""What a program has to end by itself after a limit refused a call."""


class CommandHarness:
    """`Class(options, context)` as registrations require."""

    def __init__(self, options: CommandOptions | None, context: ComponentContext) -> None:
        self.options = options or CommandOptions()

    async def run(self, job: ExecutionJob, workspace: Workspace, events: HarnessEvents) -> ExecutionEnd:
        """Run the program to its end; see `gyre_core.Harness.run`."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)) as http:
            gate = Gate(http, job.endpoint, job.limits, events)
            try:
                base = await gate.serve(await _listener(workspace))
                result = await self._program(self._request(job, base), workspace, gate)
            finally:
                await gate.close()
        return _end(gate.tally, result)

    async def _program(self, request: ExecRequest, workspace: Workspace, gate: Gate) -> ExecResult | None:
        """Its result; None when it had to be ended after a limit refused a call."""
        running = asyncio.ensure_future(workspace.run(request))
        over = asyncio.ensure_future(gate.over.wait())
        try:
            await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await asyncio.wait({running}, timeout=_GRACE_S)
            return await running if running.done() else None
        finally:
            over.cancel()
            if not running.done():
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

    def _request(self, job: ExecutionJob, base: str) -> ExecRequest:
        options = self.options
        words = {
            "prompt": job.task.prompt,
            "system": job.task.system or "",
            "base_url": base,
            "host_url": base.removesuffix("/v1"),
            "api_key": job.execution,
            "model": job.endpoint.model,
            "temperature": str(job.temperature),
            "max_tokens": str(job.limits.max_call_tokens),
        }
        env = {
            "OPENAI_BASE_URL": base,
            "OPENAI_API_BASE": base,
            "OPENAI_API_KEY": job.execution,
            "ANTHROPIC_BASE_URL": words["host_url"],
            "ANTHROPIC_API_KEY": job.execution,
            "GYRE_MODEL": job.endpoint.model,
            **({"GYRE_PROMPT": job.task.prompt} if len(job.task.prompt.encode()) < _LONGEST_WORD else {}),
            **{key: fill(text, words) for key, text in options.env.items()},
        }
        return ExecRequest(
            [fill(word, words) for word in options.argv],
            job.limits.wall_s if job.limits.wall_s is not None else options.longest_s,
            options.output_bytes,
            env,
            job.task.prompt.encode() if options.prompt_on_stdin else b"",
        )


def fill(text: str, words: dict[str, str]) -> str:
    """`text` with `{name}` replaced for the names in `words`, once, and no other braces touched."""
    for name in words:
        text = text.replace(f"{{{name}}}", f"\0{name}\0")
    parts = text.split("\0")
    return "".join(words[part] if number % 2 else part for number, part in enumerate(parts))


async def _listener(workspace: Workspace) -> socket.socket:
    """A socket that the workspace's commands reach on their loopback."""
    listen = getattr(workspace, "listen", None)
    if listen is None and workspace.path is None:
        raise CapabilityError(
            "running an agent program in its sandbox",
            got="a sandbox that is not on this host and opens no way to this process",
            expected="a workspace with listen()",
            fix="Use the sandbox 'local', or a harness that runs beside the sandbox, such as 'shell' or 'mini-swe'.",
        )
    server = await listen() if listen is not None else socket.create_server(("127.0.0.1", 0), backlog=128)
    if not isinstance(server, socket.socket):
        raise InfrastructureError("opening a way from a workspace to the model", got=repr(server), expected="a socket")
    server.setblocking(False)
    return server


@dataclass(frozen=True, slots=True)
class _Verdict:
    status: ExecutionStatus
    reason: str


def _end(tally: Tally, result: ExecResult | None) -> ExecutionEnd:
    verdict = _verdict(tally, result)
    said = b"" if result is None else (result.stdout + result.stderr)[-500:]
    evidence = {
        **tally.evidence(),
        "limit": tally.refused or (result.limit if result is not None else None),
        "exit_code": None if result is None else result.exit_code,
        "final": said.decode("utf-8", "replace"),
    }
    return ExecutionEnd(verdict.status, verdict.reason, tally.answered, evidence=evidence)


def _verdict(tally: Tally, result: ExecResult | None) -> _Verdict:
    if tally.refused in ("context", "sampled_tokens"):
        return _Verdict(ExecutionStatus.TRUNCATED, f"limit of {tally.refused.replace('_', ' ')}")
    if tally.fault is not None:
        raise InfrastructureError("running an agent program", got=tally.fault, expected="a model that answers")
    if tally.refused is not None:
        return _Verdict(ExecutionStatus.TIMEOUT, f"limit of {tally.refused}")
    assert result is not None, "a program is ended only after a limit"
    if result.limit is not None:
        return _Verdict(ExecutionStatus.TIMEOUT, f"limit of {'time' if result.limit == 'wall' else result.limit}")
    if tally.answered == 0 and (result.exit_code != 0 or tally.turned_down is not None):
        # The model has not said a word, so this is the program's own doing.
        raise InfrastructureError(
            "running an agent program",
            got=f"exit {result.exit_code} before any answer of the model: "
            + (f"{tally.turned_down}: " if tally.turned_down is not None else "")
            + (result.stderr or result.stdout)[-500:].decode("utf-8", "replace"),
            expected="a program that calls its model",
            fix="Check the harness's option argv, and that the sandbox shows the program (its option visible).",
        )
    ended = "the agent program ended" if result.exit_code == 0 else f"the agent program ended with {result.exit_code}"
    return _Verdict(ExecutionStatus.COMPLETED, ended)
