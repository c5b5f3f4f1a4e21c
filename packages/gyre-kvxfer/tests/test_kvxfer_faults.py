"""What goes wrong: dead sides, wrong tokens and versions, damaged blocks, replays, released sources, NaN.

Never a wrong token, never two owners, never a lost session: each test ends by asking both sides who owns what.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
from gyre_kvxfer import HostPool, KVLayout, MigrationServer, MovePolicy, MoveRefused, Pinned, StateSpec, migrate
from gyre_kvxfer import destination as d
from gyre_kvxfer.channel import connect
from gyre_kvxfer.errors import TransportError
from gyre_kvxfer.messages import Commit, Freeze, Offer, Open, Refused, Released, decode, encode
from gyre_kvxfer.naming import TokenDigest
from gyre_kvxfer.plan import Runs
from gyre_kvxfer.transports.bulk import BulkReader
from gyre_kvxfer.transports.process_vm import ProcessVmExporter, ProcessVmReader

KEY = b"faults"
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=16, block_size=16, num_blocks=64, dtype="float32")
PATIENT = MovePolicy(reply_s=1.0, give_up_s=60.0)
"""Where somebody answers, however slowly."""
HASTY = replace(PATIENT, give_up_s=4.0)
"""Where nobody will answer: how long that takes to be believed."""
LEASE_S = 10.0


class Clock:
    """The sources' time: it stands until it is moved on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def pass_lease(self) -> None:
        self.now += LEASE_S + 1.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("gyre_kvxfer.server.time", made)
    return made


def filled(n: int = 100, version: int = 3) -> HostPool:
    pool = HostPool(LAYOUT, version)
    kv = np.random.default_rng(n).standard_normal(n * LAYOUT.token_nbytes // 4).astype(np.float32)
    pool.append("s", np.arange(n, dtype=np.int32), kv.view(np.uint8))
    return pool


def mine(pool: HostPool) -> bool:
    """Whether the session lives in this pool and may go on."""
    return "s" in pool.sessions() and not pool.sessions()["s"].frozen


async def until(holds) -> None:
    async with asyncio.timeout(60.0):
        while not holds():
            await asyncio.sleep(0.01)


async def settled(pool: HostPool) -> None:
    """Wait until nothing is pinned here."""
    await until(lambda: not pool._pins and all(not s.frozen for s in pool.sessions().values()))


async def check_stays(source: HostPool, sink: HostPool, free: int, report) -> None:
    """The move failed: the source owns a working session, the sink holds nothing."""
    assert not report.carried
    await settled(source)
    assert mine(source)
    assert "s" not in sink.sessions()
    assert sink.free_blocks == free
    assert not source._pins
    source.append("s", np.arange(3, dtype=np.int32), np.zeros(3 * LAYOUT.token_nbytes, np.uint8))


# -- an engine that misbehaves ----------------------------------------------------------------------------------------


class WrongTokens(HostPool):
    """Names other tokens once frozen than it named before."""

    async def freeze(self, session):
        p = await super().freeze(session)
        return Pinned(p.version, p.token_ids + 1, p.block_ids, p.generation)


class WrongVersion(HostPool):
    """Has new weights between pin and freeze."""

    async def freeze(self, session):
        p = await super().freeze(session)
        return Pinned(p.version + 1, p.token_ids, p.block_ids, p.generation)


class Shrinks(HostPool):
    """Loses tokens between pin and freeze."""

    async def freeze(self, session):
        p = await super().freeze(session)
        return Pinned(p.version, p.token_ids[:-20], p.block_ids, p.generation)


class CannotFreeze(HostPool):
    """Fails to stop."""

    async def freeze(self, session):
        raise RuntimeError("the engine is on fire")


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        (WrongTokens, "tokens", "not those it offered before"),
        (WrongVersion, "version", "changed from version 3 to 4 during the move"),
        (Shrinks, "stale", "tokens 96..80"),
        (CannotFreeze, "engine", "on fire"),
    ],
)
async def test_a_source_that_contradicts_itself(kind, code, said):
    source = filled()
    source.__class__ = kind
    sink = HostPool(LAYOUT, 3)
    async with MigrationServer(source, key=KEY) as server:
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=replace(PATIENT, freeze_below=0))
        assert report.code == code, report
        assert said in report.reason
        await check_stays(source, sink, 64, report)


@pytest.mark.parametrize("digest", ["fast", "strong"])
@pytest.mark.parametrize("transport", ["process_vm", "tcp", "shm"])
async def test_a_damaged_block_is_found(digest, transport):
    source, sink = filled(), HostPool(LAYOUT, 3)

    class Late(HostPool):
        async def reserve(self, session, n, version):
            block = int(source.sessions()["s"].blocks[2])
            source.buffers[1][block * LAYOUT.strides["B"] + 40] ^= 1
            return await super().reserve(session, n, version)

    sink.__class__ = Late
    async with MigrationServer(source, key=KEY) as server:
        policy = replace(PATIENT, digest=digest)
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=policy, transport=transport)
        assert report.code == "verification", report
        assert "[2]" in report.reason
        await check_stays(source, sink, 64, report)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("change", [{}, {"dtype": "bfloat16", "axes": "BHTD"}])
async def test_values_that_are_no_numbers_are_refused(value, change):
    source, sink = filled(), HostPool(replace(LAYOUT, **change), 3)
    block = int(source.sessions()["s"].blocks[4])
    source.buffers[2].view(np.float32)[block * LAYOUT.strides["B"] // 4 + 7] = value
    async with MigrationServer(source, key=KEY) as server:
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=replace(PATIENT, finite=True))
        assert report.code == "verification", report
        assert "NaN" in report.reason
        await check_stays(source, sink, 64, report)


async def test_a_sink_that_fails_at_each_step():
    for step, code in (("reserve", "engine"), ("commit", "engine"), ("regions", "engine")):
        source, sink = filled(), HostPool(LAYOUT, 3)

        async def fail(*args):
            raise RuntimeError("no")

        def fail_now(*args):
            raise RuntimeError("no")

        setattr(sink, step, fail_now if step == "regions" else fail)
        async with MigrationServer(source, key=KEY) as server:
            report = await migrate("s", server.endpoint, sink, key=KEY, policy=PATIENT)
            assert report.code == code, (step, report)
            await check_stays(source, sink, 64, report)


# -- replays ----------------------------------------------------------------------------------------------------------


async def ask(channel, message):
    await channel.send(encode(message))
    async with asyncio.timeout(60):
        return decode(await channel.recv())


def opening(move: str, session: str = "s", limit: int = 1 << 30) -> Open:
    return Open(move, 1, session, "hand", limit, "")


async def test_messages_sent_twice_are_answered_alike_and_do_nothing_twice():
    source = filled()
    async with MigrationServer(source, key=KEY) as server:
        channel = await connect(server.endpoint, KEY)
        first = await ask(channel, opening("a" * 32))
        again = await ask(channel, opening("a" * 32))
        assert isinstance(first, Offer)
        assert first == again
        claim = Commit("a" * 32, 2, first.generation, first.token_digest)
        assert isinstance(await ask(channel, claim), Released)
        assert isinstance(await ask(channel, claim), Released)
        assert not mine(source)
        await channel.close()


async def test_a_manifest_of_an_older_move_gives_nothing(clock):
    source = filled()
    async with MigrationServer(source, key=KEY, lease_s=LEASE_S) as server:
        channel = await connect(server.endpoint, KEY)
        old = await ask(channel, opening("a" * 32))
        assert not mine(source)
        clock.pass_lease()
        await settled(source)
        assert mine(source)  # the lease ran out: the session was taken back
        late = await ask(channel, Commit("a" * 32, 2, old.generation, old.token_digest))
        assert isinstance(late, Refused)
        assert late.code == "lease"
        fresh = await ask(channel, opening("b" * 32))
        replayed = await ask(channel, Commit("b" * 32, 2, old.generation, old.token_digest))
        assert isinstance(fresh, Offer)
        assert isinstance(replayed, Refused)
        assert replayed.code == "tokens"
        assert isinstance(await ask(channel, Commit("c" * 32, 2, 1, "")), Refused)
        await settled(source)
        assert mine(source)
        await channel.close()


async def test_frames_recorded_on_one_connection_are_worth_nothing_on_another():
    async with MigrationServer(filled(), key=KEY) as server:
        one, two = await connect(server.endpoint, KEY), await connect(server.endpoint, KEY)
        frame = encode(opening("a" * 32))
        tag = one._out.tag(frame)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(two.sock, len(frame).to_bytes(4, "little") + frame + tag)
        assert await loop.sock_recv(two.sock, 1) == b""
        assert server.moves() == {}
        await one.close()
        await two.close()


async def test_requests_out_of_order_end_the_move_and_free_the_session():
    source = filled()
    async with MigrationServer(source, key=KEY) as server:
        channel = await connect(server.endpoint, KEY)
        assert isinstance(await ask(channel, opening("a" * 32)), Offer)
        answer = await ask(channel, Freeze("a" * 32, 2, 0))
        assert isinstance(answer, Refused)
        assert answer.code == "order"
        assert mine(source)
        await channel.close()


async def test_a_second_destination_is_told_to_wait_and_the_same_one_takes_over():
    source = filled()
    async with MigrationServer(source, key=KEY) as server:
        channel = await connect(server.endpoint, KEY)
        assert isinstance(await ask(channel, opening("a" * 32)), Offer)
        other = await ask(channel, Open("b" * 32, 1, "s", "somebody else", 0, ""))
        assert isinstance(other, Refused)
        assert other.code == "busy"
        told = await ask(channel, opening("c" * 32))
        assert isinstance(told, Refused)
        assert (told.move, told.code) == ("a" * 32, "superseded")
        assert isinstance(decode(await channel.recv()), Offer)
        assert server.moves()["a" * 32] == ("s", "aborted")
        await channel.close()


async def test_a_slow_freeze_of_a_move_that_ended_does_not_touch_the_next_move(clock):
    source, slow = filled(), asyncio.Event()

    class Slow(HostPool):
        async def freeze(self, session):
            await slow.wait()
            return await super().freeze(session)

    source.__class__ = Slow
    async with MigrationServer(source, key=KEY, lease_s=LEASE_S) as server:
        channel = await connect(server.endpoint, KEY)
        await channel.send(encode(opening("a" * 32)))
        await until(lambda: server.moves().get("a" * 32) == ("s", "freezing"))
        clock.pass_lease()
        await until(lambda: server.moves()["a" * 32] == ("s", "aborted"))
        early = await ask(channel, opening("b" * 32))
        assert isinstance(early, Refused)
        assert early.code == "busy"
        slow.set()
        await settled(source)
        assert mine(source)
        offer = await ask(channel, opening("c" * 32))
        assert isinstance(offer, Offer)
        assert not mine(source)
        assert isinstance(await ask(channel, Commit("c" * 32, 2, offer.generation, offer.token_digest)), Released)
        assert not mine(source)
        await channel.close()


async def test_a_source_that_cannot_describe_its_pool_refuses():
    source, sink = filled(), HostPool(LAYOUT, 3)
    real = source.layout
    calls = iter([True, True, False])

    def layout():
        if next(calls, False):
            return real()
        raise RuntimeError("asleep")

    source.layout = layout
    async with MigrationServer(source, key=KEY) as server:
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=PATIENT)
        source.layout = real
        assert report.code == "engine", report
        assert "asleep" in report.reason
        await check_stays(source, sink, 64, report)


async def test_a_source_without_a_pool_refuses_and_serves_again_later():
    source, sink = filled(), HostPool(LAYOUT, 3)

    def asleep():
        raise RuntimeError("asleep")

    source.regions = asleep
    async with MigrationServer(source, key=KEY) as server:
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=PATIENT)
        assert report.code == "engine", report
        assert "asleep" in report.reason
        await check_stays(source, sink, 64, report)
        del source.regions
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=PATIENT)
        assert report.carried


async def test_another_version_is_refused_before_decoding_stops():
    source, sink, frozen = filled(version=3), HostPool(LAYOUT, 4), []

    class Watched(HostPool):
        async def freeze(self, session):
            frozen.append(session)
            return await super().freeze(session)

    source.__class__ = Watched
    async with MigrationServer(source, key=KEY) as server:
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=replace(PATIENT, version=4))
        assert report.code == "version", report
        assert frozen == []
        await check_stays(source, sink, 64, report)
        report = await migrate("s", server.endpoint, HostPool(LAYOUT, 3), key=KEY, policy=replace(PATIENT, version=3))
        assert report.carried


async def test_reads_after_release_are_refused():
    source = filled()
    async with MigrationServer(source, key=KEY) as server:
        channel = await connect(server.endpoint, KEY)
        await ask(channel, opening("a" * 32))
        reader = await asyncio.to_thread(BulkReader.open, "tcp", server.endpoint, KEY, source.regions(), 60.0)
        out = np.zeros(64, np.uint8)
        region = replace(source.regions()[0], addr=out.ctypes.data, nbytes=64)
        runs = Runs(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([64]))
        await reader.read("a" * 32, runs, runs, [region])
        far = Runs(np.zeros(1, np.int64), np.array([LAYOUT.region_nbytes - 8]), np.array([64]))
        with pytest.raises(TransportError):
            await reader.read("a" * 32, far, runs, [region])
        out[:] = 7
        with pytest.raises(TransportError, match="lease"):
            await reader.read("f" * 32, runs, runs, [region])
        assert (out == 7).all()  # refused before any byte was sent
        await server.fence("hand")
        with pytest.raises(TransportError, match="lease"):
            await reader.read("a" * 32, runs, runs, [region])
        await reader.close()
        await channel.close()


# -- death ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["reserve", "commit"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_source_dies_before_it_gave_the_session_up(source, peer, step, how):
    there = source(LAYOUT, {"s": 100})

    class Kills(HostPool):
        async def _kill(self):
            os.kill(there.process.pid, how)
            if how == signal.SIGKILL:
                there.process.wait()

        async def reserve(self, *args):
            if step == "reserve":
                await self._kill()
            return await super().reserve(*args)

        async def commit(self, *args):
            if step == "commit":
                await self._kill()
            await super().commit(*args)

    sink = Kills(LAYOUT, 3)
    report = await migrate("s", there.endpoint, sink, key=peer.KEY, policy=HASTY, transport="tcp")
    if how == signal.SIGSTOP:
        os.kill(there.process.pid, signal.SIGKILL)
    assert not report.carried
    assert report.outcome == ("unknown" if step == "commit" else "failed"), report


async def test_the_source_dies_while_claimed_and_is_fenced(source, peer):
    there = source(LAYOUT, {"s": 100})
    fenced = asyncio.Event()

    class Kills(HostPool):
        async def commit(self, *args):
            await super().commit(*args)
            there.process.kill()
            there.process.wait()
            asyncio.get_running_loop().call_later(0.2, fenced.set)

    sink = Kills(LAYOUT, 3)
    report = await migrate("s", there.endpoint, sink, key=peer.KEY, policy=PATIENT, fenced=fenced)
    assert report.carried, report
    assert mine(sink)


DYING = """
import asyncio, os, signal, sys
from gyre_kvxfer import HostPool, KVLayout, MovePolicy, migrate
from gyre_kvxfer.transports.process_vm import ProcessVmReader
import json

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

async def die_soon(self, *args):
    die()

async def enter_and_die(self, *args):
    await enter(self, *args)
    die()

enter = HostPool.commit
layout, endpoint, step = KVLayout.from_dict(json.loads(sys.argv[1])), sys.argv[2], sys.argv[3]
if step == "reserve":
    HostPool.reserve = die_soon
elif step == "read":
    ProcessVmReader.read = die_soon
elif step == "enter":
    HostPool.commit = die_soon
else:
    HostPool.commit = enter_and_die
policy = MovePolicy(freeze_below=int(sys.argv[4]))
asyncio.run(migrate("s", endpoint, HostPool(layout, 3), key=b"faults", policy=policy))
"""


async def kill_destination(step: str, freeze_below: int, clock: Clock, all_dead: asyncio.Barrier) -> None:
    """A destination that kills itself at a step: the lease ends, the source goes on, and a second move succeeds."""
    source = filled()
    async with MigrationServer(source, key=KEY, lease_s=LEASE_S) as server:
        arguments = (json.dumps(LAYOUT.to_dict()), server.endpoint, step, str(freeze_below))
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", DYING, *arguments)
        assert await child.wait() == -signal.SIGKILL, (step, freeze_below)
        assert source._pins
        await all_dead.wait()
        clock.pass_lease()
        await settled(source)
        assert mine(source)
        assert source.free_blocks == 64 - 7
        sink = HostPool(LAYOUT, 3)
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=PATIENT)
        assert report.carried, (step, freeze_below, report)
        assert mine(sink)


@pytest.mark.parametrize("freeze_below", [0, 1 << 30])
async def test_the_destination_is_killed_at_each_step_and_the_lease_brings_the_session_back(freeze_below, clock):
    steps = ("reserve", "read", "enter", "entered")
    all_dead = asyncio.Barrier(len(steps))
    await asyncio.gather(*(kill_destination(step, freeze_below, clock, all_dead) for step in steps))


async def test_the_destination_dies_after_it_was_given_the_session():
    source = filled()
    async with MigrationServer(source, key=KEY) as server:
        channel = await connect(server.endpoint, KEY)
        offer = await ask(channel, opening("a" * 32))
        await ask(channel, Commit("a" * 32, 2, offer.generation, offer.token_digest))
        assert not mine(source)
        await channel.close()
        assert await server.fence("hand") == ["s"]
        assert mine(source)
        assert source.free_blocks == 64 - 7


async def test_a_silent_destination_that_was_given_the_session_keeps_it(clock):
    source = filled()
    async with MigrationServer(source, key=KEY, lease_s=LEASE_S) as server:
        channel = await connect(server.endpoint, KEY)
        offer = await ask(channel, opening("a" * 32))
        await ask(channel, Commit("a" * 32, 2, offer.generation, offer.token_digest))
        clock.pass_lease()
        await until(lambda: server.moves()["a" * 32] == ("s", "moved"))
        assert "s" not in source.sessions()
        assert source.free_blocks == 64
        assert isinstance(await ask(channel, Commit("a" * 32, 2, offer.generation, offer.token_digest)), Released)
        await channel.close()


async def test_cancelling_a_move_ends_it_cleanly():
    source, sink = filled(), HostPool(LAYOUT, 3)
    async with MigrationServer(source, key=KEY) as server:
        asked, slow = asyncio.Event(), asyncio.Event()

        async def wait(*args):
            asked.set()
            await slow.wait()
            return await HostPool.reserve(sink, *args)

        sink.reserve = wait
        task = asyncio.ensure_future(migrate("s", server.endpoint, sink, key=KEY, policy=PATIENT))
        await asked.wait()
        task.cancel()
        await asyncio.sleep(0)
        slow.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(source)
        assert mine(source)
        assert sink.free_blocks == 64


async def test_a_source_that_closes_keeps_its_sessions():
    source = filled()
    server = await MigrationServer(source, key=KEY).start()
    channel = await connect(server.endpoint, KEY)
    assert isinstance(await ask(channel, opening("a" * 32)), Offer)
    await server.close()
    assert mine(source)
    await channel.close()


def test_an_old_or_foreign_answer_moves_nothing():
    machine = d.DestinationMachine("a" * 32, "s", "x", LAYOUT, PATIENT)
    machine.handle(d.Begin(0.0))
    assert machine.handle(d.Received(Released("a" * 32, 1), 0.1)) == []
    assert machine.state == "opening"
    foreign = Offer("a" * 32, 1, "other", 1, 3, False, 0, 0, 16, "", LAYOUT.fingerprint(), 1000)
    actions = machine.handle(d.Received(foreign, 0.1))
    assert machine.state == "failed"
    assert any(isinstance(a, d.DoCancel) for a in actions)


def offered() -> tuple[d.DestinationMachine, Offer]:
    """A machine that copies two blocks, under a lease of one second from 0.0 on."""
    tokens = np.arange(32, dtype=np.int32)
    digest = TokenDigest(LAYOUT.fingerprint(), 3).update(tokens).hex()
    offer = Offer("a" * 32, 1, "s", 1, 3, False, 0, 32, 16, digest, LAYOUT.fingerprint(), 1000, "", tokens, tokens[:2])
    machine = d.DestinationMachine("a" * 32, "s", "x", LAYOUT, replace(PATIENT, freeze_below=0))
    machine.handle(d.Begin(0.0))
    machine.handle(d.Received(offer, 0.1))
    machine.handle(d.Reserved(tokens[:2], 0.2))
    assert machine.state == "copying"
    return machine, offer


def test_an_offer_that_comes_again_answers_no_later_request():
    """Its lease began with the request it answered: a replay must not prolong what may be read."""
    machine, offer = offered()
    machine.handle(d.Copied(0.3))
    assert machine.state == "freezing"
    assert machine.handle(d.Received(offer, 0.4)) == []
    assert machine.state == "freezing"
    assert machine._lease_from == 0.0


@pytest.mark.parametrize(("at", "code"), [(0.99, []), (1.0, ["lease"])])
def test_a_copy_that_ends_after_the_lease_counts_for_nothing(at, code):
    """The source may have given the blocks to others since: what was read can be anything."""
    machine, _ = offered()
    assert [a.code for a in machine.handle(d.Copied(at)) if isinstance(a, d.Finished)] == code


def test_a_manifest_whose_digest_names_other_tokens_is_refused():
    tokens = np.arange(20, dtype=np.int32)
    digest = TokenDigest(LAYOUT.fingerprint(), 3).update(tokens).hex()

    def offer(**change):
        good = Offer(
            "a" * 32, 1, "s", 1, 3, True, 0, 20, 16, digest, LAYOUT.fingerprint(), 1000, "", tokens, tokens[:2]
        )
        return replace(good, **change)

    wrong = tokens + 1
    for change, code in (
        ({}, ""),
        ({"token_ids": wrong}, "tokens"),
        ({"version": 4}, "tokens"),
        ({"fingerprint": "0" * 16}, "layout"),
        ({"block_ids": tokens[:1]}, "tokens"),
        ({"n_tokens": 21}, "stale"),
        ({"block_size": 0}, "layout"),
    ):
        machine = d.DestinationMachine("a" * 32, "s", "x", LAYOUT, PATIENT)
        machine.handle(d.Begin(0.0))
        actions = machine.handle(d.Received(offer(**change), 0.1))
        assert [a.code for a in actions if isinstance(a, d.Finished)] == ([code] if code else []), change


def test_another_process_under_the_sources_number_is_not_read():
    exporter = ProcessVmExporter()
    meta = json.loads(exporter.meta())
    assert ProcessVmReader.probe(json.dumps(meta), []).name == "process_vm"
    for change in ({"cookie": "00" * 16}, {"boot": "elsewhere"}, {"addr": 1}):
        with pytest.raises(TransportError):
            ProcessVmReader.probe(json.dumps(meta | change), [])


async def test_a_session_with_recurrent_state_is_not_moved_without_it():
    hybrid = replace(LAYOUT, states=(StateSpec("ssm", 2, 64),))
    source, sink = filled(), HostPool(hybrid, 3)
    source._layout = hybrid
    async with MigrationServer(source, key=KEY) as server:
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=PATIENT)
        assert report.code == "layout"
        assert "recurrent" in report.reason
        await check_stays(source, sink, 64, report)


async def test_refusals_carry_the_engines_code():
    class Full(HostPool):
        async def pin(self, session):
            raise MoveRefused("busy", "it is being trained on")

    source, sink = filled(), HostPool(LAYOUT, 3)
    source.__class__ = Full
    async with MigrationServer(source, key=KEY) as server:
        report = await migrate("s", server.endpoint, sink, key=KEY, policy=PATIENT)
        assert (report.code, report.reason) == ("busy", "it is being trained on")
