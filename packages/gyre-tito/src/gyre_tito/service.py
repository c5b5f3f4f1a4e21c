"""The proxy without HTTP: executions, keys, and calls from a request to a recorded answer.

Invariants. An answer is handed out only after its call is on disk. A call belongs to the one execution whose key came
with it; a key of a closed execution is refused. A client that goes away stops the engine, and what was sampled stays.
If the store cannot take a call, its execution takes no more calls: a tree with holes is worse than an error.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from gyre_tito.backend import Backend, BackendOverloadedError, GenerateCall, PromptTooLongError, Sampling
from gyre_tito.calls import CallRun, Reading
from gyre_tito.chat_format import ChatFormat, ParsedTurn
from gyre_tito.execution import Execution, Plan, SessionState
from gyre_tito.metrics import Metrics
from gyre_tito.records import (
    ExecutionInfo,
    ExecutionSpec,
    OpenedExecution,
    Score,
    SessionInfo,
    SessionKind,
    Status,
)
from gyre_tito.requests import (
    Answer,
    ApiError,
    ChatRequest,
    Choice,
    Delta,
    Finish,
    SamplingRequest,
    TextRequest,
    invalid,
)
from gyre_tito.schema import StoreError
from gyre_tito.store import Store
from gyre_tito.streaming import GrowingText


@dataclass(frozen=True, slots=True)
class Limits:
    """`context_limit`: prompt plus sampled tokens that the engine can hold (None: the engine says so itself).

    `max_tokens`: used when a client names none. `max_in_flight` calls run at once, `max_waiting` more wait, the rest
    are told to come back. `max_choices` bounds `n`. `cache_executions`: trees of closed executions are dropped at once,
    of open ones never.
    """

    context_limit: int | None = None
    max_tokens: int = 4096
    max_in_flight: int = 1024
    max_waiting: int = 4096
    max_choices: int = 64


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
    ) -> None:
        self.backend = backend
        self.store = store
        self.chat = chat
        self.model = model
        base = limits or Limits()
        self.limits = replace(base, context_limit=context_limit) if context_limit else base
        self.metrics = Metrics()
        self.base_url = ""
        self._executions: dict[str, Execution] = {}
        self._keys: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gyre-tito-render")
        self._slots = asyncio.Semaphore(self.limits.max_in_flight)
        self._tasks: set[asyncio.Task[None]] = set()

    # -- executions ----------------------------------------------------------------------------------------------

    async def open_execution(self, spec: ExecutionSpec) -> OpenedExecution:
        """Open an execution; returns what its agent needs. Error: the name is taken."""
        if not spec.execution:
            raise invalid("opening an execution: its name is empty; give every execution a unique one")
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
        self._executions[spec.execution] = Execution(info, self.chat)
        self._keys[key] = spec.execution
        self.metrics.gauges["executions_open"] += 1
        root = self.base_url.rstrip("/")
        return OpenedExecution(spec.execution, key, f"{root}/v1", f"{root}/x/{key}/v1")

    async def open_session(
        self, execution: str, session: str, kind: SessionKind = "main", parent: str | None = None
    ) -> SessionInfo:
        """Name a session before its agent speaks, or correct what the proxy inferred."""
        info = SessionInfo(session, kind, parent)
        self._open(execution).label(info)
        await self.store.add_session(execution, info)
        return info

    async def close_execution(
        self, execution: str, status: Status, score: Score | None = None, cause: str = ""
    ) -> ExecutionInfo:
        """End an execution: running calls are cut (and recorded), its key is refused from now on.

        Closing one that is closed already only overwrites the verdict.
        """
        if status is Status.OPEN:
            raise invalid("closing an execution: give the status it ended with, not 'open'", "status")
        state = self._executions.pop(execution, None)
        if state is not None:
            self.metrics.gauges["executions_open"] -= 1
            self._keys = {key: name for key, name in self._keys.items() if name != execution}
            for task in list(state.active):
                task.cancel()
            if state.active:
                await asyncio.wait(list(state.active))
        try:
            await self.store.close_execution(execution, status, score, cause)
        except StoreError as error:
            raise ApiError(404, "not_found", str(error)) from error
        return self.store.execution(execution)

    def _open(self, execution: str) -> Execution:
        state = self._executions.get(execution)
        if state is not None:
            return state
        info = self.store.execution(execution)
        if info.status is not Status.OPEN:
            raise ApiError(409, "invalid_request", f"execution {execution!r} is closed ({info.status})")
        return self._restored(info)

    def _restored(self, info: ExecutionInfo) -> Execution:
        """Rebuild an execution that another life of this process opened."""
        state = Execution(info, self.chat, self.store.sessions(info.execution))
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
        state = self._executions.get(info.execution) or self._restored(info)
        self._keys[api_key] = info.execution
        return state

    # -- calls ---------------------------------------------------------------------------------------------------

    async def chat_answer(self, execution: Execution, request: ChatRequest, session: str | None) -> Answer:
        """Answer a chat request; returns when all its calls are on disk."""
        runs = await self._start_chat(execution, request, session)
        return await self._finish(runs, request.sampling)

    async def chat_stream(
        self, execution: Execution, request: ChatRequest, session: str | None
    ) -> AsyncIterator[Delta | Answer]:
        """Answer piece by piece; the last item is the whole `Answer`, after its calls are on disk."""
        runs = await self._start_chat(execution, request, session)
        async for item in self._stream(runs, request.sampling):
            yield item

    async def text_answer(self, execution: Execution, request: TextRequest, session: str | None) -> Answer:
        """Answer a plain completion."""
        return await self._finish(self._start_text(execution, request, session), request.sampling)

    async def text_stream(
        self, execution: Execution, request: TextRequest, session: str | None
    ) -> AsyncIterator[Delta | Answer]:
        """A plain completion, piece by piece."""
        async for item in self._stream(self._start_text(execution, request, session), request.sampling):
            yield item

    async def _start_chat(self, execution: Execution, request: ChatRequest, session: str | None) -> _Runs:
        self._check(execution, request.sampling)
        with self.metrics.phase("plan"):
            plans = await execution.plan(request.transcript, session, request.sampling.n, self._pool)
        reading = Reading(
            tools=request.transcript.tools,
            read_calls=request.tool_choice != "none" and bool(request.transcript.tools),
            one_call=not request.parallel_tool_calls,
            stop=request.sampling.stop,
        )
        return self._launch(execution, plans, request.sampling, reading, request.transcript.dialect)

    def _start_text(self, execution: Execution, request: TextRequest, session: str | None) -> _Runs:
        self._check(execution, request.sampling)
        with self.metrics.phase("plan"):
            if isinstance(request.prompt, str):
                ids = self.chat.encode(request.prompt)
            else:
                ids = np.asarray(request.prompt, dtype=np.int32)
            plans = execution.plan_ids(ids, session, request.sampling.n)
        reading = Reading(stop=request.sampling.stop, chat=False)
        return self._launch(execution, plans, request.sampling, reading, "completions")

    def _check(self, execution: Execution, sampling: SamplingRequest) -> None:
        if execution.lost:
            raise ApiError(503, "engine", f"this execution takes no more calls: {execution.lost}")
        if not 1 <= sampling.n <= self.limits.max_choices:
            raise invalid(f"n must be between 1 and {self.limits.max_choices}, got {sampling.n}", "n")
        if self.metrics.gauges["waiting"] >= self.limits.max_waiting:
            raise ApiError(429, "overloaded", f"{self.limits.max_waiting} calls are waiting already; try again shortly")

    def _launch(
        self,
        execution: Execution,
        plans: list[Plan],
        requested: SamplingRequest,
        reading: Reading,
        dialect: str,
    ) -> _Runs:
        changed = asyncio.Event()
        runs = _Runs(execution, [], [], changed)
        for number, plan in enumerate(plans):
            call = GenerateCall(
                call_id=f"{execution.info.execution}#{plan.index}",
                execution=execution.info.execution,
                session=plan.session.info.session,
                prompt_ids=plan.prompt_ids,
                new_from=plan.new_from,
                sampling=self._sampling(requested, len(plan.prompt_ids), number),
                purpose=execution.info.purpose,
            )
            run = CallRun(plan, call, self.chat, reading)
            task = asyncio.create_task(self._drive(execution, run, runs, requested, dialect))
            runs.runs.append(run)
            runs.tasks.append(task)
            self._keep(task, execution, plan.session)
        return runs

    def _keep(self, task: asyncio.Task[None], execution: Execution, session: SessionState) -> None:
        """Hold a running call until it ends, however it ends."""
        session.in_flight += 1
        self._tasks.add(task)
        execution.active.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            session.in_flight -= 1
            self._tasks.discard(done)
            execution.active.discard(done)

        task.add_done_callback(ended)

    def _sampling(self, asked: SamplingRequest, prompt: int, number: int) -> Sampling:
        limit = self.limits.context_limit
        tokens = asked.max_tokens if asked.max_tokens is not None else self.limits.max_tokens
        if limit is not None:
            if prompt >= limit:
                raise ApiError(
                    400,
                    "context_length",
                    f"the prompt has {prompt} tokens and this model's context holds {limit}; shorten the history",
                    param="messages",
                )
            tokens = min(tokens, limit - prompt)
        return Sampling(
            max_tokens=tokens,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=asked.top_k or 0,
            min_p=asked.min_p or 0.0,
            seed=None if asked.seed is None else asked.seed + number,
            stop_token_ids=tuple(dict.fromkeys((*self.chat.stop_ids, *asked.stop_token_ids))),
            ignore_eos=asked.ignore_eos,
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            repetition_penalty=asked.repetition_penalty,
            logit_bias=asked.logit_bias,
            top_logprobs=asked.top_logprobs,
        )

    async def _drive(
        self, execution: Execution, run: CallRun, runs: _Runs, requested: SamplingRequest, dialect: str
    ) -> None:
        """One call from the queue to the disk."""
        gauges = self.metrics.gauges
        gauges["waiting"] += 1
        waiting = 1
        try:
            async with self._slots:
                gauges["waiting"] -= 1
                waiting = 0
                gauges["in_flight"] += 1
                try:
                    with self.metrics.phase("engine"):
                        await run.run(self.backend, runs.changed.set)
                finally:
                    gauges["in_flight"] -= 1
        except asyncio.CancelledError:
            run.outcome = "disconnect"
        finally:
            gauges["waiting"] -= waiting
        await self._record(execution, run, runs, requested, dialect)

    async def _record(
        self, execution: Execution, run: CallRun, runs: _Runs, requested: SamplingRequest, dialect: str
    ) -> None:
        answered = run.outcome in ("stop", "length", "stop_string")
        turn: ParsedTurn | None = None
        with self.metrics.phase("parse"):
            if answered:
                number = runs.runs.index(run)
                turn = runs.final_turn(number, run.turn())
        call = run.record(requested, {"dialect": dialect})
        note = execution.record(run.plan, call, turn)
        fresh = None if run.plan.session.stored else run.plan.session.info
        run.plan.session.stored = True
        with self.metrics.phase("commit"):
            try:
                await self.store.add_call(execution.info.execution, call, note, fresh)
            except StoreError as error:
                execution.lost = str(error)
                run.outcome, run.error = "error", error
        self.metrics.count("calls", run.outcome)
        self.metrics.count("sampled_tokens", amount=len(call.sampled_ids))
        self.metrics.count("context_tokens", amount=len(call.context_ids))

    async def _finish(self, runs: _Runs, requested: SamplingRequest) -> Answer:
        try:
            await asyncio.wait(runs.tasks)
        except asyncio.CancelledError:
            for task in runs.tasks:
                task.cancel()
            raise
        return self._answer(runs, requested)

    async def _stream(self, runs: _Runs, requested: SamplingRequest) -> AsyncIterator[Delta | Answer]:
        runs.texts = [GrowingText() for _ in runs.runs]
        sent = [0] * len(runs.runs)
        ended = asyncio.gather(*runs.tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: runs.changed.set())
        try:
            while not ended.done():
                await runs.changed.wait()
                runs.changed.clear()
                for number, run in enumerate(runs.runs):
                    if run.outcome != "running" or not runs.texts[number].due(len(run.ids)):
                        continue
                    content, reasoning = runs.texts[number].grow(run.turn(), len(run.ids))
                    logprobs = run.token_logprobs(sent[number]) if requested.logprobs else ()
                    if content or reasoning or logprobs:
                        sent[number] += len(logprobs)
                        yield Delta(number, content, reasoning, logprobs)
            answer = self._answer(runs, requested)
            for number, run in enumerate(runs.runs):
                content, reasoning = runs.last_piece[number]
                logprobs = run.token_logprobs(sent[number]) if requested.logprobs else ()
                if content or reasoning or logprobs:
                    yield Delta(number, content, reasoning, logprobs)
            yield answer
        finally:
            for task in runs.tasks:
                task.cancel()

    def _answer(self, runs: _Runs, requested: SamplingRequest) -> Answer:
        for run in runs.runs:
            if run.error is not None or run.outcome in ("abort", "disconnect", "error"):
                raise _failure(run)
        choices = []
        for number, run in enumerate(runs.runs):
            turn = runs.turns[number]
            finish: Finish = "length" if run.outcome == "length" else "stop"
            if run.stop_string is not None:
                finish = "stop_string"
            if turn.tool_calls and finish == "stop":
                finish = "tool_calls"
            logprobs = run.token_logprobs() if requested.logprobs else ()
            choices.append(Choice(number, run.call.call_id, turn, finish, run.stop_string, len(run.ids), logprobs))
        first = runs.runs[0]
        return Answer(
            first.call.call_id.replace("#", "-"),
            int(first.started_at),
            tuple(choices),
            len(first.plan.prompt_ids),
            first.cached_tokens,
        )

    async def close(self) -> None:
        """Cut running calls, record them, and let go of threads. The store stays open."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        self._pool.shutdown(wait=False)


class _Runs:
    """The calls of one request and what its client has seen of them."""

    def __init__(
        self,
        execution: Execution,
        runs: list[CallRun],
        tasks: list[asyncio.Task[None]],
        changed: asyncio.Event,
    ) -> None:
        self.execution = execution
        self.runs = runs
        self.tasks = tasks
        self.changed = changed
        self.texts: list[GrowingText] = []
        self.turns: dict[int, ParsedTurn] = {}
        self.last_piece: dict[int, tuple[str, str]] = {}

    def final_turn(self, number: int, turn: ParsedTurn) -> ParsedTurn:
        """The turn as the client will have seen it, which is what its next request will repeat."""
        if self.texts:
            content, reasoning, turn = self.texts[number].finish(turn)
            self.last_piece[number] = (content, reasoning)
        self.turns[number] = turn
        return turn


def _failure(run: CallRun) -> ApiError:
    error = run.error
    if isinstance(error, PromptTooLongError):
        return ApiError(400, "context_length", str(error) or "the prompt does not fit the model's context")
    if isinstance(error, BackendOverloadedError):
        return ApiError(503, "overloaded", str(error) or "the engine has no room now; try again shortly")
    if isinstance(error, StoreError):
        return ApiError(503, "engine", f"the answer could not be recorded: {error}")
    what = f"{type(error).__name__}: {error}" if error is not None else "the engine gave up"
    return ApiError(502, "engine", f"call {run.call.call_id} was cut after {len(run.ids)} tokens ({what})")
