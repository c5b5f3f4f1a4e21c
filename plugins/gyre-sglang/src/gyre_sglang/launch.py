"""Servers: started from a launch plan or found at an address, ready when they answer, asked for what they can do.

Invariant: a `Server` has answered /server_info; what it cannot do is known before the first call. Not here: calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from gyre_core import ComponentContext, ConfigError, GyreError, InfrastructureError, WeightSource, seed_of
from gyre_core.environments import find, read_spec

from gyre_sglang.client import Client, DeadServerError, dead
from gyre_sglang.facts import ModelFacts, ServerFacts, read_server, version_warning
from gyre_sglang.options import SGLangOptions
from gyre_sglang.plan import LaunchPlan, launch_plan
from gyre_sglang.process import ServerProcess, free_port
from gyre_sglang.sharing import SharedFolder

log = logging.getLogger("gyre.sglang")

KV, WEIGHTS = "kv_cache", "weights"
ENVIRONMENT = Path(__file__).with_name("environment.toml")
"""Describes SGLang's own environment."""
PORT_TRIES = 3
PORT_TAKEN = "address already in use"
"""A port that is free when it is chosen may be taken by the time a server has imported all it needs."""
LATE_S = 0.02
"""How long events that are on their way may take from one local socket to another."""


@dataclass(slots=True)
class Server:
    """A server that answers."""

    client: Client
    facts: ServerFacts
    options: SGLangOptions
    process: ServerProcess | None
    """None when somebody else started it."""
    orders: Path | None = None
    """Folder of what our weight loader inside it is to do; None when it has none."""
    released: set[str] = field(default_factory=set)
    """Kinds of memory that were given back and not taken again."""
    running: bool = True
    """It has not said that it samples nothing, or was told to go on since. Both are true while nobody knows."""
    unread: list[Path] = field(default_factory=list)
    """Folders of ours that it may be reading still, though nobody waits for that."""
    fault: InfrastructureError | None = None
    """Set when nobody knows whether it has its memory: it can only end."""

    @property
    def paused(self) -> bool:
        """It was told to sample nothing, and has not said that it goes on."""
        return self.client.paused

    @property
    def has_ended(self) -> bool:
        """Whether it was started here and its process has ended."""
        return self.process is not None and self.process.exited.done()

    async def ask(self, path: str, body: dict[str, object] | None = None) -> object:
        """A control request."""
        return await self.client.post(path, body or {}, self.options.request_timeout_s)

    async def hold(self) -> None:
        """Stop between two forward passes; calls stay with their KV."""
        self.client.paused = True  # also when no answer comes: it may hear of it all the same
        await self.ask("/pause_generation", {"mode": "in_place"})
        self.running = False

    async def proceed(self) -> None:
        """Go on."""
        self.running = True
        await self.ask("/continue_generation")
        self.client.paused = False

    async def settle(self) -> None:
        """After `hold`: return when what was sampled before has arrived. Outputs and answers come from one event loop
        of the server in the order they were made, on several connections to this one."""
        await self.client.get("/server_info", self.options.request_timeout_s)
        await asyncio.sleep(LATE_S)

    async def flush(self) -> None:
        """Empty the prefix cache, if nothing runs; else the server refuses, which is fine."""
        with contextlib.suppress(InfrastructureError):
            await self.ask("/flush_cache")

    async def release_memory(self) -> None:
        """Give the memory of KV and weights back; needs an idle server with its memory saver."""
        await self.ask("/flush_cache")
        await self._once("/release_memory_occupation", "give its memory back", [KV, WEIGHTS])
        self.released = {KV, WEIGHTS}

    async def take_memory(self, load: Callable[[], Awaitable[None]]) -> None:
        """Undo `release_memory`: the weights' memory, their contents by `load`, then the KV pool's. May be tried again
        when `load` failed."""
        await self._retake(WEIGHTS)
        await load()
        await self._retake(KV)

    async def _retake(self, tag: str) -> None:
        if tag in self.released:
            await self._once("/resume_memory_occupation", "take its memory again", [tag])
            self.released.discard(tag)

    async def _once(self, path: str, order: str, tags: list[str]) -> None:
        """The server ends when it is told to give what it has given or to take what it has: where no good answer came,
        its memory is not spoken of again."""
        if self.fault is not None:
            raise self.fault
        self.fault = InfrastructureError(
            f"using SGLang at {self.client.url}", got=f"no good answer to the order to {order}",
            expected="a server that is known to have it, or not", fix="Start the server anew.",
        )  # fmt: skip
        await self.client.post(path, {"tags": tags}, self.options.weights_timeout_s)
        self.fault = None

    def discard_unread(self) -> None:
        """Remove the folders that it reads no more: it has loaded another version since, or has ended."""
        while self.unread:
            shutil.rmtree(self.unread.pop(), ignore_errors=True)

    async def end(self) -> None:
        """End what was started here, and drop the connections."""
        if self.process is not None:
            await self.process.stop()
        self.discard_unread()
        await self.client.close()


class Starter:
    """Makes servers for one cell."""

    def __init__(self, options: SGLangOptions, context: ComponentContext) -> None:
        self._options, self._context = options, context
        self._log = Path(context.run_dir) / "logs" / f"{context.name}-sglang.log"
        self._orders = Path(context.run_dir).resolve() / "engines" / context.name
        self._spare: ServerProcess | None = None
        self._lives = 0
        self._pages = SharedFolder(context.run_dir, options.kv_share_folder, context.base_dir)

    async def start(self, source: WeightSource, model: ModelFacts) -> Server:
        """A server with the weights of `source`; InfrastructureError with its last words when it does not come up."""
        if self._options.url:
            return await self._found(source)
        if self._options.kv_share_gb:
            await asyncio.to_thread(self._pages.hold)
        for _ in range(PORT_TRIES - 1):
            spare = self._spare is not None
            try:
                return await self._launched(source, model)
            except InfrastructureError as error:
                if PORT_TAKEN not in str(error).lower() and not (spare and isinstance(error, DeadServerError)):
                    raise
        return await self._launched(source, model)

    async def _launched(self, source: WeightSource, model: ModelFacts) -> Server:
        plan = self._plan(source, model)
        self._lives += 1
        process = self._take_spare(plan) or await ServerProcess.start(plan, self._log)
        client = Client(f"http://127.0.0.1:{plan.port}", self._context.name, self._options.api_key, process)
        try:
            await self._until_ready(client, process)
            facts = await self._facts(client)
            if plan.seed is not None and facts.seed != plan.seed:
                raise self._port_taken(client, f"by another server, of random seed {facts.seed}")
            return Server(client, facts, self._options, process, self._orders if facts.loader else None)
        except BaseException:
            await process.stop()
            await client.close()
            raise

    def _plan(self, source: WeightSource, model: ModelFacts) -> LaunchPlan:
        """Each server has a random seed of its own: under the last one's it would begin to sample as that did."""
        context = self._context
        self._orders.mkdir(parents=True, exist_ok=True)
        return launch_plan(
            self._options, model, python=self._python(), location=str(Path(source.location).resolve()),
            version=source.version, port=free_port(), device=context.device, accelerators=context.accelerators,
            threads=context.threads, seed=seed_of(context.seed, self._lives),
            orders=str(self._orders), shared=str(self._pages.path.absolute()),
        )  # fmt: skip

    def _python(self) -> str:
        if self._options.command:
            return ""
        if self._options.python:
            return str(Path(self._context.base_dir) / self._options.python)
        found = find("sglang", spec=read_spec(ENVIRONMENT))
        if found is None:
            raise ConfigError(
                "starting SGLang", got="no environment for it", expected="one in the cache folder",
                fix="Build it with `python tools/engine_env.py sglang`, or set engine.python, engine.command or "
                "engine.url.",
            )  # fmt: skip
        return str(found)

    async def _until_ready(self, client: Client, process: ServerProcess) -> None:
        doing = f"starting SGLang of {self._context.name}"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.start_timeout_s):
                while not process.exited.done():
                    if PORT_TAKEN in process.output().lower():
                        # It stays alive without a port; whoever answers there is somebody else.
                        raise self._port_taken(client)
                    if await client.alive():
                        return
                    await asyncio.wait([process.exited], timeout=0.2)
        if process.exited.done():
            raise dead(self._context.name, process, doing)
        raise InfrastructureError(
            doing, got=f"no answer in {self._options.start_timeout_s:g} s; its last lines:\n{process.tail()}\n",
            expected="a server that is ready", fix="Raise engine.start_timeout_s, or see why it is slow.",
        )  # fmt: skip

    def _port_taken(self, client: Client, how: str = "") -> InfrastructureError:
        return InfrastructureError(
            f"starting SGLang of {self._context.name}", got=f"{client.url}: {PORT_TAKEN} {how}".rstrip(),
            expected="a port that is free still",
            fix="Several ports were tried; see what takes them so quickly on this machine.",
        )  # fmt: skip

    async def _facts(self, client: Client) -> ServerFacts:
        info = await client.get("/server_info", self._options.request_timeout_s)
        facts = read_server(info, client.url)
        warning = version_warning(facts.version)
        if warning is not None:
            log.warning("%s: %s", self._context.name, warning)
        if facts.overlap and self._options.on_update == "keep":
            raise ConfigError(
                f"using the server at {client.url}", got="its overlapped scheduler with on_update = 'keep'",
                expected="--disable-overlap-schedule, or on_update = 'recompute'",
                fix="With the overlapped scheduler one token of every running call would bear the wrong version.",
            )  # fmt: skip
        if facts.stream_interval != 1:
            log.info("%s: the server streams every %d tokens", self._context.name, facts.stream_interval)
        return facts

    async def look(self) -> ServerFacts:
        """What the server that runs already is."""
        client = Client(self._options.url, self._context.name, self._options.api_key)
        try:
            return await self._facts(client)
        finally:
            await client.close()

    async def _found(self, source: WeightSource) -> Server:
        client = Client(self._options.url, self._context.name, self._options.api_key)
        try:
            server = Server(client, await self._facts(client), self._options, None)
            await server.proceed()  # an earlier life of this cell may have left it paused, and it answers all the same
            body = {"model_path": str(Path(source.location).resolve()), "weight_version": str(source.version)}
            await client.post("/update_weights_from_disk", body, self._options.weights_timeout_s)
            return server
        except BaseException:
            await client.close()
            raise

    async def make_spare(self, source: WeightSource, model: ModelFacts) -> None:
        """Begin to start the server that the next `start` will use, where that can be done without its memory."""
        try:
            plan = self._plan(source, model)
            if plan.spare_argv:
                self._spare = await ServerProcess.start(plan, self._log, plan.spare_argv)
        except (GyreError, OSError) as error:
            log.warning("%s: no spare server, so waking will take longer: %s", self._context.name, error)

    def _take_spare(self, plan: LaunchPlan) -> ServerProcess | None:
        spare, self._spare = self._spare, None
        if spare is None or spare.exited.done():
            return None
        spare.send(plan.flags)
        return spare

    def resident_bytes(self) -> int:
        """Memory of a spare server."""
        return self._spare.resident_bytes() if self._spare else 0

    async def close(self) -> None:
        """End what was started and not used; no server of this cell runs any more."""
        if self._spare is not None:
            await self._spare.stop()
            self._spare = None
        await asyncio.to_thread(self._pages.let_go)
