"""Listening for peers of this machine and of others: sockets, threads, the challenge, and an end to all of it.

What a `Receiver` of gradients and a `Holder` of versions have in common. Invariants: each peer has a thread of its own,
so that one who is slow or hangs holds up nobody; nobody is served who does not know the token; after `close` no peer is
served any more and no thread is left. It is bound to one address, the one that its endpoint tells. Not here: what is
said to a peer.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from gyre_weights.addresses import bound
from gyre_weights.errors import WeightsError
from gyre_weights.handover.wire import Channel, Endpoint, challenge

log = logging.getLogger("gyre.weights")

Serve = Callable[[Channel, Mapping[str, Any]], None]
"""Talks with a peer that has proved itself; the mapping is his first message."""
_BREATH_S = 0.1
"""Pause when no connection could be taken (no descriptor left, say), so that trying again costs nothing."""


class Listener:
    """Serves peers from `start` to `close`. `doing` is what errors say before a peer has said what he wants."""

    def __init__(self, serve: Serve, doing: str, *, host: str, idle_s: float, total_s: float) -> None:
        self._serve_peer, self._doing, self._host = serve, doing, host
        self._idle, self._total = idle_s, total_s
        self._lock = threading.Lock()
        self._open: set[Channel] = set()
        self._threads: list[threading.Thread] = []
        self._listeners: list[socket.socket] = []
        self._endpoint: Endpoint | None = None
        self._closed = False

    @property
    def peers(self) -> int:
        """Connections open now."""
        with self._lock:
            return len(self._open)

    def start(self) -> Endpoint:
        """Listen; where. PeerError when the host is no address of this machine."""
        if self._endpoint is not None:
            return self._endpoint
        local, token = f"gyre-handover-{secrets.token_hex(12)}", secrets.token_hex(16)
        there = bound(self._host, 0, self._doing)
        here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        here.bind("\0" + local)
        self._endpoint = endpoint = Endpoint(self._host, int(there.getsockname()[1]), local, token)
        for listener in (here, there):
            listener.listen(64)
            self._listeners.append(listener)
            self._run(partial(self._accept, listener, token))
        return endpoint

    def close(self) -> None:
        """Stop listening and end what is open. Waits for its threads."""
        with self._lock:
            self._closed = True
            channels, threads = list(self._open), list(self._threads)
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for channel in channels:
            with suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(timeout=self._idle)

    def _run(self, work: Callable[[], None], channel: Channel | None = None) -> None:
        """A thread for `work`, which is about `channel`; after `close` none, and the channel ends."""
        thread = threading.Thread(target=work, daemon=True, name="gyre-handover")
        with self._lock:
            if self._closed:
                if channel is not None:
                    channel.close()
                return
            if channel is not None:
                self._open.add(channel)
            thread.start()
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def _accept(self, listener: socket.socket, token: str) -> None:
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("%s: no connection could be taken (%s)", self._doing, error)
                    time.sleep(_BREATH_S)
                continue
            channel = Channel(sock, self._doing, idle_s=self._idle, total_s=self._total)
            self._run(partial(self._serve, channel, token), channel)

    def _serve(self, channel: Channel, token: str) -> None:
        try:
            self._serve_peer(channel, challenge(channel, token))
        except WeightsError as error:
            log.info("%s", error)
        except (OSError, KeyError, ValueError, TypeError) as error:
            log.warning("a peer was dropped: %s: %s", type(error).__name__, error)
        finally:
            channel.close()
            with self._lock:
                self._open.discard(channel)
