"""One forward pass: choose its rows, compute, sample, hand the results to the calls.

Invariants: decode rows always run; prompt tokens fill the rest of the budget in order of arrival; a token bears the
version of the pass that made it; a row whose numbers are not finite fails its own call and no other. A call waits
while another one is just computing a prefix that it could find cached.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gyre_core import InfrastructureError

from gyre_local.kv.batch import BatchKV, Span
from gyre_local.kv.slots import common_prefix
from gyre_local.model.forward import forward
from gyre_local.serve.calls import Call
from gyre_local.serve.core import EngineCore
from gyre_local.serve.sampling import SamplingRows, sample


@dataclass(frozen=True, slots=True)
class Plan:
    """Calls with one token to compute, then calls with tokens [computed, stop) of their prompt."""

    decode: Sequence[Call]
    chunks: Sequence[tuple[Call, int]]

    @property
    def calls(self) -> list[Call]:
        """All calls of the pass, in row order."""
        return [*self.decode, *(call for call, _ in self.chunks)]


def step(core: EngineCore) -> bool:
    """Run one pass; False when nothing can run. Results lie in `core.outbox`."""
    plan = make_plan(core)
    if not plan.calls:
        return False
    started = time.perf_counter()
    try:
        sampled, broken = run(core, plan)
    except Exception as error:  # noqa: BLE001 - boundary: the pass failed, so do its calls; the engine goes on
        _fail_pass(core, plan, error)
        return True
    chunk_tokens = sum(stop - call.computed for call, stop in plan.chunks)
    core.meter.prefilled += chunk_tokens + sum(call.computed < call.prompt for call in plan.decode)
    core.meter.record(len(plan.decode), chunk_tokens, time.perf_counter() - started)
    before = [(call, call.computed) for call in plan.calls]
    for call in plan.decode:
        call.computed += 1
    for call, stop in plan.chunks:
        call.computed = stop
        if call.kv_version == core.version and call not in broken:
            whole = stop - stop % core.pool.block_tokens
            core.tree.insert(call.tokens[:whole], call.blocks, partial=False)
    for call in broken:
        core.fail(call, not_finite(call, core.version))
    for call, computed in before:
        if call not in broken:
            core.note_filled(call, computed)
    _take(core, [entry for entry in sampled if entry[0] not in broken])
    return True


def make_plan(core: EngineCore) -> Plan:
    """Choose the rows: all decode rows, then chunks of running prompts, then newly admitted calls."""
    for call in list(core.running):
        if call.missing == 1 and call.slot >= 0:
            core.grow(call)
    decode = [call for call in core.running if call.missing == 1]
    budget = core.options.prefill_tokens
    chunks: list[tuple[Call, int]] = []
    for call in core.running:
        if call.missing > 1 and budget > 0:
            chunks.append((call, call.computed + min(budget, call.missing)))
            budget -= min(budget, call.missing)
    for call in list(core.waiting):
        if budget <= 0 or core.slots.free == 0:
            break
        if _prefix_is_coming(core, call):
            continue
        if not core.admit(call):
            break
        core.waiting.remove(call)
        if call.missing == 1 and not chunks:
            decode.append(call)
        else:
            chunks.append((call, call.computed + min(budget, call.missing)))
        budget -= min(budget, call.missing)
    return Plan(decode, chunks)


def _prefix_is_coming(core: EngineCore, call: Call) -> bool:
    """Whether a running prompt will soon name at least one more block of this call's prefix than is cached."""
    size = core.pool.block_tokens
    best = 0
    for other in core.running:
        if other.missing > 1 or not other.sampled:
            shared = common_prefix(other.tokens[: other.length - 1], call.tokens[: call.length - 1])
            best = max(best, shared // size * size)
    return best > 0 and best >= core.tree.match(call.tokens, call.length - 1).tokens + size


def run(core: EngineCore, plan: Plan) -> tuple[list[tuple[Call, int, float]], list[Call]]:
    """Compute the pass: (call, token, logprob) of the calls that have their whole context now, and the calls whose
    chunk came out not finite."""
    decode = [Span(call.slot, call.computed, call.computed + 1) for call in plan.decode]
    chunks = [Span(call.slot, call.computed, stop) for call, stop in plan.chunks]
    calls, spans = plan.calls, [*decode, *chunks]
    for span in spans:
        core.slots.reserve(span.slot, span.stop)
    device = core.pool.data.device
    ids = np.concatenate([call.tokens[span.start : span.stop] for call, span in zip(calls, spans, strict=True)])
    ends = np.cumsum([span.stop - span.start for span in spans]) - 1
    ready = [index for index, (call, span) in enumerate(zip(calls, spans, strict=True)) if span.stop == call.length]
    with torch.inference_mode():
        batch = BatchKV(core.slots, core.pool, decode, chunks, _pool_rows(core, calls, spans))
        rows = None if len(ready) == len(ids) else torch.from_numpy(ends[ready]).to(device)
        inputs = torch.from_numpy(ids.astype(np.int64)).to(device)
        logits = forward(core.weights, inputs, batch.positions, batch, rows)
        batch.commit()
        done = [calls[index] for index in ready]
        tokens, logprobs = sample(logits, sampling_rows(done)) if done else ([], [])
        broken = [call for (call, _), fine in zip(plan.chunks, batch.finite(), strict=True) if not fine]
    return list(zip(done, tokens, logprobs, strict=True)), broken


def _pool_rows(core: EngineCore, calls: Sequence[Call], spans: Sequence[Span]) -> torch.Tensor:
    """Where each token of the pass lies in the pool, int64 [tokens]."""
    size = core.pool.block_tokens
    rows: list[int] = []
    for call, span in zip(calls, spans, strict=True):
        rows.extend(call.blocks[at // size] * size + at % size for at in range(span.start, span.stop))
    return torch.tensor(rows, device=core.pool.data.device)


def sampling_rows(calls: Sequence[Call]) -> SamplingRows:
    """The batch's sampling parameters as arrays."""
    return SamplingRows(
        np.array([c.sampling.temperature for c in calls], np.float32),
        np.array([c.sampling.top_p for c in calls], np.float32),
        np.array([c.sampling.top_k for c in calls], np.int64),
        np.array([c.seed for c in calls], np.uint64),
        np.array([c.sampled for c in calls], np.uint64),
    )


def _take(core: EngineCore, sampled: Sequence[tuple[Call, int, float]]) -> None:
    """Give each call its token; hand out chunks that are due; end calls that are over."""
    now = time.monotonic()
    options = core.options
    for call, token, logprob in sampled:
        if not math.isfinite(logprob):
            core.fail(call, not_finite(call, core.version))
            continue
        core.meter.sampled += 1
        reason = call.append(token, logprob, core.version)
        if reason is not None:
            core.finish(call, reason)
        elif len(call.out_ids) >= options.chunk_tokens or now - call.handed_at >= options.chunk_seconds:
            call.handed_at = now
            core.outbox.append((call, call.chunk(None)))


def not_finite(call: Call, version: int) -> InfrastructureError:
    """The error of a call whose logits are NaN or infinite."""
    return InfrastructureError(
        f"sampling token {call.sampled} of call {call.id!r} (session {call.session!r}) under policy version {version}",
        got="logits that are not finite",
        expected="finite logits",
        fix="Check the weights of this version; the engine itself goes on.",
    )


def _fail_pass(core: EngineCore, plan: Plan, error: Exception) -> None:
    for call in plan.calls:
        failure = InfrastructureError(
            f"computing a forward pass of {len(plan.calls)} calls, {call.id!r} among them",
            got=f"{type(error).__name__}: {error}",
            expected="logits",
            fix="If memory ran out, lower max_running, kv_tokens or prefill_tokens.",
        )
        failure.__cause__ = error
        core.fail(call, failure)
