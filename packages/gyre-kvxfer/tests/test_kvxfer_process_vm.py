"""Large reads are shared by threads: every piece arrives, and none is written after the read has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from gyre_kvxfer import Region
from gyre_kvxfer.errors import TransportError
from gyre_kvxfer.plan import Runs
from gyre_kvxfer.transports import process_vm
from gyre_kvxfer.transports.process_vm import ProcessVmExporter, ProcessVmReader

PIECE, PIECES = 4096, 96


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[np.ndarray, np.ndarray, Runs, Runs, ProcessVmReader]]:
    """Source, destination, scattered runs of both, and a reader of this very process; sharing begins at one piece."""
    monkeypatch.setattr(process_vm, "INLINE_BYTES", PIECE)
    monkeypatch.setattr(process_vm, "SHARED_BYTES", PIECE)
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, PIECE * PIECES, np.uint8)
    into = np.zeros_like(source)
    places = [rng.permutation(PIECES).astype(np.int64) * PIECE for _ in range(2)]
    sizes, region = np.full(PIECES, PIECE, np.int64), np.zeros(PIECES, np.int64)
    remote, local = (Runs(region, at, sizes) for at in places)
    exporter = ProcessVmExporter()
    reader = ProcessVmReader.probe(exporter.meta(), [Region(source.ctypes.data, source.nbytes)])
    yield source, into, remote, local, reader
    exporter.close()


async def test_every_piece_arrives_where_it_belongs(memory) -> None:
    source, into, remote, local, reader = memory
    await reader.read("", remote, local, [Region(into.ctypes.data, into.nbytes)])
    assert (
        into.reshape(PIECES, PIECE)[local.offset // PIECE] == source.reshape(PIECES, PIECE)[remote.offset // PIECE]
    ).all()


async def test_a_read_that_fails_in_one_thread_waits_for_the_others(memory, monkeypatch: pytest.MonkeyPatch) -> None:
    _, into, remote, local, reader = memory
    ended: list[float] = []
    real = process_vm.readv

    def readv(pid: int, ours: np.ndarray, theirs: np.ndarray) -> int:
        if len(theirs) > 1 and int(theirs["base"][0]) == first:
            raise TransportError("this part cannot be read")
        if len(theirs) > 1:
            time.sleep(0.2)
            ended.append(time.monotonic())
        return real(pid, ours, theirs)

    first = int(memory[0].ctypes.data) + int(remote.offset[0])
    monkeypatch.setattr(process_vm, "readv", readv)
    with pytest.raises(TransportError, match="this part"):
        await reader.read("", remote, local, [Region(into.ctypes.data, into.nbytes)])
    assert len(ended) == 1
    assert ended[0] <= time.monotonic()
    assert reader._pid == os.getpid()
