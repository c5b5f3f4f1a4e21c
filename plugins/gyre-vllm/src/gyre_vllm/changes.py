"""The engine's changes: start, weights, pause, sleep, end; one at a time.

How weights change under running calls (`update`): close the gate, pause the server, ask every worker how many tokens
each call has sampled, load, enter the border into the labels, begin a new salt, resume. A call that has sampled nothing
yet, or whose count nobody knows, ends at the server and starts again under the new weights and salt, unseen by its
caller; a request that moves KV is given up (`gyre_vllm.transfers`). Invariants: no token is labelled from the time it
arrived; between pause and resume no call enters; what fails here leaves an engine that goes on as before, under whole
weights and with its gate open, or one that has failed and says so to everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from gyre_core import CapabilityError, ComponentContext, InfrastructureError, PauseMode, WeightSource
from gyre_core.waiting import to_its_end

from gyre_vllm.calls import Cut, RunningCall
from gyre_vllm.loading import load_version, require_loadable, require_members, require_vocabulary
from gyre_vllm.options import VLLMOptions
from gyre_vllm.server import Server, launch, sleep_way
from gyre_vllm.state import EngineState, Phase
from gyre_vllm.watch import watch
from gyre_vllm.weights import COLLECTIVE, ModelVersion, read_version, require_same
from gyre_vllm.wire import ID_PREFIX

log = logging.getLogger("gyre.vllm")


class Changes:
    """Owns the server and its life. `timings`: seconds of the last start, update_weights, sleep and wake."""

    def __init__(self, options: VLLMOptions, context: ComponentContext, state: EngineState) -> None:
        self._options, self._context, self._state = options, context, state
        self.timings: dict[str, float] = {}
        self._lock = asyncio.Lock()
        self._model: ModelVersion | None = None
        self._watch: asyncio.Task[None] | None = None
        self._lives = 0
        self._lying = False
        """The server has given its memory back, or was told to."""

    @asynccontextmanager
    async def _timed(self, what: str) -> AsyncIterator[None]:
        async with self._lock:
            began = time.perf_counter()
            yield
            self.timings[what] = time.perf_counter() - began

    def sleep_way(self) -> str | None:
        """How this engine sleeps: "memory", "restart", or None when it cannot."""
        server = self._state.server
        return sleep_way(self._options, None if server is None else server.facts)

    # -- start and end -----------------------------------------------------------------------------------------------

    async def start(self, source: WeightSource) -> None:
        """See `VLLMEngine.start`."""
        async with self._timed("start"):
            if self._state.phase is not Phase.NEW:
                raise InfrastructureError("starting vLLM", got="a second start", expected="one")
            self._model = await self._read(source)
            await self._up(source, self._model)

    async def _up(self, source: WeightSource, model: ModelVersion) -> None:
        """Bring up a server with these weights and take calls."""
        state = self._state
        load = bool(self._options.url) or model.is_delta
        server = await launch(self._options, self._context, model.base, self._lives)
        self._lives += 1
        try:
            require_vocabulary(server, model, source)
            if load:
                if not server.facts.connector:
                    await server.client.pause("abort")
                await self._left_asleep(server)
                await self._load(server, source)
                await server.client.forget_prefixes()
            await server.client.set_version(source.version)
            before = (await server.client.load()).sampled
            if load:
                await self._go_on(server)
        except BaseException:
            await server.end()
            raise
        state.server, state.vocab = server, model.vocab
        state.sampled_before = state.sampled - before
        state.fault, state.paused = None, False
        self._enter(source, model.digest)
        state.phase = Phase.READY
        state.open.set()
        self._watch = asyncio.create_task(watch(state, server, self._options.stall_s))

    async def _left_asleep(self, server: Server) -> None:
        """Take back the memory that an earlier life of the cell let the server give back."""
        if server.facts.asleep:
            await server.client.rpc("gyre_wake")
        elif server.facts.sleeps and server.facts.device.startswith("cuda"):  # does not tell, minds no second time
            await server.client.ask("POST", "/wake_up", timeout_s=self._options.start_timeout_s)

    async def close(self) -> None:
        """See `VLLMEngine.close`."""
        async with self._lock:
            if self._state.phase is Phase.CLOSED and self._state.server is None:
                return
            self._state.phase = Phase.CLOSED
            self._state.release()
            await self._down()

    async def _down(self) -> None:
        """Let the server go; end it if it is ours."""
        state = self._state
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        server = state.server
        state.open.clear()
        if server is None:
            return
        if server.process is None and state.paused and not self._lying and not server.facts.connector:
            with contextlib.suppress(InfrastructureError):
                await server.client.resume()
        state.paused = self._lying = False
        await server.end()
        state.server = None

    # -- pause -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See `VLLMEngine.pause`."""
        async with self._lock:
            state, server = self._state, self._state.ready("pausing")
            async with self._shut(server, "pausing"):
                if not state.paused:
                    await self._halt(server)
                calls = list(state.calls)
                if mode is PauseMode.ABORT:
                    for call in calls:
                        call.abort()
                    await state.end_segments(server, calls)
                state.paused = True  # not before: one that was given up is no pause that anybody ends

    @asynccontextmanager
    async def _shut(self, server: Server, doing: str) -> AsyncIterator[None]:
        """Let no call enter meanwhile. Afterwards, whatever failed, the engine takes calls again unless it is paused or
        asleep, or it has failed; also when who asked is cancelled while it does."""
        self._state.open.clear()
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(InfrastructureError):  # is in the engine's fault; who asked is told the first one
                await to_its_end(self._reopen(server, doing, error))
            raise
        await to_its_end(self._reopen(server, doing))

    async def _reopen(self, server: Server, doing: str, before: BaseException | None = None) -> None:
        state = self._state
        if state.paused or state.phase is not Phase.READY:
            return
        try:
            await self._let_in(server)
        except InfrastructureError as error:
            got = str(error) if before is None else f"{str(before) or type(before).__name__}; and after it {error}"
            state.fail(InfrastructureError(doing, got=got, expected="a server that goes on"))
            raise

    async def _let_in(self, server: Server) -> None:
        await self._go_on(server)
        if self._state.phase is Phase.READY:
            self._state.note_progress()
            self._state.open.set()

    async def _halt(self, server: Server) -> None:
        """Let the server sample nothing more; the gate is closed. With a KV connector its pause would wait for leases
        that only a running scheduler can end: there the calls end at the server and go on from its prefix cache."""
        if not server.facts.connector:
            await server.client.pause("keep")
            return
        running = [call for call in self._state.calls if not call.at_rest.is_set()]
        for call in running:
            if call.cut is Cut.NONE:
                call.cut = Cut.RESTART
        await self._state.end_segments(server, running)

    async def _go_on(self, server: Server) -> None:
        if not server.facts.connector:
            await server.client.resume()

    async def resume(self) -> None:
        """See `VLLMEngine.resume`."""
        async with self._lock:
            state, server = self._state, self._state.ready("resuming")
            state.paused = False  # also when no answer comes: the next change pauses the server itself
            await to_its_end(self._let_in(server))

    async def flush(self) -> None:
        """See `VLLMEngine.flush_cache`."""
        async with self._lock:
            server = self._state.ready("flushing the cache")
            self._state.epoch += 1
            await server.client.forget_prefixes()

    # -- weights -----------------------------------------------------------------------------------------------------

    async def update(self, source: WeightSource) -> None:
        """See `VLLMEngine.update_weights`."""
        async with self._timed("update_weights"):
            state, server = self._state, self._state.ready("updating weights")
            if source.kind == COLLECTIVE:
                require_members(server, self._options, source)
                digest = source.digest
            else:
                digest = (await self._read_next(server, source)).digest
            async with self._shut(server, f"loading policy version {source.version}"):
                if not state.paused:
                    await self._halt(server)
                with state.transfers.none():
                    borders = await self._borders(server)
                    await self._load_or_restore(server, source)
                    self._enter(source, digest)
                for call, border in borders.items():
                    call.labels.change(border, source.version)

    def _enter(self, source: WeightSource, digest: str) -> None:
        self._state.version, self._state.source, self._state.digest = source.version, source, digest
        self._state.epoch += 1

    async def _borders(self, server: Server) -> dict[RunningCall, int]:
        """Index of the first token each call will sample under the next weights; the server is paused. Calls not in it
        have been ended at the server and will start again."""
        state = self._state
        running = [call for call in state.calls if not call.at_rest.is_set()]
        counts = await self._counts(server) if running and self._options.on_update == "keep" else {}
        borders = {call: call.first + counts[call.server_id] for call in running if counts.get(call.server_id)}
        again = [call for call in running if call not in borders]
        for call in again:
            if call.cut is Cut.NONE:
                call.cut = Cut.RESTART
        await state.end_segments(server, again)
        return borders

    async def _counts(self, server: Server) -> dict[str, int]:
        """Tokens sampled in the present segment by the id a call was sent with; empty when the server cannot tell."""
        if not server.facts.counts:
            return {}
        found: dict[str, int] = {}
        for told in await server.client.rpc("gyre_counts"):
            for name, count in (told.get("counts") or {}).items():
                ours = name.removeprefix(ID_PREFIX).rsplit("-", 1)[0]
                found[ours] = max(int(count), found.get(ours, 0))
        return found

    async def _read(self, source: WeightSource) -> ModelVersion:
        return await asyncio.to_thread(read_version, source, f"loading policy version {source.version}")

    async def _read_next(self, server: Server | None, source: WeightSource) -> ModelVersion:
        """Check a version beside the running server; it must fit the one that was loaded first."""
        doing = f"loading policy version {source.version}"
        model = await self._read(source)
        assert self._model is not None
        require_same(model, self._model, source.location, doing)
        if server is not None:
            require_loadable(server, model, doing)
        return model

    async def _load(self, server: Server, source: WeightSource) -> None:
        assert self._model is not None
        await load_version(server, source, self._model.shapes, self._options.start_timeout_s)

    async def _load_or_restore(self, server: Server, source: WeightSource) -> None:
        """Load and tell the server which version it has; on failure bring the old weights back and raise, or end the
        engine if that fails too. A server that was not paused may hold KV of half a load: its prefix cache begins
        anew."""
        try:
            await self._load(server, source)
            await server.client.set_version(source.version)
        except InfrastructureError as error:
            self._state.epoch += int(server.facts.connector)
            await self._restore(server, f"loading policy version {source.version}", error, self._load)
            raise
        except BaseException as error:
            self._unheard(f"loading policy version {source.version}", error)
            raise

    def _unheard(self, doing: str, error: BaseException) -> None:
        """Nobody waited for the server's answer, which does what it was told all the same: the engine has failed."""
        self._state.fail(
            InfrastructureError(
                doing,
                got=f"{type(error).__name__} before the server had answered",
                expected="an answer, to know its weights",
            )
        )

    async def _restore(
        self,
        server: Server,
        doing: str,
        before: InfrastructureError,
        load: Callable[[Server, WeightSource], Awaitable[None]],
    ) -> None:
        """Bring the present version's weights back after this error; the engine has failed if they do not come."""
        old = self._state.source
        assert old is not None
        try:
            if old.kind == COLLECTIVE:
                raise InfrastructureError("loading it again", got="a broadcast", expected="a version at rest") from None
            await load(server, old)
            await server.client.set_version(old.version)
            self._lying = False
        except InfrastructureError as error:
            self._state.fail(
                InfrastructureError(
                    doing,
                    got=f"{before}; and version {old.version} could not be brought back: {error}",
                    expected="one whole set of weights",
                )
            )
        except BaseException as error:
            self._unheard(f"{doing}: bringing version {old.version} back", error)
            raise

    # -- sleep -------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """See `VLLMEngine.sleep`. A failed server of ours sleeps by being ended, also one that fails on the way."""
        async with self._timed("sleep"):
            state, way, doing = self._state, self.sleep_way(), "putting vLLM to sleep"
            if way is None:
                raise CapabilityError(doing, got="a server that cannot", expected="SLEEP")
            if state.phase is Phase.ASLEEP and state.server is not None and state.server.ending:
                await self._down()  # who asked first has given up
                return
            if state.phase is not Phase.FAILED or self._options.url:
                server = state.ready(doing)
                try:
                    async with self._shut(server, doing):
                        await self._lie_down(server, way)
                    return
                except InfrastructureError as error:
                    if state.fault is None or self._options.url:
                        raise
                    log.warning("vLLM falls asleep by being ended; its next wake is a start: %s", error)
            self._asleep()
            await self._down()

    async def _lie_down(self, server: Server, way: str) -> None:
        state = self._state
        with state.transfers.none():
            if not server.facts.connector:
                await server.client.pause("abort")
            calls = list(state.calls)
            for call in calls:
                call.abort()
            await state.end_segments(server, calls)
            if way == "memory":
                await self._give_back(server)
                state.paused = not server.facts.connector
                self._asleep()
            else:
                self._asleep()
                await self._down()

    def _asleep(self) -> None:
        """Calls that came meanwhile end too: whoever made them is not to wait until it wakes."""
        self._state.phase = Phase.ASLEEP
        for call in list(self._state.calls):
            call.abort()

    async def _give_back(self, server: Server) -> None:
        """Weights and KV; on failure they are whole again before it raises, or the engine has failed."""
        self._lying = True
        try:
            if server.facts.device.startswith("cuda"):
                await server.client.ask("POST", "/sleep", query={"level": "2", "mode": "abort"})
                return
            await server.client.forget_prefixes()
            told = await server.client.rpc("gyre_sleep")
            log.info("vLLM sleeps: resident bytes of its workers before and after: %s", told)
        except InfrastructureError as error:
            self._state.epoch += 1  # what the blocks held may be gone
            await self._restore(server, "putting vLLM to sleep", error, self._take_back)
            raise
        except BaseException as error:
            self._unheard("putting vLLM to sleep", error)
            raise

    async def wake(self, source: WeightSource) -> None:
        """See `VLLMEngine.wake`. A server of ours that died or does not wake is followed by another."""
        async with self._timed("wake"):
            state, server = self._state, self._state.server
            if state.phase is not Phase.ASLEEP:
                raise InfrastructureError(
                    "waking vLLM", got=f"an engine that is {state.phase.value}", expected="a sleeping one"
                )
            model = await self._read_next(server, source)
            if server is None or server.ending or not await self._rouse(server, source, model):
                await self._down()
                await self._up(source, model)

    async def _rouse(self, server: Server, source: WeightSource, model: ModelVersion) -> bool:
        """Let a sleeping server go on with these weights; False when one of ours does not."""
        state, foreign = self._state, server.process is None
        if not server.alive:
            log.warning("vLLM died in its sleep, and another is started: %s", server.story())
            return False
        try:
            await self._take_back(server, source)
            await server.client.set_version(source.version)
            await server.client.forget_prefixes()
            await server.client.resume()
        except InfrastructureError as error:
            if foreign:
                raise
            log.warning("vLLM does not wake, and another is started: %s; %s", error, server.story())
            return False
        state.paused = self._lying = False
        self._enter(source, model.digest)
        state.phase = Phase.READY
        state.note_progress()
        state.open.set()
        return True

    async def _take_back(self, server: Server, source: WeightSource) -> None:
        limit = self._options.start_timeout_s
        if server.facts.device.startswith("cuda"):
            await server.client.ask("POST", "/wake_up", query={"tags": "weights"}, timeout_s=limit)
            await self._load(server, source)
            await server.client.ask("POST", "/wake_up", query={"tags": "kv_cache"}, timeout_s=limit)
        else:
            await server.client.rpc("gyre_wake")
            await self._load(server, source)
