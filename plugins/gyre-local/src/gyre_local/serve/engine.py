"""`LocalEngine`: the embedded engine as `gyre_core.Engine`.

The asyncio face of `serve.worker`: checks what comes in, turns calls into streams, loads weights beside the running
engine and swaps them between two passes. Invariant: a bad request fails alone (ValueError); an engine fault is an
InfrastructureError of the calls it hit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch
from gyre_core import (
    Array,
    CapabilityError,
    ComponentContext,
    ConfigError,
    ContextLengthError,
    DigestBlocks,
    EngineCapability,
    EngineLoad,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InfrastructureError,
    KVShape,
    MemoryRegion,
    PauseMode,
    PinnedKV,
    WeightSource,
)
from gyre_weights import Held, Version, write_patch

from gyre_local.kv.prefix import Tokens
from gyre_local.memory import give_back
from gyre_local.model.architecture import Architecture, read_architecture
from gyre_local.model.sources import NOTHING, check_kind, open_source, patches_onto, tensors_of
from gyre_local.model.weights import DTYPES, RopeTables, Weights, fuse, rope_tables
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.calls import Call, Mailbox, new_call
from gyre_local.serve.core import EngineCore, context_limit
from gyre_local.serve.meter import Meter
from gyre_local.serve.worker import Worker

T = TypeVar("T")


class LocalEngine:
    """Embedded inference engine: Qwen3, Qwen2 and Llama models in plain torch, CPU or one GPU.

    Offers `PAUSE`, `SLEEP`, `KV_MOVE` and `SEED`. `timings` has the seconds of the last start, update_weights, sleep
    and wake.
    """

    def __init__(self, options: LocalEngineOptions | None, context: ComponentContext) -> None:
        self.options = options or LocalEngineOptions()
        self.timings: dict[str, float] = {}
        self._context = context
        self._device = torch.device(context.device)
        self._dtype = DTYPES[self.options.dtype]
        self._arch: Architecture | None = None
        self._rope: RopeTables | None = None
        self._worker: Worker | None = None
        self._regions: Sequence[MemoryRegion] = ()
        self._meter = Meter()
        self._digest: DigestBlocks | None = None
        self._version = -1
        self._held = NOTHING
        self._limit = 0
        self._asked = 0
        self._changing = asyncio.Lock()

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """What it offers."""
        kinds = EngineCapability
        return frozenset({kinds.PAUSE, kinds.SLEEP, kinds.KV_MOVE, kinds.SEED})

    @property
    def version(self) -> int:
        """Policy version in use; -1 before the first load."""
        return self._version

    # Life

    async def start(self, source: WeightSource) -> None:
        """Load the model under `source.location` and become ready."""
        if self._worker is not None:
            raise InfrastructureError("starting the embedded engine", got="a second start", expected="one")
        await self._rise(source, "start")

    async def wake(self, source: WeightSource) -> None:
        """Take memory and weights again."""
        if self._worker is not None:
            raise InfrastructureError("waking the embedded engine", got="one that is awake", expected="a sleeping one")
        await self._rise(source, "wake")

    async def _rise(self, source: WeightSource, what: str) -> None:
        async with self._changing:
            started = time.perf_counter()
            version = await asyncio.to_thread(self._open, source)
            weights = await asyncio.to_thread(self._load, source, version)
            core = await asyncio.to_thread(EngineCore, weights, source.version, self.options)
            core.meter = self._meter
            if self._digest is not None:
                core.pool.keep_digests(self._digest)
            self._limit, self._regions = core.max_tokens, core.pool.regions()
            self._worker = Worker(core, self._context.threads, self._context.name)
            self._version, self._held = source.version, Held(source.version, version.digest)
            self.timings[what] = time.perf_counter() - started

    def _open(self, source: WeightSource) -> Version:
        """Open the version, once its architecture is known to be ours; it must not change between versions."""
        check_kind(source)
        try:
            arch = read_architecture(source.location)
        except ConfigError as error:
            if self._arch is None:
                raise  # the user named this model; later versions are ours
            raise InfrastructureError(
                f"loading policy version {source.version}", got=str(error), expected="a published version"
            ) from error
        if self._arch is not None and arch != self._arch:
            raise InfrastructureError(
                f"loading policy version {source.version} from {source.location}",
                got=f"another architecture ({arch.fingerprint()})", expected=self._arch.fingerprint(),
                fix="All versions of a run must share one config.json.",
            )  # fmt: skip
        self._arch = arch
        return open_source(source)

    def _load(self, source: WeightSource, version: Version) -> Weights:
        """Read and fuse; runs in a thread beside the engine."""
        assert self._arch is not None
        if self._rope is None:
            self._rope = rope_tables(self._arch, context_limit(self._arch, self.options), self._dtype, self._device)
        doing = f"taking weights from {source.location}"
        return fuse(tensors_of(version, source), self._arch, self._dtype, self._device, self._rope, doing)

    async def update_weights(self, source: WeightSource) -> None:
        """Read the new weights beside the running engine, then swap them in between two passes; of a delta against the
        version in use, only what changed is written, in place. Fails without changing anything when they cannot be
        read."""
        async with self._changing:
            started = time.perf_counter()
            worker = self._ready("updating weights")
            version = await asyncio.to_thread(self._open, source)
            named = (await worker.do(lambda core: core.weights)).named() if version.is_delta else {}
            patches = await asyncio.to_thread(patches_onto, version, source, self._held, named)
            weights = None if patches is not None else await asyncio.to_thread(self._load, source, version)

            def swap(core: EngineCore) -> None:
                for target, patch in patches or ():
                    write_patch(target, patch)
                core.swap_weights(core.weights if weights is None else weights, source.version)
                self._version, self._held = source.version, Held(source.version, version.digest)

            await worker.do(swap)
            self.timings["update_weights"] = time.perf_counter() - started

    async def sleep(self) -> None:
        """Give weights and KV back; running calls end with ABORT. Refused, after `move_patience`, while KV is pinned or
        reserved: somebody still reads or writes that memory."""
        async with self._changing:
            started = time.perf_counter()
            worker = self._ready("putting the embedded engine to sleep")
            busy = await self._moves_left(worker, started + self.options.move_patience)
            if busy:
                raise InfrastructureError(
                    "putting the embedded engine to sleep", got=f"pinned or reserved KV of sessions {busy[:5]}",
                    expected="none", fix="Release or cancel these moves first.",
                )  # fmt: skip
            await self._fall(worker)
            self.timings["sleep"] = time.perf_counter() - started

    @staticmethod
    async def _moves_left(worker: Worker, deadline: float) -> list[str]:
        """Sessions whose KV is still pinned or reserved at the deadline (perf_counter); none as soon as none is."""
        while True:
            busy = await worker.do(lambda core: core.sessions.busy)
            if not busy or time.perf_counter() >= deadline:
                return busy
            await asyncio.sleep(0.01)

    async def _fall(self, worker: Worker) -> None:
        self._worker, self._regions, self._rope, self._held = None, (), None, NOTHING
        await asyncio.to_thread(worker.stop)
        await asyncio.to_thread(give_back, self._device)

    async def close(self) -> None:
        """End for good; running calls end with ABORT."""
        async with self._changing:
            if self._worker is not None:
                await self._fall(self._worker)

    def _ready(self, doing: str) -> Worker:
        if self._worker is None:
            raise InfrastructureError(
                doing, got="an engine that has not been started or sleeps", expected="a ready engine",
                fix="Call start or wake first.",
            )  # fmt: skip
        return self._worker

    # Calls

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Run a call; ValueError for a request that cannot run, InfrastructureError when the engine fails."""
        worker = self._ready(f"starting call {request.request_id!r}")
        prompt = self._checked_prompt(request)
        mailbox = Mailbox(asyncio.get_running_loop(), asyncio.Queue())
        seed = request.sampling.seed
        call = new_call(
            request.request_id, request.session, prompt, request.sampling,
            seed=(self._next_seed() if seed is None else seed) & (2**64 - 1), limit=self._limit, mailbox=mailbox,
        )  # fmt: skip
        added = worker.submit(lambda core: core.add(call))
        added.add_done_callback(lambda future: _report_failure(future, mailbox))
        over = False
        try:
            while not over:
                outcome = await mailbox.items.get()
                over = isinstance(outcome, Exception) or outcome.finish is not None
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            if not over:
                worker.submit(lambda core: _abort_call(core, call))

    def _next_seed(self) -> int:
        self._asked += 1
        return int(
            np.random.SeedSequence([self._context.seed & (2**63 - 1), self._asked]).generate_state(1, np.uint64)[0]
        )

    def _checked_prompt(self, request: GenerateRequest) -> Tokens:
        """The prompt as int32 [n]; ValueError when empty or out of the vocabulary, ContextLengthError when too long."""
        assert self._arch is not None
        doing = f"call {request.request_id!r}"
        if request.routed_experts:
            raise CapabilityError(doing, got="a wish for routed experts", expected="none: these models have no experts")
        prompt = np.asarray(request.prompt_ids, dtype=np.int64)
        if prompt.ndim != 1 or not len(prompt):
            raise ValueError(f"{doing}: got a prompt of shape {list(prompt.shape)}, expected at least one token id")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self._arch.vocab:
            bad = low if low < 0 else high
            raise ValueError(f"{doing}: got token id {bad}, expected ids in [0, {self._arch.vocab}) of the vocabulary")
        if len(prompt) >= self._limit:
            raise ContextLengthError(
                doing, got=f"a prompt of {len(prompt)} tokens",
                expected=f"fewer than {self._limit} (the least of the model's positions, max_context and kv_tokens)",
                fix="Shorten it or raise the option.",
            )  # fmt: skip
        return prompt.astype(np.int32)

    async def abort(self, request_id: str) -> bool:
        """End one call with ABORT; False when it is not running."""

        def find_and_abort(core: EngineCore) -> bool:
            found = next((call for call in core.calls() if call.id == request_id), None)
            if found is not None:
                core.finish(found, FinishReason.ABORT)
            return found is not None

        return await self._ready("aborting a call").do(find_and_abort)

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Stop between two passes."""
        await self._ready("pausing").set_paused(True, abort=mode is PauseMode.ABORT)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._ready("resuming").set_paused(False)

    async def load(self) -> EngineLoad:
        """The present load; all zero but the counters while it sleeps."""
        if self._worker is not None:
            return await self._worker.do(lambda core: core.load())
        meter = self._meter
        return EngineLoad(
            0, 0, 0, 0, 0, self._version, meter.prefill_rate, meter.decode_rate,
            meter.prefilled, meter.cached, meter.sampled,
        )  # fmt: skip

    async def flush_cache(self) -> None:
        """Forget every cached prefix that no running call uses."""
        await self._ready("flushing the cache").do(lambda core: core.flush_cache())

    # KV of sessions (see `gyre_core.kv.KVHolder`)

    def kv_shape(self) -> KVShape:
        """Separate K and V regions, (token, head, dim) inside a block."""
        if self._arch is None:
            self._ready("reading the KV layout")
        assert self._arch is not None
        return KVShape(
            layers=self._arch.layers,
            kv_heads=self._arch.kv_heads,
            head_size=self._arch.head_size,
            block_tokens=self.options.block_tokens,
            dtype=self.options.dtype,
            model=self._arch.fingerprint(),
        )

    def kv_regions(self) -> Sequence[MemoryRegion]:
        """The pools; the addresses hold until sleep or close."""
        self._ready("reading the KV regions")
        return self._regions

    async def kv_keep_digests(self, digest: DigestBlocks) -> None:
        """See `KVDigester`. Of a pool in device memory none are kept."""
        if self._device.type == "cpu":
            self._digest = digest
            await self._ready("keeping digests").do(lambda core: core.pool.keep_digests(digest))

    async def kv_pin(self, session: str) -> PinnedKV | None:
        """See `KVHolder`. None also for a session whose KV is mixed (an update came while it ran)."""
        return await self._ready("pinning KV").do(lambda core: core.sessions.pin(session, core.running))

    async def kv_freeze(self, session: str) -> PinnedKV | None:
        """See `KVHolder`. Calls that have not run yet end with ABORT too."""

        def freeze(core: EngineCore) -> PinnedKV | None:
            mine = [call for call in core.calls() if call.session == session]
            for call in sorted(mine, key=lambda c: c.computed):
                core.finish(call, FinishReason.ABORT)
            return core.sessions.freeze(session)

        return await self._ready("freezing a session").do(freeze)

    async def kv_unfreeze(self, session: str) -> None:
        """See `KVHolder`. The calls that were held run."""
        await self._ready("unfreezing a session").do(lambda core: core.requeue(core.sessions.unfreeze(session)))

    async def kv_release(self, session: str, generation: int, *, forget: bool) -> None:
        """See `KVHolder`. Releasing twice is no error."""
        await self._ready("releasing KV").do(lambda core: core.release_pin(session, generation, forget=forget))

    async def kv_reserve(self, session: str, tokens: int, version: int) -> Array | None:
        """See `KVHolder`. A second reservation of a session extends its first and returns all its blocks."""
        if tokens < 1:
            raise ValueError(f"reserving KV for session {session!r}: got {tokens} tokens, expected at least 1")

        def reserve(core: EngineCore) -> Array | None:
            blocks = core.sessions.reserve(session, tokens) if version == core.version else None
            return None if blocks is None else np.array(blocks, np.int32)

        return await self._ready("reserving KV").do(reserve)

    async def kv_commit(self, session: str, version: int, token_ids: Array, block_ids: Array) -> None:
        """See `KVHolder`. When the version has changed meanwhile the blocks are given back and InfrastructureError
        says so; the session's next call is prefilled."""
        tokens = np.asarray(token_ids, dtype=np.int32).copy()
        blocks: list[int] = np.asarray(block_ids).tolist()

        def commit(core: EngineCore) -> None:
            if version != core.version:
                core.sessions.cancel(session)
                raise InfrastructureError(
                    f"committing KV of session {session!r}", got=f"KV of policy version {version}",
                    expected=f"version {core.version}", fix="Let the session's next call be prefilled.",
                )  # fmt: skip
            core.sessions.commit(session, tokens, blocks)

        await self._ready("committing KV").do(commit)

    async def kv_cancel(self, session: str) -> None:
        """See `KVHolder`. Without a reservation it does nothing."""
        await self._ready("cancelling a reservation").do(lambda core: core.sessions.cancel(session))


def _abort_call(core: EngineCore, call: Call) -> None:
    if any(call is other for other in core.calls()):
        core.finish(call, FinishReason.ABORT)


def _report_failure(future: Future[Any], mailbox: Mailbox) -> None:
    """A call that could not even be queued: its caller must not wait for ever."""
    error = future.exception()
    if isinstance(error, Exception) and not mailbox.loop.is_closed():
        mailbox.loop.call_soon_threadsafe(mailbox.items.put_nowait, error)
