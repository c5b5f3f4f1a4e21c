"""`VLLMEngine`: a vLLM server as `gyre_core.Engine`.

Invariants: a token bears the version of the weights that sampled it, also when they change in mid-call; KV of one set
of weights is never found by a call that starts under another (each change begins a new cache salt); a fault of the
server is one InfrastructureError of each call it hit, and no token is handed out twice. Changing weights and memory is
in `gyre_vllm.changes`.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

import numpy as np
from gyre_core import (
    Array,
    CapabilityError,
    ComponentContext,
    ContextLengthError,
    EngineCapability,
    EngineLoad,
    ExportedKV,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    ImportedKV,
    InfrastructureError,
    KVShape,
    MemoryRegion,
    PauseMode,
    PinnedKV,
    SamplingParams,
    WeightSource,
)

from gyre_vllm.calls import Cut, RunningCall, run_segment
from gyre_vllm.changes import Changes
from gyre_vllm.client import ServerClient
from gyre_vllm.handover import Arrivals, Contexts, connected, export_session, import_session, take_session
from gyre_vllm.launch import degrees, memory_share
from gyre_vllm.metrics import PrefillSpeed
from gyre_vllm.options import VLLMOptions
from gyre_vllm.server import Facts, Server, accelerators_of, probe, sleep_way
from gyre_vllm.state import EngineState, Phase


class VLLMEngine:
    """A vLLM server: started by us in an environment of its own, or running already.

    Offers `PAUSE` and `SEED`, and what the server can do beyond: `SLEEP`, `ROUTED_EXPERTS`, `KV_HANDOVER`. `timings`
    has the seconds of the last start, update_weights, sleep and wake.
    """

    def __init__(self, options: VLLMOptions | None, context: ComponentContext) -> None:
        self.options = options or VLLMOptions()
        if not self.options.url:  # said by `gyre check`, and not by a cell that starts
            degrees(self.options, accelerators_of(context))
            memory_share(self.options)
        self._state = EngineState()
        self._changes = Changes(self.options, context, self._state)
        self._names = itertools.count()
        self._computed = self._cached = 0
        self._contexts, self._arrivals = Contexts(), Arrivals()
        self._prefill_speed = PrefillSpeed()

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the last start, update_weights, sleep and wake."""
        return self._changes.timings

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """What it offers; before `start` what it offers unless the server turns out to lack it."""
        server = self._state.server
        return self._offered(None if server is None else server.facts)

    async def look(self) -> frozenset[EngineCapability]:
        """What it will offer: a server that runs already is asked. Starts nothing and leaves its weights and calls
        alone. InfrastructureError when it is not there or lacks what this plugin cannot do without."""
        if not self.options.url:
            return self.capabilities
        client = ServerClient(self.options.url, self.options.control_timeout_s)
        try:
            return self._offered(await probe(client, self.options))
        finally:
            await client.close()

    def _offered(self, facts: Facts | None) -> frozenset[EngineCapability]:
        kinds, options = EngineCapability, self.options
        found = {kinds.PAUSE, kinds.SEED}
        if sleep_way(options, facts) is not None:
            found.add(kinds.SLEEP)
        if options.routed_experts and (facts is None or facts.experts is not False):
            found.add(kinds.ROUTED_EXPERTS)
        if options.transfers if facts is None else facts.connector:
            found.add(kinds.KV_HANDOVER)
        return frozenset(found)

    @property
    def version(self) -> int:
        """Policy version in use; -1 before the first load."""
        return self._state.version

    # Life: see `gyre_vllm.changes`

    async def start(self, source: WeightSource) -> None:
        """Start or reach the server with these weights; returns when it is ready."""
        await self._changes.start(source)

    async def update_weights(self, source: WeightSource) -> None:
        """Change the weights between two forward passes; running calls go on under them."""
        await self._changes.update(source)

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Stop sampling; calls that arrive meanwhile wait."""
        await self._changes.pause(mode)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._changes.resume()

    async def flush_cache(self) -> None:
        """No call that starts from now on finds a prefix of before; running calls keep theirs."""
        await self._changes.flush()

    async def sleep(self) -> None:
        """Give weights and KV back; running calls end with ABORT."""
        await self._changes.sleep()

    async def wake(self, source: WeightSource) -> None:
        """Take memory and weights again."""
        await self._changes.wake(source)

    async def close(self) -> None:
        """End for good; a server of ours is gone when this returns."""
        await self._changes.close()

    # Calls

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Run a call. Closing the iterator aborts it. ValueError for a request that cannot run, ContextLengthError for
        one that is too long, InfrastructureError when the server fails."""
        state = self._state
        server = state.ready(f"starting call {request.request_id!r}")
        call = RunningCall(request, *self._checked(request, server))
        state.calls.add(call)
        try:
            while not call.over:
                async for chunk in self._next_segment(call):
                    call.over = chunk.finish is not None
                    if chunk.token_ids or call.over:
                        yield chunk
        finally:
            call.over = True
            state.calls.discard(call)
            self._computed += call.computed
            self._cached += call.cached or 0
            self._note_call(call)

    async def _next_segment(self, call: RunningCall) -> AsyncIterator[GenerateChunk]:
        """Wait until the server takes calls, then let it go on with this one."""
        state = self._state
        await state.gate(call)
        if call.cut is Cut.ABORT:
            yield GenerateChunk(finish=FinishReason.ABORT, cached_tokens=call.cached or 0)
            return
        server = state.ready(call.doing)
        call.cut, call.first = Cut.NONE, len(call.sampled)
        call.server_id, call.salt = f"{state.name}-{next(self._names)}", state.salt
        call.transfer = self._arrivals.take(call.request.session, state.salt, call.prompt)
        call.labels.change(call.first, state.version)
        call.at_rest.clear()
        stream = run_segment(
            call, server.client, server.facts.model, state.vocab, call.salt, self.options.stream_tokens,
            state.note_progress,
        )  # fmt: skip
        try:
            async for chunk in stream:
                yield chunk
        except InfrastructureError as error:
            raise state.attribute(error, call.doing) from error
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
            call.at_rest.set()

    def _checked(self, request: GenerateRequest, server: Server) -> tuple[list[int], int]:
        """The prompt as a list of ids and how many tokens it may sample."""
        doing = f"call {request.request_id!r}"
        if request.routed_experts and not self.options.routed_experts:
            raise CapabilityError(
                doing, got="a wish for routed experts", expected="none", fix="Set routed_experts in [engine]."
            )
        _require_logprobs(server.facts.logprobs, request.sampling, doing)
        given = request.prompt_ids
        prompt: list[int] = given if isinstance(given, list) else np.asarray(given, np.int64).tolist()
        if not prompt:
            raise ValueError(f"{doing}: got an empty prompt, expected at least one token id")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self._state.vocab:
            bad = low if low < 0 else high
            raise ValueError(f"{doing}: got token id {bad}, expected ids in [0, {self._state.vocab}) of the vocabulary")
        room = server.facts.max_context - len(prompt)
        if room < 1:
            raise ContextLengthError(
                doing, got=f"a prompt of {len(prompt)} tokens", expected=f"fewer than {server.facts.max_context}",
                fix="Shorten it, or raise max_context.",
            )  # fmt: skip
        return prompt, min(request.sampling.max_tokens, room)

    async def abort(self, request_id: str) -> bool:
        """End one call with ABORT; False when it is not running."""
        found = [call for call in self._state.calls if call.request.request_id == request_id and not call.over]
        server = self._state.ready("aborting a call") if found else None
        for call in found:
            call.abort()
        if server is not None:
            await self._state.end_segments(server, found)
        return bool(found)

    async def load(self) -> EngineLoad:
        """The present load, as the server tells it; prompt tokens are those of calls made here."""
        state = self._state
        if state.phase is Phase.ASLEEP:
            return EngineLoad(
                0, 0, 0, 0, 0, state.version, prefilled_tokens=self._computed, cached_tokens=self._cached,
                sampled_tokens=state.sampled,
            )  # fmt: skip
        server = state.ready("asking for the load")
        told = await server.client.load()
        state.sampled = state.sampled_before + told.sampled
        at_gate = sum(call.at_rest.is_set() and not call.over for call in state.calls)
        return EngineLoad(
            slots_total=server.facts.max_running,
            slots_running=told.running,
            waiting=told.waiting + at_gate,
            kv_tokens_total=told.kv_tokens,
            kv_tokens_used=round(told.usage * told.kv_tokens),
            version=state.version,
            prefill_tokens_per_s=self._prefill_speed.of(told),
            prefilled_tokens=self._computed,
            cached_tokens=self._cached,
            sampled_tokens=state.sampled,
        )

    # KV of sessions: the server's HTTP interface gives no block to read or to write, but two servers may hand it over

    async def kv_export(self, session: str, *, stop: bool = False) -> ExportedKV | None:
        """Hold the KV of the session's newest context for another vLLM; see `gyre_vllm.handover`."""
        state = self._state
        connected(state, f"exporting the KV of {session!r}")
        running = [call for call in state.calls if call.request.session == session and not call.over]
        if stop and running:
            return await take_session(state, session, running)
        for call in running:
            self._note_call(call)
        context = self._contexts.of(session, state.salt)
        if context is None:
            return None
        return await export_session(state, session, context, running=bool(running))

    async def kv_import(self, exported: ExportedKV) -> ImportedKV:
        """Fetch what another vLLM's `kv_export` holds."""
        imported = await import_session(self._state, self._arrivals, exported)
        if room := self._room():
            self._contexts.note(exported.session, self._state.salt, exported.token_ids, room)
        return imported

    def _note_call(self, call: RunningCall) -> None:
        """Its context is its session's newest, if it ever came to the server."""
        if call.salt and (room := self._room()):
            self._contexts.note(call.request.session, call.salt, [*call.prompt, *call.sampled], room)

    def _room(self) -> int:
        """Tokens of contexts that may be asked for: as many as the server holds KV of, none without a connector."""
        server = self._state.server
        return server.facts.kv_tokens if server is not None and server.facts.connector else 0

    def kv_shape(self) -> KVShape:
        """Not offered."""
        _no_kv("reading the KV layout")

    def kv_regions(self) -> Sequence[MemoryRegion]:
        """Not offered."""
        _no_kv("reading the KV regions")

    async def kv_pin(self, session: str) -> PinnedKV | None:
        """Not offered."""
        _no_kv(f"pinning the KV of {session!r}")

    async def kv_freeze(self, session: str) -> PinnedKV | None:
        """Not offered."""
        _no_kv(f"freezing {session!r}")

    async def kv_unfreeze(self, session: str) -> None:
        """Not offered."""
        _no_kv(f"unfreezing {session!r}")

    async def kv_release(self, session: str, generation: int, *, forget: bool) -> None:
        """Not offered."""
        _no_kv(f"releasing the KV of {session!r}")

    async def kv_reserve(self, session: str, tokens: int, version: int) -> Array | None:
        """Not offered."""
        _no_kv(f"reserving KV for {session!r}")

    async def kv_commit(self, session: str, version: int, token_ids: Array, block_ids: Array) -> None:
        """Not offered."""
        _no_kv(f"committing KV of {session!r}")

    async def kv_cancel(self, session: str) -> None:
        """Not offered."""
        _no_kv(f"cancelling a reservation for {session!r}")


def _no_kv(doing: str) -> NoReturn:
    raise CapabilityError(
        doing, got="a vLLM server behind HTTP, whose blocks cannot be reached", expected="KV_MOVE",
        fix="Hand the session to another vLLM (KV_HANDOVER), or let the destination prefill.",
    )  # fmt: skip


def _require_logprobs(kind: str, sampling: SamplingParams, doing: str) -> None:
    """CapabilityError when a server without our extension cannot give this call's behaviour logprobs."""
    cut = sampling.top_p < 1 or sampling.top_k > 0
    fits = kind == "tempered" or (
        sampling.temperature in (0.0, 1.0) if kind == "raw_logprobs" else kind == "processed_logprobs" and not cut
    )
    if not fits:
        raise CapabilityError(
            doing,
            got=f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k} for a server "
            f"whose logprobs are {kind!r}",
            expected="logprobs of the tempered distribution over the whole vocabulary",
            fix="Start the server with Gyre's worker extension (`--worker-extension-cls`), or sample without cuts.",
        )
