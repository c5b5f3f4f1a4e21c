"""From plans to running calls to records on disk.

Invariants. Every call that was launched is recorded, however it ends. Calls beyond `max_in_flight` wait in order. If
the store cannot take a call, its execution takes no more: a tree with holes is worse than an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from gyre_tito.backend import Backend, GenerateCall, Sampling
from gyre_tito.batch import Batch
from gyre_tito.calls import CallRun, Reading
from gyre_tito.chat_format import ChatFormat, ParsedTurn
from gyre_tito.execution import Execution, Plan
from gyre_tito.metrics import Metrics
from gyre_tito.notes import RetryNote, read_note
from gyre_tito.records import CallRecord
from gyre_tito.requests import ApiError, SamplingRequest, invalid
from gyre_tito.schema import StoreError
from gyre_tito.store import Store


@dataclass(frozen=True, slots=True)
class Limits:
    """`context_limit`: prompt plus sampled tokens that the engine can hold (None: the engine says so itself).

    `max_tokens`: used when a client names none. `max_in_flight` calls run at once, `max_waiting` more wait, the rest
    are told to come back. `max_choices` bounds `n`. `retry_grace_s`: how long a request that its client named goes on
    after the client has gone, so that it can be asked for again.
    """

    context_limit: int | None = None
    max_tokens: int = 4096
    max_in_flight: int = 1024
    max_waiting: int = 4096
    max_choices: int = 64
    retry_grace_s: float = 10.0


class Dispatcher:
    """Runs calls and records them."""

    def __init__(self, backend: Backend, store: Store, chat: ChatFormat, limits: Limits, metrics: Metrics) -> None:
        self._backend = backend
        self._store = store
        self._chat = chat
        self._limits = limits
        self._metrics = metrics
        self._slots = asyncio.Semaphore(limits.max_in_flight)
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, execution: Execution, sampling: SamplingRequest) -> None:
        """Refuse a request before any work is done for it."""
        if execution.lost:
            raise ApiError(503, "engine", f"this execution takes no more calls: {execution.lost}")
        if not 1 <= sampling.n <= self._limits.max_choices:
            raise invalid(f"n must be between 1 and {self._limits.max_choices}, got {sampling.n}", "n")
        if self._metrics.gauges["waiting"] >= self._limits.max_waiting:
            raise ApiError(
                429, "overloaded", f"{self._limits.max_waiting} calls are waiting already; try again shortly"
            )

    def launch(
        self,
        execution: Execution,
        plans: Sequence[Plan],
        requested: SamplingRequest,
        reading: Reading,
        dialect: str,
        prefill: str = "",
        retries: Sequence[RetryNote] = (),
    ) -> Batch:
        """Start the calls of one request. `retries`: for a named one, what each call notes of it."""
        batch = Batch(execution, requested, prefill, self._limits.retry_grace_s if retries else 0.0)
        for number, plan in enumerate(plans):
            run = CallRun(plan, self._call(execution, plan, requested, number), self._chat, reading)
            run.retry = retries[number] if retries else None
            batch.add(run)
        for run in batch.runs:
            task = asyncio.create_task(self._drive(batch, run, dialect))
            batch.tasks.append(task)
            self._keep(task, execution, run)
        return batch

    def repeat(
        self,
        execution: Execution,
        calls: Sequence[tuple[CallRecord, bytes]],
        requested: SamplingRequest,
        reading: Reading,
        prefill: str = "",
        forced: str = "",
    ) -> Batch:
        """The calls of one request as they were recorded; nothing is sampled. Error: `StoreError`, they are gone."""
        batch = Batch(execution, requested, prefill, repeated=True)
        for number, (call, data) in enumerate(calls):
            note = read_note(data)
            plan = execution.plan_again(call, forced)
            run = CallRun(plan, self._call(execution, plan, requested, number), self._chat, reading)
            if note.retry is None:
                raise StoreError(f"call {run.call.call_id} has lost the note of the request that it answered")
            run.recorded(call, note.retry)
            batch.add(run)
            execution.told_again(call, note, batch.seen_turn(run, run.turn()))
        return batch

    def _call(self, execution: Execution, plan: Plan, requested: SamplingRequest, number: int) -> GenerateCall:
        return GenerateCall(
            call_id=f"{execution.info.execution}#{plan.index}",
            execution=execution.info.execution,
            session=plan.session.info.session,
            prompt_ids=plan.prompt_ids,
            new_from=plan.new_from,
            sampling=self._sampling(_as_prescribed(requested, execution), len(plan.prompt_ids), number),
            purpose=execution.info.purpose,
        )

    def _keep(self, task: asyncio.Task[None], execution: Execution, run: CallRun) -> None:
        """Hold a call until it ends, however it ends (a task that is cancelled at once never runs)."""
        session = run.plan.session
        session.in_flight += 1
        self._metrics.gauges["waiting"] += 1
        self._tasks.add(task)
        execution.active.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            session.in_flight -= 1
            self._leave_queue(run)
            self._tasks.discard(done)
            execution.active.discard(done)

        task.add_done_callback(ended)

    def _sampling(self, asked: SamplingRequest, prompt: int, number: int) -> Sampling:
        limit = self._limits.context_limit
        tokens = asked.max_tokens if asked.max_tokens is not None else self._limits.max_tokens
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
            stop_token_ids=tuple(dict.fromkeys((*self._chat.stop_ids, *asked.stop_token_ids))),
            ignore_eos=asked.ignore_eos,
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            repetition_penalty=asked.repetition_penalty,
            logit_bias=asked.logit_bias,
            top_logprobs=asked.top_logprobs,
        )

    async def _drive(self, batch: Batch, run: CallRun, dialect: str) -> None:
        """One call from the queue to the disk."""
        gauges = self._metrics.gauges
        try:
            async with self._slots:
                self._leave_queue(run)
                gauges["in_flight"] += 1
                try:
                    with self._metrics.phase("engine"):
                        await run.run(self._backend, batch.changed.set)
                finally:
                    gauges["in_flight"] -= 1
        except asyncio.CancelledError:
            run.outcome = "disconnect"
        await self._record(batch, run, dialect)

    def _leave_queue(self, run: CallRun) -> None:
        self._metrics.gauges["waiting"] -= run.queued
        run.queued = False

    async def _record(self, batch: Batch, run: CallRun, dialect: str) -> None:
        execution = batch.execution
        turn: ParsedTurn | None = None
        with self._metrics.phase("parse"):
            if run.outcome in ("stop", "length", "stop_string"):
                try:
                    turn = batch.seen_turn(run, run.turn())
                except Exception as error:  # noqa: BLE001 - the boundary to foreign parsers: the tokens are kept anyway
                    run.error = error
        call = run.record(batch.requested, {"dialect": dialect})
        note = execution.record(run.plan, call, turn, None if turn is None else run.retry_note())
        fresh = None if run.plan.session.stored else run.plan.session.info
        run.plan.session.stored = True
        with self._metrics.phase("commit"):
            try:
                await self._store.add_call(execution.info.execution, call, note, fresh)
            except StoreError as error:
                execution.lost = str(error)
                run.outcome, run.error = "error", error
        self._metrics.count("calls", run.outcome)
        self._metrics.count("sampled_tokens", amount=len(call.sampled_ids))
        self._metrics.count("context_tokens", amount=len(call.context_ids))

    async def close(self) -> None:
        """Cut running calls; returns when they are recorded."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        with contextlib.suppress(StoreError):  # a call that was cut while its commit ran: that must be over too
            await self._store.writer.write(lambda *_: None)


def _as_prescribed(asked: SamplingRequest, execution: Execution) -> SamplingRequest:
    """What the agent asked, drawn from the distribution that its execution prescribes."""
    rule = execution.info.prescribed
    if rule is None:
        return asked
    return dataclasses.replace(
        asked,
        temperature=rule.temperature,
        top_p=rule.top_p,
        top_k=None,
        min_p=None,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias=(),
    )
