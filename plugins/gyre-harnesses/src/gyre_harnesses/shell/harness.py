"""Harness `shell`: runs the agent of `agent.py` for one execution and says how it ended.

Invariant: the status is given from what happened, in one place (`_end`); only InfrastructureError and cancellation
leave `run`. Stateless between executions but for one HTTP session. Not here: scoring.
"""

from __future__ import annotations

import time

import aiohttp
from gyre_core import ComponentContext, ExecutionEnd, ExecutionJob, ExecutionStatus, HarnessEvents, Workspace

from gyre_harnesses.options import ShellOptions
from gyre_harnesses.shell.agent import Budget, Conversation, LimitError
from gyre_harnesses.shell.chat import ChatClient, Patience
from gyre_harnesses.shell.tools import FileTools

_STATUS_OF = {
    "done": ExecutionStatus.COMPLETED,
    "turns": ExecutionStatus.TIMEOUT,
    "wall": ExecutionStatus.TIMEOUT,
    "context": ExecutionStatus.TRUNCATED,
    "sampled_tokens": ExecutionStatus.TRUNCATED,
}
_REASON_OF = {
    "done": "the agent said it was done",
    "turns": "limit of turns",
    "wall": "limit of time",
    "context": "limit of context tokens",
    "sampled_tokens": "limit of sampled tokens",
}


class ShellHarness:
    """`Class(options, context)` as registrations require; `aclose` when no execution will follow."""

    def __init__(self, options: ShellOptions | None, context: ComponentContext) -> None:
        self.options = options or ShellOptions()
        self._context = context
        self._http: aiohttp.ClientSession | None = None

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None or self._http.closed:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            )
        return self._http

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

    async def run(self, job: ExecutionJob, workspace: Workspace, events: HarnessEvents) -> ExecutionEnd:
        """Run the agent to its end; see `gyre_core.Harness.run`."""
        limits, options = job.limits, self.options
        budget = Budget(
            deadline=None if limits.wall_s is None else time.monotonic() + limits.wall_s,
            sampled_left=limits.max_sampled_tokens,
            context_limit=limits.max_context_tokens,
        )
        patience = Patience(options.retries, options.retry_first_s)
        main = Conversation(
            job,
            options,
            ChatClient(self._session(), job.endpoint, patience),
            FileTools(workspace, options.shell, limits.tool_output_bytes),
            events,
            budget,
            session="main",
            parent=None,
            prompt=job.task.prompt,
            max_turns=limits.max_turns,
        )
        try:
            outcome = await main.run()
            how, text = outcome.how, outcome.text
        except LimitError as limit:
            how, text = str(limit), ""
        return _end(how, text, main.turns, budget)


def _end(how: str, text: str, turns: int, budget: Budget) -> ExecutionEnd:
    evidence = {
        "limit": None if how == "done" else how,
        "final": text[:500],
        "sampled_tokens": budget.sampled,
        "longest_context": budget.longest_context,
        "mistakes": budget.mistakes,
    }
    return ExecutionEnd(
        _STATUS_OF[how],
        _REASON_OF[how],
        turns,
        budget.tool_calls,
        budget.sub_agents,
        budget.compactions,
        evidence,
        budget.answered,
    )
