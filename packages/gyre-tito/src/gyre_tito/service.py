"""The proxy without HTTP: executions, keys, and calls from a request to a recorded answer.

Invariants. An answer is handed out only after its call is on disk. A call belongs to the one execution whose key came
with it; a key of a closed execution is refused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from gyre_tito.backend import Backend
from gyre_tito.batch import Batch, Joined, Reader
from gyre_tito.calls import Reading
from gyre_tito.chat_format import ChatFormat
from gyre_tito.dispatch import Dispatcher, Limits
from gyre_tito.execution import Execution
from gyre_tito.metrics import Metrics
from gyre_tito.records import (
    CallRecord,
    ExecutionInfo,
    ExecutionSpec,
    OpenedExecution,
    Score,
    SessionInfo,
    SessionKind,
    Status,
)
from gyre_tito.requests import ApiError, ChatRequest, TextRequest, Transcript, invalid
from gyre_tito.retries import Answered, RequestName, retry_notes
from gyre_tito.schema import StoreError
from gyre_tito.shard import Shard
from gyre_tito.store import Store


class TitoService:
    """Executions and their calls. Lives on one event loop; see `ProxyServer` for the HTTP side."""

    def __init__(
        self,
        backend: Backend,
        store: Store,
        chat: ChatFormat,
        *,
        model: str = "policy",
        limits: Limits | None = None,
        context_limit: int | None = None,
        shard: Shard | None = None,
    ) -> None:
        self.store = store
        self.chat_format = chat
        self.model = model
        base = limits or Limits()
        self.limits = replace(base, context_limit=context_limit) if context_limit else base
        self.metrics = Metrics()
        self.base_url = ""
        self.shard = shard
        self._executions: dict[str, Execution] = {}
        self._keys: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gyre-tito-render")
        self._dispatcher = Dispatcher(backend, store, chat, self.limits, self.metrics)

    # -- executions ----------------------------------------------------------------------------------------------

    async def open_execution(self, spec: ExecutionSpec) -> OpenedExecution:
        """Open an execution; returns what its agent needs. Error: the name is taken."""
        if not spec.execution:
            raise invalid("opening an execution: its name is empty; give every execution a unique one")
        self._own(spec.execution)
        key = "gyre-" + secrets.token_urlsafe(24)
        try:
            await self.store.add_execution(spec, key)
        except StoreError as error:
            if "UNIQUE" in str(error):
                raise ApiError(
                    409, "invalid_request", f"opening execution {spec.execution!r}: one of that name exists"
                ) from error
            raise
        info = self.store.execution(spec.execution)
        self._executions[spec.execution] = Execution(info, self.chat_format)
        self.metrics.gauges["executions_open"] += 1
        return self._opened(spec.execution, key)

    async def reopen_execution(self, execution: str) -> OpenedExecution:
        """A new way in to an execution that is still open, for an agent that goes on with it; the old key is refused.

        What it recorded stays; requests that it names as before are told again. Error: none, or one that has ended.
        """
        try:
            self._open(execution)
        except StoreError as error:
            raise ApiError(404, "not_found", str(error)) from error
        key = "gyre-" + secrets.token_urlsafe(24)
        await self.store.set_key(execution, key)
        self._keys = {old: name for old, name in self._keys.items() if name != execution}
        return self._opened(execution, key)

    def _opened(self, execution: str, key: str) -> OpenedExecution:
        self._keys[key] = execution
        root = self.base_url.rstrip("/")
        return OpenedExecution(execution, key, f"{root}/v1", f"{root}/x/{key}/v1")

    async def open_session(
        self, execution: str, session: str, kind: SessionKind = "main", parent: str | None = None
    ) -> SessionInfo:
        """Name a session before its agent speaks, or correct what the proxy inferred."""
        info = SessionInfo(session, kind, parent)
        self._open(execution).label(info)
        await self.store.add_session(execution, info)
        return info

    async def close_execution(
        self,
        execution: str,
        status: Status,
        score: Score | None = None,
        cause: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> ExecutionInfo:
        """End an execution: running calls are cut (and recorded), its key is refused from now on.

        Closing one that is closed already only overwrites the verdict. `metadata` is added to what it has.
        """
        if status is Status.OPEN:
            raise invalid("closing an execution: give the status it ended with, not 'open'", "status")
        self._own(execution)
        state = self._executions.pop(execution, None)
        if state is not None:
            self.metrics.gauges["executions_open"] -= 1
            self._keys = {key: name for key, name in self._keys.items() if name != execution}
            for task in list(state.active):
                task.cancel()
            if state.active:
                await asyncio.wait(list(state.active))
        try:
            await self.store.close_execution(execution, status, score, cause, metadata)
        except StoreError as error:
            raise ApiError(404, "not_found", str(error)) from error
        return self.store.execution(execution)

    def _own(self, execution: str) -> None:
        """Refuse what another worker serves, so that a tree has one writer."""
        if self.shard is not None and not self.shard.owns(execution):
            url = self.shard.url_of(execution)
            raise ApiError(421, "invalid_request", f"execution {execution!r} is served by the worker at {url}")

    def _open(self, execution: str) -> Execution:
        self._own(execution)
        state = self._executions.get(execution)
        if state is not None:
            return state
        info = self.store.execution(execution)
        if info.status is not Status.OPEN:
            raise ApiError(409, "invalid_request", f"execution {execution!r} is closed ({info.status})")
        return self._restored(info)

    def _restored(self, info: ExecutionInfo) -> Execution:
        """Rebuild an execution that another life of this process opened."""
        state = Execution(info, self.chat_format, self.store.sessions(info.execution))
        for call, note in self.store.calls_with_match(info.execution):
            state.restore(call, note)
        self._executions[info.execution] = state
        self.metrics.gauges["executions_open"] += 1
        return state

    def authenticate(self, api_key: str) -> Execution:
        """The execution of a key. Errors: no key, an unknown one, one whose execution has ended."""
        name = self._keys.get(api_key)
        if name is not None and name in self._executions:
            return self._executions[name]
        if not api_key:
            raise ApiError(
                401, "authentication", "no API key; send the execution's key as 'Authorization: Bearer <key>'"
            )
        info = self.store.execution_of_key(api_key)
        if info is None:
            raise ApiError(401, "authentication", "unknown API key; use the key that opening the execution gave")
        if info.status is not Status.OPEN:
            raise ApiError(401, "authentication", f"this key's execution {info.execution!r} has ended ({info.status})")
        self._own(info.execution)
        state = self._executions.get(info.execution) or self._restored(info)
        self._keys[api_key] = info.execution
        return state

    # -- calls ---------------------------------------------------------------------------------------------------

    async def chat(
        self, execution: Execution, request: ChatRequest, session: str | None, name: RequestName | None = None
    ) -> Reader:
        """Start answering a chat request; `finish` or `stream` what comes back. `name`: see `gyre_tito.retries`."""
        opening = self._call_opening(request)
        transcript = request.transcript
        if opening:
            transcript = replace(transcript, prefill=transcript.prefill + opening)
        reading = Reading(
            tools=transcript.tools,
            read_calls=request.tool_choice != "none" and bool(transcript.tools),
            one_call=not request.parallel_tool_calls,
            stop=request.sampling.stop,
        )
        prefill = request.transcript.prefill

        async def start() -> Sequence[Batch]:
            self._dispatcher.admit(execution, request.sampling)
            with self.metrics.phase("plan"):
                plans = await execution.plan(transcript, session, request.sampling.n, self._pool)
            notes = retry_notes(name, plans)
            launch = self._dispatcher.launch
            return [launch(execution, plans, request.sampling, reading, transcript.dialect, prefill, notes)]

        def repeat(calls: Sequence[tuple[CallRecord, bytes]]) -> Sequence[Batch]:
            again = self._dispatcher.repeat
            return [again(execution, calls, request.sampling, reading, prefill, transcript.prefill)]

        return (await self._once(execution, name, start, repeat))[0]

    async def text(
        self, execution: Execution, request: TextRequest, session: str | None, name: RequestName | None = None
    ) -> Sequence[Reader]:
        """Start a plain completion; one reader for every prompt."""
        reading = Reading(stop=request.sampling.stop, chat=False)
        n = request.sampling.n

        async def start() -> Sequence[Batch]:
            self._dispatcher.admit(execution, request.sampling)
            with self.metrics.phase("plan"):
                plans = [plan for prompt in request.prompts for plan in execution.plan_text(prompt, session, n)]
            notes = retry_notes(name, plans)
            launch = self._dispatcher.launch
            batches: list[Batch] = []
            try:
                for at in range(0, len(plans), n):
                    mine, noted = plans[at : at + n], notes[at : at + n]
                    batches.append(launch(execution, mine, request.sampling, reading, "completions", "", noted))
            except ApiError:
                for batch in batches:
                    batch.cancel()
                raise
            return batches

        def repeat(calls: Sequence[tuple[CallRecord, bytes]]) -> Sequence[Batch]:
            again = self._dispatcher.repeat
            parts = [calls[at : at + n] for at in range(0, len(calls), n)]
            return [again(execution, part, request.sampling, reading) for part in parts]

        return await self._once(execution, name, start, repeat)

    async def _once(
        self,
        execution: Execution,
        name: RequestName | None,
        start: Callable[[], Awaitable[Sequence[Batch]]],
        repeat: Callable[[Sequence[tuple[CallRecord, bytes]]], Sequence[Batch]],
    ) -> Sequence[Reader]:
        """Start a request, unless it is one that runs or was answered already."""
        if name is None:
            return await start()
        while True:
            found = execution.attempts.find(name)
            if isinstance(found, Answered):
                self.metrics.count("repeats", "recorded")
                return repeat(self.store.calls_with_match(execution.info.execution, found.calls))
            if found is None:
                break
            if batches := await found.batches():
                self.metrics.count("repeats", "joined")
                return [Joined(batch) for batch in batches]
        attempt = execution.attempts.begin(name)
        try:
            started = await start()
        except BaseException:
            execution.attempts.refused(name, attempt)
            raise
        execution.attempts.runs(name, attempt, started)
        return started

    def _call_opening(self, request: ChatRequest) -> str:
        """Text that forces a tool call; it is context, not sampled. Error: the format has no such text."""
        if request.tool_choice in ("auto", "none"):
            return ""
        name = request.tool_choice.removeprefix("tool:") if request.tool_choice != "required" else None
        opening = self.chat_format.call_opening(name)
        if opening is None:
            raise invalid(
                f"tool_choice {request.tool_choice!r} cannot be forced in the chat format {self.chat_format.family!r}; "
                "use 'auto' and say in the prompt that a tool must be called",
                "tool_choice",
            )
        return opening

    async def count_tokens(self, transcript: Transcript) -> int:
        """Tokens of a fresh prompt with these messages."""
        messages = (*transcript.preface, *transcript.decode(transcript.raw))
        loop = asyncio.get_running_loop()
        return len(await loop.run_in_executor(self._pool, self.chat_format.render, messages, transcript.tools))

    async def close(self) -> None:
        """Cut running calls, record them, and let go of threads. The store stays open."""
        await self._dispatcher.close()
        self._pool.shutdown(wait=False)
