"""The proxy as processes of their own: one worker, or several behind neighbouring ports.

A backend is named as `package.module:factory`; the factory takes no arguments and returns a `Backend`. Each worker
loads its own. Worker i listens on port + i; executions are spread by name (see `gyre_tito.shard`).
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import cast

import msgspec

from gyre_tito.backend import Backend
from gyre_tito.chat_format import HistoryMode
from gyre_tito.dispatch import Limits
from gyre_tito.families import load_format
from gyre_tito.server import ProxyServer
from gyre_tito.service import TitoService
from gyre_tito.shard import Shard
from gyre_tito.store import Store


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Everything a worker needs to know."""

    backend: str
    store: str
    model_dir: str
    admin_token: str
    family: str | None = None
    history: str = "exact"
    model: str = "policy"
    host: str = "127.0.0.1"
    port: int = 8600
    workers: int = 1
    context_limit: int | None = None
    max_in_flight: int = 1024
    durability: str = "power"


def load_backend(name: str) -> Backend:
    """The backend that `package.module:factory` makes. Error: ValueError that says which part is wrong."""
    module, found, attribute = name.partition(":")
    if not found:
        raise ValueError(f"loading backend {name!r}: expected package.module:factory")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"loading backend {name!r}: {error}") from error
    return cast("Callable[[], Backend]", factory)()


async def run_worker(options: ServeOptions, index: int) -> None:
    """Serve until SIGTERM or SIGINT; running calls are then cut and recorded."""
    sys.setswitchinterval(0.0005)  # this process is ours: the writer's thread should not wait for the loop's
    urls = [f"http://{options.host}:{options.port + number}" for number in range(options.workers)]
    with Store.open(options.store, writable=True, durability=options.durability) as store:
        chat = load_format(options.model_dir, family=options.family, history=cast("HistoryMode", options.history))
        service = TitoService(
            load_backend(options.backend),
            store,
            chat,
            model=options.model,
            limits=Limits(context_limit=options.context_limit, max_in_flight=options.max_in_flight),
            shard=Shard(index, urls) if options.workers > 1 else None,
        )
        server = ProxyServer(service, host=options.host, port=options.port + index, admin_token=options.admin_token)
        await server.start()
        sys.stdout.write(f"gyre-tito: worker {index} at {server.base_url}\n")
        sys.stdout.flush()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, stop.set)
        await stop.wait()
        await server.stop()


def serve(options: ServeOptions) -> int:
    """Run all workers; returns when they have ended. A worker that dies is started again."""
    if options.workers == 1:
        asyncio.run(run_worker(options, 0))
        return 0
    stopping: list[int] = []
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda number, _: stopping.append(number))
    children = [_start(options, index) for index in range(options.workers)]
    while not stopping:
        for index, child in enumerate(children):
            try:
                child.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            if stopping:
                break
            sys.stderr.write(f"gyre-tito: worker {index} ended with {child.returncode}; starting it again\n")
            children[index] = _start(options, index)
    for child in children:
        child.terminate()
    for child in children:
        child.wait()
    return 0


def _start(options: ServeOptions, index: int) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-m", "gyre_tito.serve", str(index)], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(asdict(options)))  # not as an argument: others could read the token there
    child.stdin.close()
    return child


if __name__ == "__main__":
    asyncio.run(run_worker(ServeOptions(**msgspec.json.decode(sys.stdin.buffer.read())), int(sys.argv[1])))
