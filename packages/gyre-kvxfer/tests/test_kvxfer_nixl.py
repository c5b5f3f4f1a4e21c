"""NIXL: how a read ends that does not end by itself, with a stand-in; and whole moves through the real library.

The real one is in vLLM's environment (`tools/engine_env.py vllm`, or GYRE_VLLM_PYTHON), whose interpreter runs
`kvxfer_nixl.py`: it has no pytest.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_kvxfer import Region, TransportError
from gyre_kvxfer.plan import Runs
from gyre_kvxfer.transports import nixl

HERE = Path(__file__).parent


# -- a stand-in -------------------------------------------------------------------------------------------------------


class Inner:
    """What holds the transfers; they end with it."""


class Handle:
    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.released = False

    def release(self) -> None:
        self.released = True


class Library:
    """A transfer is in `state` for ever; one called `fails` raises when it is looked at."""

    def __init__(self, state: str) -> None:
        self.agent: Any = Inner()
        self.state, self.looks, self.bytes, self.removed = state, 0, [], 0

    def get_xfer_descs(self, table: np.ndarray, kind: str) -> np.ndarray:
        return table

    def initialize_xfer(self, op: str, mine: np.ndarray, theirs: np.ndarray, peer: str) -> Handle:
        assert (mine[:, 1] == theirs[:, 1]).all()
        self.bytes.append(int(mine[:, 1].sum()))
        return Handle(self.agent)

    def transfer(self, handle: Handle) -> str:
        return "PROC" if self.state == "fails" else self.state

    def check_xfer_state(self, handle: Handle) -> str:
        self.looks += 1
        if self.state == "fails":
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return self.state

    def remove_remote_agent(self, peer: str) -> None:
        self.removed += 1
        raise RuntimeError("NIXL_ERR_BACKEND")


def reader_of(state: str, device: str = "cpu", nbytes: int = 4096) -> tuple[nixl.NixlReader, Library, Any]:
    agent = nixl.Agent.__new__(nixl.Agent)
    agent.raw, agent._held = Library(state), []
    pool = [Region(1 << 20, nbytes, device)]
    reader = nixl.NixlReader(agent, "peer", {"kind": "DRAM", "device": 0}, pool, pool)
    piece = Runs(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([nbytes]))
    return reader, agent.raw, lambda: reader.read("m", piece, piece, pool)


async def test_a_read_that_hangs_ends_when_it_is_told_to_and_ends_its_agent():
    reader, library, read = reader_of("PROC")
    task = asyncio.ensure_future(read())
    async with asyncio.timeout(60):
        while not library.looks:
            await asyncio.sleep(0.001)
    assert not reader.still_writing
    reader.stop()
    async with asyncio.timeout(60):
        with pytest.raises(TransportError, match="a stop"):
            await task
    assert library.agent is None
    assert library.removed == 1
    assert not reader.still_writing
    await reader.close()
    assert library.removed == 1


@pytest.mark.parametrize(("state", "said"), [("PROC", "nothing for 0.05 s"), ("ERR", "ERR"), ("fails", "NOT_FOUND")])
async def test_a_read_that_ends_badly_ends_its_agent(state, said, monkeypatch):
    monkeypatch.setattr(nixl, "TIMEOUT_S", 0.05)
    reader, library, read = reader_of(state)
    async with asyncio.timeout(60):
        with pytest.raises(TransportError, match=said):
            await read()
    assert library.agent is None
    assert not reader.still_writing


async def test_a_read_whose_agent_lives_on_or_whose_memory_is_a_devices_may_write_on():
    reader, library, read = reader_of("ERR")
    held = library.agent
    with pytest.raises(TransportError):
        await read()
    assert reader.still_writing
    del held
    assert not reader.still_writing
    reader, library, read = reader_of("ERR", "cuda:1")
    with pytest.raises(TransportError):
        await read()
    assert library.agent is None
    assert reader.still_writing


async def test_a_read_is_cut_into_transfers_that_fit_their_time(monkeypatch):
    monkeypatch.setattr(nixl, "BATCH_BYTES", 1000)
    reader, library, read = reader_of("DONE")
    await read()
    assert library.bytes == [1000, 1000, 1000, 1000, 96]
    assert library.agent is not None
    assert not reader.still_writing
    await reader.close()


# -- the real one -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of the environment that has NIXL, built if need be."""
    if given := os.environ.get("GYRE_VLLM_PYTHON"):
        return given
    tool = HERE.parents[2] / "tools" / "engine_env.py"
    built = subprocess.run([sys.executable, str(tool), "vllm"], stdout=subprocess.PIPE, text=True, check=True)
    return built.stdout.splitlines()[-1]


HALTS = [f"halted {how} {step}" for how in ("stop", "kill") for step in ("reserve", "read", "later", "commit")]


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["whole", "unlike", "grows", "damaged", *HALTS, "cancelled", "lasting"])
def test_moves_through_the_real_library(case: str, vllm_python: str) -> None:
    """Over TCP: there the source itself must answer. Through shared memory a read of one that hangs may succeed."""
    env = os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "UCX_TLS": "tcp", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [vllm_python, str(HERE / "kvxfer_nixl.py"), *case.split()], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "as it must be" in done.stdout
