"""`SGLangEngine`: SGLang as `gyre_core.Engine`.

Puts the parts together: a server started or found (`launch`), its calls (`driver`), its weights (`weights`).
Invariants: a bad request fails alone and never reaches the server (one id outside the vocabulary ends it); weights
change only while nothing is sampled; cached KV is named by the weights that made it; after a change that failed the
engine is what it was before, or every call and the load say why it is not.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

from gyre_core import (
    CapabilityError,
    ComponentContext,
    EngineCapability,
    EngineLoad,
    GenerateChunk,
    GenerateRequest,
    GyreError,
    InfrastructureError,
    PauseMode,
    WeightSource,
)
from gyre_core.waiting import to_its_end

from gyre_sglang.calls import Call, checked, chunk_of
from gyre_sglang.client import dead
from gyre_sglang.driver import Counters, Driver
from gyre_sglang.facts import ModelFacts, offered, read_model
from gyre_sglang.launch import Server, Starter
from gyre_sglang.load import read_load
from gyre_sglang.loading import TornError, load_version, tearing
from gyre_sglang.no_kv import NoKV
from gyre_sglang.options import SGLangOptions
from gyre_sglang.plan import require_sizes
from gyre_sglang.weights import COLLECTIVE, Prepared, Shapes, fitting, open_source, prepare, shapes_of, whole_of

log = logging.getLogger("gyre.sglang")


class SGLangEngine(NoKV):
    """An SGLang server in an environment of its own.

    Offers `PAUSE`; `SLEEP` unless it was given a running server that cannot give memory back; `ROUTED_EXPERTS` and
    `SEED` as the server's own answer says. `timings` has the seconds of the last start, update_weights, sleep and wake.
    """

    def __init__(self, options: SGLangOptions | None, context: ComponentContext) -> None:
        self.options = options or SGLangOptions()
        self.timings: dict[str, float] = {}
        if not self.options.url:  # said by `gyre check`, and not by a cell that starts
            require_sizes(self.options, context.device, context.accelerators)
        self._context = context
        self._starter = Starter(self.options, context)
        self._server: Server | None = None
        self._driver: Driver | None = None
        self._model: ModelFacts | None = None
        self._source = WeightSource(-1, "")
        self._digest = ""
        """Of the contents of the weights in use; empty while nobody knows."""
        self._fault: InfrastructureError | None = None
        self._shapes: Shapes = {}
        self._version = -1
        self._lives: dict[int, int] = {}
        self._flushes = 0
        self._held = False
        self._counters = Counters()
        self._asleep = False
        self._changing = asyncio.Lock()

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """What it offers; before `start` what it offers unless the server turns out to lack it."""
        return offered(self.options, None if self._server is None else self._server.facts)

    async def look(self) -> frozenset[EngineCapability]:
        """What it will offer: a server that runs already is asked, which changes nothing. InfrastructureError when it
        is not there, ConfigError when it runs in a way that this engine cannot use."""
        return offered(self.options, await self._starter.look()) if self.options.url else self.capabilities

    @property
    def version(self) -> int:
        """Policy version in use; -1 before the first load."""
        return self._version

    # Life

    async def start(self, source: WeightSource) -> None:
        """Start the server (or find the running one) with the model at `source.location` and become ready."""
        async with self._changing:
            if self._server is not None or self._asleep:
                raise InfrastructureError("starting SGLang", got="a second start", expected="one")
            began = time.perf_counter()
            self._model = read_model(source.location)
            await self._rise(source)
            self.timings["start"] = time.perf_counter() - began

    async def _rise(self, source: WeightSource) -> None:
        """A server of its own, or the running one, with these weights."""
        assert self._model is not None
        opened = await asyncio.to_thread(open_source, source)
        self._shapes = self._shapes or shapes_of(opened)
        whole = await asyncio.to_thread(whole_of, source, opened)
        prepared = fitting(source, opened, self._shapes, tied=self._model.tied, held=whole.digest)
        server = await self._starter.start(whole, self._model)
        try:
            if whole is not source:
                await load_version(server, prepared)
        except BaseException:
            await server.end()
            raise
        self._server = server
        self._driver = Driver(server.client, server.facts, self._model, self.options, self._counters)
        self._take(source, prepared.digest)
        self._driver.open()

    def _take(self, source: WeightSource, digest: str) -> None:
        """The server has this version now."""
        assert self._driver is not None
        version = self._version = source.version
        self._source, self._digest, self._fault = source, digest or secrets.token_hex(8), None
        self._lives[version] = self._lives.get(version, 0) + 1
        self._driver.turn(version, self._cache_key())

    def _cache_key(self) -> str:
        """Names the weights in use. A version that comes back is named anew: a call that ran through its end has left
        mixed KV under the old name. Engines of one run that hold one version the first time agree on it, unless nobody
        told what is in it."""
        run = hashlib.sha256(str(Path(self._context.run_dir).resolve()).encode()).hexdigest()[:12]
        return f"{run}:{self._version}:{self._digest}:{self._lives[self._version] - 1}:{self._flushes}"

    async def sleep(self) -> None:
        """End running calls with ABORT and give memory back: by the server's memory saver on accelerators, by ending
        the server on a CPU, and also where it has died or cannot do it. When a server that was not started here cannot,
        the engine is as awake as before."""
        async with self._changing:
            began = time.perf_counter()
            server, driver = self._started("putting SGLang to sleep")
            if EngineCapability.SLEEP not in self.capabilities:
                raise CapabilityError(
                    "putting SGLang to sleep", got=f"a running server at {server.client.url} without its memory saver",
                    expected="--enable-memory-saver", fix="Start it with that flag, or let Gyre start it.",
                )  # fmt: skip
            was_open = driver.gate.is_set()
            driver.gate.clear()
            self._asleep = True  # no call enters any more
            try:
                stays = await self._give_back(server, driver)
            except BaseException:
                self._asleep = False
                await to_its_end(self._go_on(server, driver, admit=was_open))
                raise
            if not stays:
                await self._fall()
                assert self._model is not None
                await self._starter.make_spare(self._source, self._model)
            self.timings["sleep"] = time.perf_counter() - began

    async def _give_back(self, server: Server, driver: Driver) -> bool:
        """Have the calls end and memory given back; False when the server has to be ended for that."""
        if server.has_ended:
            return False
        try:
            await self._let_go(server, driver)
            if server.facts.memory_saver:
                await server.release_memory()
            return server.facts.memory_saver
        except InfrastructureError as error:
            if server.process is None:
                raise
            log.warning("%s: the server cannot sleep, so it is ended: %s", self._context.name, error)
            return False

    async def _let_go(self, server: Server, driver: Driver) -> None:
        """End all calls; a server that is paused has to go on for that."""
        ended = asyncio.create_task(driver.cut_all())
        try:
            if server.paused:
                await server.proceed()
                self._held = False
            await ended
        finally:
            ended.cancel()

    async def _go_on(self, server: Server, driver: Driver, *, admit: bool) -> None:
        """After a change, however it went: sample again, or be paused again where a caller's pause goes on. While
        nobody knows what the server holds, its calls fail."""
        fault = server.fault or self._fault
        if fault is not None:
            driver.fail(fault)
        if server.running if self._held else server.paused:
            try:
                await (server.hold() if self._held else server.proceed())
            except InfrastructureError as error:
                said = "goes on and does not pause" if self._held else "was paused and does not go on"
                log.error("%s: the server %s: %s", self._context.name, said, error)
                self._fault = error
                driver.fail(error)
        if admit:
            driver.open()

    async def _fall(self) -> None:
        server, driver, self._server, self._driver = self._server, self._driver, None, None
        self._held = False
        if server is None or driver is None:
            return
        driver.closing = True
        try:
            if server.process is not None and server.process.grace_s:
                await driver.close()  # a server that is asked to end waits for its calls
            await server.end()
        finally:
            await driver.close()

    async def wake(self, source: WeightSource) -> None:
        """Take memory and the weights of `source` and become ready; with another server when the old one has ended or
        cannot do it."""
        async with self._changing:
            if not self._asleep:
                raise InfrastructureError("waking SGLang", got="one that is awake", expected="a sleeping one")
            began = time.perf_counter()
            if self._server is not None and self._driver is not None:
                await self._take_back(self._server, self._driver, source)
            if self._server is None:  # it was ended, by `sleep` or now
                await self._rise(source)
            self._asleep = False
            self.timings["wake"] = time.perf_counter() - began

    async def _take_back(self, server: Server, driver: Driver, source: WeightSource) -> None:
        """Wake the sleeping server. When it was started here and that fails, it is ended."""
        if server.has_ended or (server.fault is not None and server.process is not None):
            await self._fall()
            return
        prepared = await self._prepared(source)
        try:
            await server.take_memory(lambda: load_version(server, prepared))
            self._take(source, prepared.digest)
            driver.open()
        except InfrastructureError as error:
            if server.process is None or (prepared.meeting is not None and not server.has_ended):
                raise
            log.warning("%s: the server does not wake, so another is started: %s", self._context.name, error)
            await self._fall()

    async def close(self) -> None:
        """End for good; running calls end with ABORT. A server that was not started here goes on."""
        async with self._changing:
            self._asleep = False
            try:
                if self._server is not None and self._server.process is None and self._driver is not None:
                    await self._let_go(self._server, self._driver)
            finally:
                await self._fall()
                await self._starter.close()

    def _started(self, doing: str) -> tuple[Server, Driver]:
        """Server and driver, in whatever state they are."""
        if self._server is None or self._driver is None or self._asleep:
            raise InfrastructureError(
                doing, got="SGLang that has not been started or sleeps", expected="a ready engine",
                fix="Call start or wake first.",
            )  # fmt: skip
        return self._server, self._driver

    def _ready(self, doing: str, *, torn: bool = False) -> tuple[Server, Driver]:
        """Server and driver; with `torn` also when the server's weights are of no version."""
        server, driver = self._started(doing)
        if server.process is not None and server.has_ended:
            raise dead(self._context.name, server.process, doing)
        fault = server.fault or (None if torn else self._fault)
        if fault is not None:
            raise fault
        return server, driver

    def resident_bytes(self) -> int:
        """Memory of the host that the server's processes hold now; 0 for a server that was not started here."""
        process = self._server.process if self._server else None
        return (process.resident_bytes() if process else 0) + self._starter.resident_bytes()

    # Calls

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Run a call. ContextLengthError for a prompt that can never fit, ValueError for one that cannot run,
        InfrastructureError when the server fails."""
        server, driver = self._ready(f"starting call {request.request_id!r}")
        assert self._model is not None
        call = Call(*checked(request, self._model, server.facts, self.options.context_length))
        driver.submit(call)
        cached: int | None = None
        try:
            while True:
                items = await call.take()
                first, cached = cached is None, call.cached_tokens or 0
                yield chunk_of(items, cached if first else None, call.routed_from)
                if items[-1].finish is not None:
                    return
        finally:
            driver.cut(call)

    async def abort(self, request_id: str) -> bool:
        """End one call with ABORT; False when it is not running or ended by itself first."""
        _, driver = self._ready("aborting a call")
        call = driver.find(request_id)
        if call is None:
            return False
        driver.cut(call)
        if not self._held:  # a server that is held lets go when it goes on
            await call.over.wait()
            return call.finish is not None and call.finish.value == "abort"
        return True

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Stop sampling; with KEEP calls stay with their KV, with ABORT they end."""
        async with self._changing:
            server, driver = self._ready("pausing")
            was_open = driver.gate.is_set()
            driver.gate.clear()
            try:
                if mode is PauseMode.ABORT:
                    await self._let_go(server, driver)
                elif not self._held:
                    await server.hold()
                    await server.settle()
                    await driver.catch_up()
                    self._held = True
            except BaseException:
                await to_its_end(self._go_on(server, driver, admit=was_open))
                raise

    async def resume(self) -> None:
        """Go on after `pause`."""
        async with self._changing:
            server, driver = self._ready("resuming")
            self._held = False  # also when no answer comes: the next pause asks the server again
            await to_its_end(self._let_in(server, driver))

    async def _let_in(self, server: Server, driver: Driver) -> None:
        if server.paused:
            await server.proceed()
        driver.open()

    async def load(self) -> EngineLoad:
        """The present load; all zero but the counters while it sleeps."""
        counters = self._counters
        empty = EngineLoad(
            0, 0, 0, 0, 0, self._version, None, None, counters.prefilled, counters.cached, counters.sampled
        )
        if self._asleep or self._server is None:
            return empty
        server, driver = self._ready("reading the load")
        return await read_load(server, driver, empty)

    async def flush_cache(self) -> None:
        """Forget every cached prefix: what running calls use stays with them, but no later call finds it."""
        async with self._changing:
            server, driver = self._ready("flushing the cache")
            self._flushes += 1
            driver.turn(self._version, self._cache_key())
            await self._drop_unreachable(server, driver)

    async def _drop_unreachable(self, server: Server, driver: Driver) -> None:
        """Free cached KV that no key leads to any more, if that can be done now; else it is evicted in time."""
        if not driver.calls:
            await server.flush()

    # Weights

    async def update_weights(self, source: WeightSource) -> None:
        """Change to another version; running calls keep their tokens and, unless `on_update` says otherwise, their KV
        (one that has no token yet begins anew).
        Fails without changing anything when the version cannot be read."""
        async with self._changing:
            began = time.perf_counter()
            server, driver = self._ready("updating weights", torn=True)
            prepared = await self._prepared(source)
            was_open = driver.gate.is_set()
            driver.gate.clear()
            try:
                again = driver.live() if self.options.on_update == "recompute" else driver.unsampled()
                if again and server.paused:  # by a caller, who is not in the way of what is to end
                    await server.proceed()
                    await server.settle()  # what waited for that at the door is inside
                await driver.restart(again)
                if server.running and (driver.live() or self._held):
                    await server.hold()
                await self._load_or_restore(server, driver, prepared)
                self._take(source, prepared.digest)
                await self._drop_unreachable(server, driver)
            finally:
                await to_its_end(self._go_on(server, driver, admit=was_open))
            self.timings["update_weights"] = time.perf_counter() - began

    async def _load_or_restore(self, server: Server, driver: Driver, prepared: Prepared) -> None:
        """Load, and hear all that was sampled before; when that broke the weights, bring the old ones back, or have
        every call fail."""
        try:
            await load_version(server, prepared)
            if driver.live():
                with tearing(prepared.source.version):
                    await server.settle()
                await driver.catch_up()
        except TornError as error:
            log.warning("%s: %s; loading version %d again", self._context.name, error, self._version)
            self._fault, self._digest = error, ""
            if self._source.kind == COLLECTIVE:
                raise  # there is nothing at rest to go back to
            try:
                before = await self._prepared(self._source)
                await load_version(server, before)
            except GyreError as second:
                log.error("%s: version %d could not be loaded again: %s", self._context.name, self._version, second)
                raise error from second
            self._fault, self._digest = None, before.digest
            raise
        except GyreError:
            raise  # no weight has moved
        except BaseException as error:
            self._fault, self._digest = InfrastructureError(
                f"loading policy version {prepared.source.version} into SGLang",
                got=f"{type(error).__name__}: {error}", expected="one whole set of weights",
            ), ""  # fmt: skip
            raise

    async def _prepared(self, source: WeightSource) -> Prepared:
        assert self._model is not None
        return await asyncio.to_thread(prepare, source, self._shapes, tied=self._model.tied, held=self._digest)
