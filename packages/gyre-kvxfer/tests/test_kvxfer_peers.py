"""Peers that speak another protocol, fall silent, do not read, or read on when the server closes; and transports that
cannot take a read back."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from gyre_kvxfer import HostPool, KVLayout, MigrationServer, MovePolicy, Transport, TransportError, lingering, migrate
from gyre_kvxfer.channel import connect
from gyre_kvxfer.messages import Open, encode
from gyre_kvxfer.pool import Session
from gyre_kvxfer.transports import base, bulk

KEY = b"peers"
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=16, block_size=16, num_blocks=64, dtype="float32")
PATIENT = MovePolicy(reply_s=1.0, give_up_s=60.0)


def filled(n: int = 100, layout: KVLayout = LAYOUT) -> HostPool:
    pool = HostPool(layout, 3)
    kv = np.random.default_rng(n).integers(0, 60, n * layout.token_nbytes, np.uint8)
    pool.append("s", np.arange(n, dtype=np.int32), kv)
    return pool


async def until(holds) -> None:
    async with asyncio.timeout(60.0):
        while not holds():
            await asyncio.sleep(0.01)


# -- other protocols --------------------------------------------------------------------------------------------------


async def test_an_offer_with_a_field_of_a_newer_layout_ends_the_move_with_its_words(monkeypatch):
    real = base.Access.dumps

    def newer(self):
        said = json.loads(real(self))
        said["layout"]["rotated"] = True
        return json.dumps(said)

    monkeypatch.setattr(base.Access, "dumps", newer)
    source, sink = filled(), HostPool(LAYOUT, 3)
    async with MigrationServer(source, key=KEY) as server:
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=PATIENT)
        assert (report.outcome, report.code) == ("failed", "layout")
        assert "rotated" in report.reason
        assert "Upgrade the older side" in report.reason
        await until(lambda: not source.sessions()["s"].frozen)
        assert {state for _, state in server.moves().values()} == {"aborted"}
        assert [x.machine.code for x in server._moves.values()] == ["aborted"], "told, not left to its lease"


async def test_a_source_of_another_protocol_ends_the_move_with_its_words(monkeypatch):
    real = encode

    def newer(message):
        return real(message).replace(b"[1,", b"[2,", 1)

    monkeypatch.setattr("gyre_kvxfer.server.encode", newer)
    async with MigrationServer(filled(), key=KEY) as server:
        report = await migrate("s", server.endpoint, HostPool(LAYOUT, 3), key=KEY, policy=PATIENT)
    assert (report.outcome, report.code) == ("failed", "protocol")
    assert "got protocol 2; expected protocol 1. Upgrade the older side" in report.reason


async def test_a_destination_of_another_protocol_is_told_so(monkeypatch):
    monkeypatch.setattr(sys.modules[migrate.__module__], "encode", lambda m: encode(m).replace(b"[1,", b"[2,", 1))
    async with MigrationServer(filled(), key=KEY) as server:
        report = await migrate("s", server.endpoint, HostPool(LAYOUT, 3), key=KEY, policy=PATIENT)
        assert server.moves() == {}
    assert (report.outcome, report.code) == ("failed", "protocol")
    assert "at the source" in report.reason
    assert "Upgrade the older side" in report.reason


# -- sessions of nothing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", ["", "fast"])
@pytest.mark.parametrize("freeze_below", [0, 1 << 20])
async def test_a_session_without_a_token_moves(digest, freeze_below):
    source, sink = HostPool(LAYOUT, 3), HostPool(LAYOUT, 3)
    source._sessions["s"] = Session(np.zeros(0, np.int32), np.zeros(0, np.int32))
    policy = replace(PATIENT, digest=digest, freeze_below=freeze_below)
    async with MigrationServer(source, key=KEY) as server:
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=policy)
        assert report.carried, report
        assert len(sink.sessions()["s"].tokens) == 0
        assert sink.free_blocks == 64
        assert not sink._reserved
        await until(lambda: "s" not in source.sessions())


# -- peers that hang --------------------------------------------------------------------------------------------------


async def test_a_silent_peer_keeps_no_connection(monkeypatch):
    monkeypatch.setattr("gyre_kvxfer.server.IDLE_S", 0.05)
    async with MigrationServer(filled(), key=KEY) as server:
        silent = [await connect(server.endpoint, KEY) for _ in range(3)]
        for channel in silent:
            with pytest.raises(TransportError, match="end of the stream"):
                async with asyncio.timeout(60):
                    await channel.recv()
            await channel.close()
        await until(lambda: not server._open)


async def test_a_peer_that_does_not_read_keeps_neither_its_connection_nor_the_session(tmp_path):
    """An offer larger than the socket's buffers: sending it would wait for as long as the peer stands still."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=1, block_size=512, num_blocks=2048, dtype="float16")
    source = filled(1 << 20, layout)
    async with MigrationServer(source, key=KEY, listen=f"unix://{tmp_path}/kv", lease_s=0.5) as server:
        channel = await connect(server.endpoint, KEY)
        await channel.send(encode(Open("a" * 32, 1, "s", "stopped", 1 << 30, "")))
        await until(server.moves)
        await until(lambda: not server._by_session and not server._open)
        assert not source.sessions()["s"].frozen
        assert not source._pins
        await channel.close()


async def test_closing_waits_for_whoever_reads_the_pool(monkeypatch):
    """The pool's memory may be freed after it, and the number of a closed socket be another file's."""
    reading, go_on, ended = threading.Event(), threading.Event(), []
    real = bulk.transfer

    def slow(name, fd, vecs, offset=None):
        if name == "writev":
            reading.set()
            go_on.wait(60)
            try:
                real(name, fd, vecs, offset)
            finally:
                ended.append(fd)
        else:
            real(name, fd, vecs, offset)

    monkeypatch.setattr(bulk, "transfer", slow)
    server = await MigrationServer(filled(), key=KEY).start()
    moving = asyncio.ensure_future(
        migrate("s", server.endpoint, HostPool(LAYOUT, 3), key=KEY, transport="tcp", policy=PATIENT)
    )
    await until(reading.is_set)
    thread = next(x for x in threading.enumerate() if "_serve_data" in x.name)
    closing = asyncio.ensure_future(server.close())
    await asyncio.wait([closing], timeout=1.0)
    assert not closing.done()
    assert all(x.sock.fileno() > 0 for x in server._open)
    go_on.set()
    await closing
    assert len(ended) == 1
    assert not thread.is_alive()
    assert not (await moving).carried


# -- transports that linger -------------------------------------------------------------------------------------------


class Lingers:
    """A transport whose read fails, and may write on until `over`."""

    name = "lingers"

    def __init__(self, *_: object) -> None:
        self.over = False

    def meta(self) -> str:
        return ""

    async def read(self, *_: object) -> None:
        raise TransportError("the source hangs")

    @property
    def still_writing(self) -> bool:
        return not self.over

    def stop(self) -> None:
        pass

    async def close(self) -> None:
        pass


class Offers(Lingers):
    def close(self) -> None:
        pass


@pytest.fixture
def kept() -> Iterator[None]:
    yield
    lingering._kept.clear()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("change", [{}, {"axes": "BHTD", "block_size": 8, "num_blocks": 128}])
async def test_blocks_that_a_transport_may_write_to_stay_reserved_until_it_has_ended(change):
    """Direct and staged: staging memory stays, too."""
    source, sink = filled(), HostPool(replace(LAYOUT, **change), 3)
    all_blocks, used = sink.free_blocks, sink.layout().blocks_for(100)
    reader = Lingers()
    extra = (Transport("lingers", Offers, lambda *_: reader),)

    async def move(into, **given):
        return await migrate("s", server.endpoint, into, key=KEY, policy=replace(PATIENT, digest="fast"), **given)

    async with MigrationServer(source, key=KEY, extra=extra) as server:
        report = await move(sink, extra=extra)
        assert (report.outcome, report.code) == ("failed", "transport")
        assert "stay reserved" in report.transports["cancel"]
        assert [bool(x.copier._staging) for x in lingering._kept] == [bool(change)]
        assert sink.free_blocks == all_blocks - used
        await until(lambda: not source.sessions()["s"].frozen)
        again = await move(sink)
        assert (again.outcome, again.code) == ("failed", "busy")
        assert sink.free_blocks == all_blocks - used
        reader.over = True
        report = await move(sink)
        assert report.carried
        assert sink.free_blocks == all_blocks - used
    assert (sink.read("s")[1] == filled().read("s")[1]).all()
