"""The engine's changes: start, weights, pause, sleep, end; one at a time.

How weights change under running calls (`update`): close the gate, pause the server, ask every worker how many tokens
each call has sampled, load, enter the border into the labels, begin a new salt, resume. A call that has sampled nothing
yet, or whose count nobody knows, ends at the server and starts again under the new weights and salt, unseen by its
caller; a request that moves KV is given up (`gyre_vllm.transfers`). Invariants: no token is labelled from the time it
arrived; between pause and resume no call enters; a failed load either leaves the old weights or ends the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from gyre_core import CapabilityError, ComponentContext, InfrastructureError, PauseMode, WeightSource

from gyre_vllm.calls import Cut, RunningCall
from gyre_vllm.options import VLLMOptions
from gyre_vllm.server import Server, launch
from gyre_vllm.state import EngineState, Phase
from gyre_vllm.weights import COLLECTIVE, PACKAGE, ModelVersion, read_meeting, read_version, require_same
from gyre_vllm.wire import ID_PREFIX

log = logging.getLogger("gyre.vllm")
_WATCH_S = 0.5


class Changes:
    """Owns the server and its life. `timings`: seconds of the last start, update_weights, sleep and wake."""

    def __init__(self, options: VLLMOptions, context: ComponentContext, state: EngineState) -> None:
        self._options, self._context, self._state = options, context, state
        self.timings: dict[str, float] = {}
        self._lock = asyncio.Lock()
        self._model: ModelVersion | None = None
        self._watch: asyncio.Task[None] | None = None
        self._lives = 0

    @asynccontextmanager
    async def _timed(self, what: str) -> AsyncIterator[None]:
        async with self._lock:
            began = time.perf_counter()
            yield
            self.timings[what] = time.perf_counter() - began

    def sleep_way(self) -> str | None:
        """How this engine sleeps: "memory", "restart", or None when it cannot."""
        server, wish = self._state.server, self._options.sleep
        if wish in ("auto", "memory") and (server is None or server.facts.sleeps):
            return "memory"
        return None if wish == "memory" or self._options.url else "restart"

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
            _require_vocabulary(server, model, source)
            if load:
                if not server.facts.connector:
                    await server.client.pause("abort")
                if server.facts.asleep:
                    await server.client.rpc("gyre_wake")
                await self._load(server, source)
                await server.client.forget_prefixes()
            await server.client.set_version(source.version)
            if load:
                await self._go_on(server)
        except BaseException:
            await server.end()
            raise
        state.server, state.vocab = server, model.vocab
        state.sampled_before = state.sampled - (await server.client.load()).sampled
        state.fault, state.paused = None, False
        self._enter(source)
        state.phase = Phase.READY
        state.open.set()
        self._watch = asyncio.create_task(self._watching(server))

    async def close(self) -> None:
        """See `VLLMEngine.close`."""
        async with self._lock:
            if self._state.phase is Phase.CLOSED:
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
        server, state.server = state.server, None
        state.open.clear()
        if server is None:
            return
        if server.process is None and state.paused and not server.facts.connector:
            with contextlib.suppress(InfrastructureError):
                await server.client.resume()
        state.paused = False
        await server.end()

    async def _watching(self, server: Server) -> None:
        """Notice that the server died or hangs, and say so once."""
        state = self._state
        while True:
            await asyncio.sleep(_WATCH_S)
            if not server.alive:
                state.fail(InfrastructureError("running vLLM", got=server.story(), expected="a live server"))
                return
            running = any(not call.at_rest.is_set() for call in state.calls)
            quiet = time.monotonic() - state.progress
            if not running or not state.open.is_set():
                state.note_progress()
            elif quiet > self._options.stall_s:
                state.fail(
                    InfrastructureError(
                        "running vLLM",
                        got=f"no token for any call in {quiet:.0f} s; {server.story()}",
                        expected="tokens",
                        fix="It hangs. Raise stall_s if prompts take longer than that.",
                    )
                )
                return

    # -- pause -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See `VLLMEngine.pause`."""
        async with self._lock:
            state, server = self._state, self._state.ready("pausing")
            state.open.clear()
            if not state.paused:
                await self._halt(server)
                state.paused = True
            calls = list(state.calls)
            if mode is PauseMode.ABORT:
                for call in calls:
                    call.abort()
                await state.end_segments(server, calls)

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
            if state.paused:
                await self._go_on(server)
                state.paused = False
            state.note_progress()
            state.open.set()

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
                _require_members(server, self._options, source)
            else:
                await self._read_next(server, source)
            state.open.clear()
            try:
                if not state.paused:
                    await self._halt(server)
                with state.transfers.none():
                    borders = await self._borders(server)
                    await self._load_or_restore(server, source)
                    self._enter(source)
                for call, border in borders.items():
                    call.labels.change(border, source.version)
            finally:
                if not state.paused and state.phase is Phase.READY:
                    await self._go_on(server)
                    state.note_progress()
                    state.open.set()

    def _enter(self, source: WeightSource) -> None:
        self._state.version, self._state.source = source.version, source
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
            _require_loadable(server, model, doing)
        return model

    async def _load(self, server: Server, source: WeightSource) -> None:
        limit = self._options.start_timeout_s
        if source.kind == COLLECTIVE:
            await self._receive(server, source)
        elif server.facts.extension:
            await server.client.rpc("gyre_load", timeout_s=limit, location=source.location, package=PACKAGE)
        else:
            await server.client.rpc("reload_weights", timeout_s=limit, weights_path=source.location)

    async def _receive(self, server: Server, source: WeightSource) -> None:
        """Let the workers join the group and take what its first member broadcasts."""
        doing, limit = f"receiving policy version {source.version}", self._options.start_timeout_s
        assert self._model is not None
        meeting = asdict(read_meeting(source.location, doing)) | {"timeout_s": limit}
        told = await server.client.rpc(
            "gyre_receive", timeout_s=limit, meeting=meeting, shapes=self._model.shapes, package=PACKAGE
        )
        versions = {int(answer["version"]) for answer in told}
        if versions != {source.version}:
            raise InfrastructureError(doing, got=f"versions {sorted(versions)}", expected=str(source.version))

    async def _load_or_restore(self, server: Server, source: WeightSource) -> None:
        """Load and tell the server which version it has; on failure bring the old weights back and raise, or end the
        engine if that fails too. A server that was not paused may hold KV of half a load: its prefix cache begins
        anew."""
        try:
            await self._load(server, source)
            await server.client.set_version(source.version)
        except InfrastructureError as error:
            old = self._state.source
            assert old is not None
            self._state.epoch += int(server.facts.connector)
            try:
                if old.kind == COLLECTIVE:
                    raise InfrastructureError(
                        "loading it again", got="a broadcast", expected="a version at rest"
                    ) from None
                await self._load(server, old)
                await server.client.set_version(old.version)
            except InfrastructureError as second:
                self._state.fail(
                    InfrastructureError(
                        f"loading policy version {source.version}",
                        got=f"{error}; and version {old.version} could not be brought back: {second}",
                        expected="one whole set of weights",
                    )
                )
            raise

    # -- sleep -------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """See `VLLMEngine.sleep`. A failed server sleeps by being ended."""
        async with self._timed("sleep"):
            state = self._state
            way = self.sleep_way()
            if way is None:
                raise CapabilityError("putting vLLM to sleep", got="a server that cannot", expected="SLEEP")
            if state.phase is Phase.FAILED and not self._options.url:
                await self._down()
                state.phase = Phase.ASLEEP
                return
            server = state.ready("putting vLLM to sleep")
            state.open.clear()
            with state.transfers.none():
                calls = list(state.calls)
                for call in calls:
                    call.abort()
                if not server.facts.connector:
                    await server.client.pause("abort")
                    state.paused = True
                await state.end_segments(server, calls)
                if way == "memory":
                    await self._give_back(server)
                else:
                    await self._down()
                state.phase = Phase.ASLEEP

    async def _give_back(self, server: Server) -> None:
        if server.facts.device.startswith("cuda"):
            await server.client.ask("POST", "/sleep", query={"level": "2", "mode": "abort"})
            return
        await server.client.forget_prefixes()
        told = await server.client.rpc("gyre_sleep")
        log.info("vLLM sleeps: resident bytes of its workers before and after: %s", told)

    async def wake(self, source: WeightSource) -> None:
        """See `VLLMEngine.wake`."""
        async with self._timed("wake"):
            state, server = self._state, self._state.server
            if state.phase is not Phase.ASLEEP:
                raise InfrastructureError(
                    "waking vLLM", got=f"an engine that is {state.phase.value}", expected="a sleeping one"
                )
            model = await self._read_next(server, source)
            if server is None or not server.alive:
                await self._down()
                await self._up(source, model)
                return
            await self._take_back(server, source)
            await server.client.set_version(source.version)
            await server.client.forget_prefixes()
            await server.client.resume()
            state.paused = False
            self._enter(source)
            state.phase = Phase.READY
            state.note_progress()
            state.open.set()

    async def _take_back(self, server: Server, source: WeightSource) -> None:
        limit = self._options.start_timeout_s
        if server.facts.device.startswith("cuda"):
            await server.client.ask("POST", "/wake_up", query={"tags": "weights"}, timeout_s=limit)
            await self._load(server, source)
            await server.client.ask("POST", "/wake_up", query={"tags": "kv_cache"}, timeout_s=limit)
        else:
            await server.client.rpc("gyre_wake")
            await self._load(server, source)


def _require_vocabulary(server: Server, model: ModelVersion, source: WeightSource) -> None:
    """InfrastructureError when the server serves another model than the folder's."""
    if server.facts.vocab not in (0, model.vocab):
        raise InfrastructureError(
            f"reaching vLLM at {server.client.url}",
            got=f"a vocabulary of {server.facts.vocab}",
            expected=f"{model.vocab}, that of {source.location}",
            fix="Let it serve the run's model.",
        )


def _require_loadable(server: Server, model: ModelVersion, doing: str) -> None:
    """CapabilityError for what a server without our extension would get wrong or cannot read."""
    if server.facts.extension:
        return
    if model.is_delta:
        raise CapabilityError(
            doing, got="a delta for a server without Gyre's worker extension", expected="a full version"
        )
    if model.tied and server.facts.device == "cpu":
        raise CapabilityError(
            doing,
            got="a model whose output layer is its embedding, on vLLM's CPU backend without Gyre's worker extension",
            expected="the extension, which loads the output layer too",
            fix="Start the server with `--worker-extension-cls gyre_vllm_worker.GyreWorker`.",
        )


def _require_members(server: Server, options: VLLMOptions, source: WeightSource) -> None:
    """CapabilityError when this server's workers cannot all join a group."""
    doing = f"receiving policy version {source.version}"
    if not server.facts.extension:
        raise CapabilityError(doing, got="a server without Gyre's worker extension", expected="the extension")
    if options.data_parallel > 1:
        raise CapabilityError(doing, got="a data-parallel server", expected="data_parallel 1, or a version at rest")
    read_meeting(source.location, doing)
