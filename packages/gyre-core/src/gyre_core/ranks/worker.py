"""The rank's end: receive a command, run it, answer.

Invariant: commands run one after the other in the main thread, in the order they came; a thread watches the socket, so
that a rank whose trainer is gone ends at once, even in the middle of a collective that will never return.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gyre_core.ranks.wire import WireError, describe, pack, receive


@dataclass(frozen=True, slots=True)
class RankSeat:
    """Which rank this is, and what the trainer told all of them."""

    rank: int
    world: int
    rendezvous: Path
    """A file of the store by which the ranks meet."""
    body: Mapping[str, Any]


Answer = tuple[Mapping[str, Any], bytes]


class RankBackend(Protocol):
    """What answers commands in a rank: `handle` gives JSON values and raw bytes."""

    def handle(self, op: str, args: Mapping[str, Any], payload: bytes) -> Answer:
        """Run one command. ValueError and GyreError travel as they are; others become InfrastructureErrors."""


def serve(make: Callable[[RankSeat], RankBackend], argv: list[str] | None = None) -> None:
    """Main of a rank process: `python -m module FD RANK WORLD`. Ends with the socket."""
    handle, rank, world = (int(word) for word in (sys.argv[1:] if argv is None else argv))
    link = socket.socket(fileno=handle)
    commands: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
    threading.Thread(target=_watch, args=(link, commands), daemon=True).start()
    backend: RankBackend | None = None
    while True:
        header, payload = commands.get()
        op, args = str(header.get("op")), header.get("args", {})
        doing = f"{op} in rank {rank}"
        try:
            if op == "hello":
                body = dict(args["body"])
                backend = make(RankSeat(rank, world, Path(body.pop("rendezvous")), body))
                values, data = {"pid": os.getpid()}, b""
            elif backend is None:
                raise ValueError(f"{doing}: got a command before hello")
            else:
                found, data = backend.handle(op, args, payload)
                values = dict(found)
            frame = pack({"id": header["id"], "ok": values}, data)
        except Exception as error:  # noqa: BLE001 - boundary: the trainer decides what a failed command means
            print(f"{doing}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
            _trace(error)
            frame = pack({"id": header["id"], "error": describe(error, doing)})
        link.sendall(frame)


def _trace(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error)


def _watch(link: socket.socket, commands: queue.Queue[tuple[dict[str, Any], bytes]]) -> None:
    try:
        while True:
            commands.put(receive(link))
    except (EOFError, OSError, WireError):
        os._exit(0)
