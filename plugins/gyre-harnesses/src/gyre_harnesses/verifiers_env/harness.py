"""Harness `verifiers`: plays one episode of an environment of the package verifiers and keeps its rewards as evidence.

Invariant: its model is reached through the gate alone; an episode that failed for another reason than a limit or the
model's own text is our fault and has no reward. Where its tools run is up to the environment's runtime, not to our
sandbox, which stays empty. Not here: the environment.
"""

from __future__ import annotations

import socket
from typing import Any

import aiohttp
from gyre_core import (
    ComponentContext,
    ExecutionEnd,
    ExecutionJob,
    ExecutionStatus,
    HarnessEvents,
    InfrastructureError,
    Workspace,
)

from gyre_harnesses.command.gate import Gate
from gyre_harnesses.command.tally import Tally
from gyre_harnesses.options import VerifiersOptions
from gyre_harnesses.verifiers_env.process import ask, environment_config

_START_S = 120.0
"""On top of the execution's limit of time: importing the package and the environment."""


class VerifiersHarness:
    """`Class(options, context)` as registrations require."""

    def __init__(self, options: VerifiersOptions | None, context: ComponentContext) -> None:
        self.options = options or VerifiersOptions()

    async def run(self, job: ExecutionJob, workspace: Workspace, events: HarnessEvents) -> ExecutionEnd:
        """Play to the end; see `gyre_core.Harness.run`."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)) as http:
            gate = Gate(http, job.endpoint, job.limits, events)
            listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            listener.setblocking(False)
            try:
                base = await gate.serve(listener)
                wall = job.limits.wall_s
                answer = await ask(
                    self.options, self._job(job, base), job.execution, None if wall is None else wall + _START_S
                )
            except TimeoutError:
                answer = {"late": True}
            finally:
                await gate.close()
        return _end(gate.tally, answer)

    def _job(self, job: ExecutionJob, base: str) -> dict[str, Any]:
        index = job.task.metadata.get("index")
        if not isinstance(index, int):
            raise InfrastructureError(
                f"playing the task {job.task.id!r} with the harness 'verifiers'",
                got="a task without an index",
                expected="a task of the task set 'verifiers'",
            )
        limits = job.limits
        sampling = {"temperature": job.temperature, "top_p": job.top_p, "max_tokens": limits.max_call_tokens}
        env = environment_config(self.options)
        if isinstance(env.get("agent"), dict):
            env["agent"] = {"max_turns": limits.max_turns, "timeout": {"rollout": limits.wall_s}, **env["agent"]}
        return {"env": env, "index": index, "base_url": base, "model": job.endpoint.model, "sampling": sampling}


def _end(tally: Tally, answer: dict[str, Any]) -> ExecutionEnd:
    evidence = {
        **tally.evidence(),
        "rewards": answer.get("rewards", {}),
        "stop": answer.get("stop", []),
        "errors": answer.get("errors", [])[:5],
    }
    status, reason = _verdict(tally, answer)
    return ExecutionEnd(status, reason, tally.answered, evidence=evidence)


def _verdict(tally: Tally, answer: dict[str, Any]) -> tuple[ExecutionStatus, str]:
    if tally.refused in ("context", "sampled_tokens") or (
        answer.get("truncated") and "max_turns" not in answer["stop"]
    ):
        return ExecutionStatus.TRUNCATED, f"limit of {(tally.refused or 'tokens').replace('_', ' ')}"
    if tally.fault is None:
        if tally.refused is not None or "max_turns" in answer.get("stop", ()):
            return ExecutionStatus.TIMEOUT, "limit of turns"
        if answer.get("late"):
            return ExecutionStatus.TIMEOUT, "limit of time"
        if not answer.get("ok") and tally.answered and tally.turned_down is not None:
            return ExecutionStatus.TRUNCATED, "a request that was turned down"
    if tally.fault is not None or not answer.get("ok"):
        got = tally.fault or tally.turned_down or "; ".join(answer.get("errors", [])) or "no verdict"
        raise InfrastructureError("playing an episode of verifiers", got=got[:800], expected="an episode that ends")
    return ExecutionStatus.COMPLETED, "the episode ended"
