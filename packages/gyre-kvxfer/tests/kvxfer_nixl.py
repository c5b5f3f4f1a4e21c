"""Moves through the real NIXL, for `test_kvxfer_nixl.py`: `python kvxfer_nixl.py CASE ARGUMENT...` in an environment
that has it. Ends with 0 when all is as it must be; needs nothing but this package and NIXL.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import kvxfer_peer as peer
import numpy as np
from gyre_kvxfer import HostPool, KVLayout, MovePolicy, lingering, migrate
from gyre_kvxfer.copy import convert, stored_dtype
from gyre_kvxfer.transports import nixl

LAYOUT = KVLayout(layers=3, kv_heads=4, head_dim=16, block_size=16, num_blocks=64, dtype="float32", across="KL")
PATIENT = MovePolicy(reply_s=1.0, give_up_s=120.0)
HASTY = replace(PATIENT, give_up_s=4.0)
UNLIKE = [
    {"axes": "BHTKD", "across": "L"},
    {"axes": "KBTHD", "across": "L", "block_size": 5},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "axes": "BHTD", "block_size": 32},
    {"block_size": 8, "num_blocks": 200},
    {"block_pitch": 8192},
]


class EndedError(RuntimeError):
    """The source has ended."""


class Source:
    """`kvxfer_peer.py` with NIXL as its only transport."""

    def __init__(self, sessions: dict[str, int], layout: KVLayout = LAYOUT) -> None:
        config = {"layout": layout.to_dict(), "sessions": sessions, "transports": ["nixl"]}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(peer.__file__)), json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self.end)
        self.endpoint = self._line(lambda line: line.startswith("tcp://")).strip()

    def _line(self, wanted: Callable[[str], bool]) -> str:
        while not wanted(line := self.process.stdout.readline()):  # libraries print, too
            if not line:
                raise EndedError
        return line

    def ask(self, line: str) -> dict:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        return json.loads(self._line(lambda line: line.startswith("{")))

    def halt(self, how: str) -> None:
        """`stop`: it hangs. `kill`: it is gone."""
        os.kill(self.process.pid, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        if how == "kill":
            self.process.wait()
        else:  # the signal is on its way while another thread of it still answers
            while any(_state(task) != "T" for task in Path(f"/proc/{self.process.pid}/task").iterdir()):
                time.sleep(0.001)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


async def moved(source: Source, session: str, pool: HostPool, policy: MovePolicy = PATIENT):
    return await migrate(session, source.endpoint, pool, key=peer.KEY, transport="nixl", policy=policy)


def check(pool: HostPool, session: str, n: int) -> None:
    """The session's tokens and KV are here, converted where the pool has another dtype."""
    tokens, kv = pool.read(session)
    np.testing.assert_array_equal(tokens, peer.tokens_of(session, n))
    want, there, here = peer.kv_of(LAYOUT, session, 0, n), LAYOUT.dtype, pool.layout().dtype
    if there != here:
        want = convert(want.view(stored_dtype(there)), there, here).view(np.uint8)
    np.testing.assert_array_equal(kv, want)


def at_read(number: int, do: Callable[[], None]) -> None:
    """`do` when the transfer of this number (from 1) is about to begin."""
    real, count = nixl.NixlReader._run, [0]

    def run(self, *args):
        count[0] += 1
        if count[0] == number:
            do()
        return real(self, *args)

    nixl.NixlReader._run = run


async def whole() -> None:
    """With every digest; the source forgets what has left and keeps what has not."""
    names = {"": "a", "fast": "bb", "strong": "ccc"}
    source = Source(dict.fromkeys(names.values(), 300) | {"other": 50})
    for digest, session in names.items():
        pool = HostPool(replace(LAYOUT, num_blocks=40), 3)
        report = await moved(source, session, pool, replace(PATIENT, digest=digest, finite=True))
        assert report.carried, report
        assert (report.transport, report.tokens, report.bytes) == ("nixl", 300, 300 * LAYOUT.token_nbytes), report
        check(pool, session, 300)
        assert pool.free_blocks == 40 - 19
    after = source.ask("state")
    assert after["sessions"] == {"other": [50, False, 0]}, after
    assert after["free"] == 64 - 4
    source.end()


async def unlike() -> None:
    """Between pools of other forms: direct where runs are long, staged where not; transfers of few bytes and pieces."""
    cases = [(change, digest) for change in UNLIKE for digest in ("", "fast")]
    source = Source({"s" * (i + 1): 203 for i in range(len(cases))}, replace(LAYOUT, num_blocks=256))
    nixl.BATCH_BYTES = 100_000
    for i, (change, digest) in enumerate(cases):
        pool = HostPool(replace(LAYOUT, **change), 3)
        report = await moved(source, "s" * (i + 1), pool, replace(PATIENT, digest=digest))
        assert report.carried, (report, change, digest)
        check(pool, "s" * (i + 1), 203)
    source.end()


async def grows() -> None:
    """Tokens added between the rounds come too."""
    source = Source({"s": 500})
    at_read(1, lambda: source.ask("append s 77"))
    pool = HostPool(LAYOUT, 3)
    report = await moved(source, "s", pool, replace(PATIENT, freeze_below=0, digest="fast"))
    assert report.carried, report
    assert (report.tokens, report.rounds) == (577, 2), report
    check(pool, "s", 577)
    source.end()


async def damaged() -> None:
    """A byte that changed after it was digested is found, and nothing is entered."""
    source, pool = Source({"s": 200}), HostPool(LAYOUT, 3)
    real = nixl.NixlReader._read

    def read(self, theirs, ours, into):
        real(self, theirs, ours, into)
        pool.buffers[1][int(pool._reserved["s"][2]) * LAYOUT.strides["B"] + 40] ^= 1

    nixl.NixlReader._read = read
    report = await moved(source, "s", pool, replace(PATIENT, digest="fast"))
    assert report.code == "verification", report
    assert pool.free_blocks == 64
    source.end()


class Halts(HostPool):
    """A pool during whose first step of a name the source is halted."""

    def arm(self, **steps: Callable[[], None]) -> None:
        self.steps = steps

    def _comes(self, step: str) -> None:
        self.steps.pop(step, lambda: None)()

    async def reserve(self, *args):
        self._comes("reserve")
        return await super().reserve(*args)

    async def commit(self, *args):
        await super().commit(*args)
        self._comes("commit")


async def halted(how: str, step: str) -> None:
    """The move ends and says why, its blocks are free, nothing writes to them, and other moves go on."""
    source, other, pool = Source({"s": 407}), Source({"t": 300}), Halts(LAYOUT, 3)
    pool.arm(**{step: lambda: source.halt(how)})
    if step in ("read", "later"):
        at_read(1 if step == "read" else 2, lambda: source.halt(how))
    policy = replace(HASTY, freeze_below=0) if step == "later" else HASTY
    report = await moved(source, "s", pool, policy)
    assert not report.carried, report
    if step == "commit":
        assert report.outcome == "unknown", report
        assert pool.free_blocks == 64 - 26
    else:
        assert report.outcome == "failed", report
        assert report.code in ("silent", "transport", "lease"), report
        assert "cancel" not in report.transports, report
        assert pool.free_blocks == 64
        await untouched(source, pool, how)
    assert not lingering._kept
    report = await moved(other, "t", pool, PATIENT)
    assert report.carried, report
    check(pool, "t", 300)
    for one in (source, other):
        one.end()


async def untouched(source: Source, pool: HostPool, how: str) -> None:
    """A source that goes on writes to nothing here. (UCX may abort it: whom it has a read to answer is gone.)"""
    for buffer in pool.buffers:
        buffer[:] = 7
    if how == "stop":
        os.kill(source.process.pid, signal.SIGCONT)
        with contextlib.suppress(EndedError):
            source.ask("state")
        await asyncio.sleep(1.0)
    assert all((buffer == 7).all() for buffer in pool.buffers)


async def cancelled() -> None:
    """A move that hangs in a read ends when it is cancelled, long before it would be given up."""
    source, pool, hangs = Source({"s": 400}), HostPool(LAYOUT, 3), asyncio.Event()
    loop = asyncio.get_running_loop()

    def halt() -> None:
        source.halt("stop")
        loop.call_soon_threadsafe(hangs.set)

    at_read(1, halt)
    task = asyncio.ensure_future(moved(source, "s", pool, replace(PATIENT, give_up_s=10_000.0)))
    await hangs.wait()
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    else:
        raise AssertionError("a cancelled move returned")
    assert pool.free_blocks == 64
    assert not lingering._kept
    await untouched(source, pool, "stop")
    source.end()


async def lasting() -> None:
    """A source that hangs for longer than a transfer may take, and is not given up, ends the read all the same."""
    source, pool = Source({"s": 400}), HostPool(LAYOUT, 3)
    nixl.TIMEOUT_S = 1.0
    at_read(1, lambda: source.halt("stop"))
    report = await moved(source, "s", pool, replace(PATIENT, give_up_s=10_000.0))
    assert (report.outcome, report.code) == ("failed", "transport"), report
    assert "nothing for 1 s" in report.reason
    assert pool.free_blocks == 64
    source.end()


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
    print("as it must be", flush=True)
