"""Processes of a run: typed messages, links, deaths. Real processes and real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from gyre_core import (
    CellId,
    CellLostError,
    ComponentContext,
    ContextLengthError,
    ExecutionEnd,
    ExecutionStatus,
    InfrastructureError,
    Milestone,
    Score,
)
from gyre_rl.agents.host import Outcome
from gyre_rl.procs.child import ChildSpec
from gyre_rl.procs.fleet import Child, Fleet
from gyre_rl.procs.launcher import LocalLauncher
from gyre_rl.procs.wire import Empty, Endpoint, Fault, Peer, build_app, pack, serve, unpack


@dataclass(frozen=True, slots=True)
class Number:
    value: int


async def _double(message: Number) -> Number:
    if message.value < 0:
        raise ContextLengthError("doubling", got=str(message.value), expected="0 or more", fix="Negate it.")
    if message.value == 13:
        raise RuntimeError("unlucky")
    return Number(2 * message.value)


@pytest.fixture
async def peer():
    runner, port = await serve(build_app("secret", [Endpoint("/double", Number, _double)]), "127.0.0.1", 0)
    async with aiohttp.ClientSession() as http:
        yield Peer(http, f"http://127.0.0.1:{port}", "secret", "doubler")
    await runner.cleanup()


async def test_a_question_is_answered_with_its_type(peer):
    assert await peer.call("/double", Number(21), Number) == Number(42)


async def test_an_error_crosses_as_what_it_was(peer):
    with pytest.raises(ContextLengthError) as caught:
        await peer.call("/double", Number(-1), Number)
    assert (caught.value.got, caught.value.expected, caught.value.fix) == ("-1", "0 or more", "Negate it.")


async def test_a_foreign_error_names_itself(peer):
    with pytest.raises(InfrastructureError, match="RuntimeError: unlucky"):
        await peer.call("/double", Number(13), Number)


HALF = "\ud800"
"""Half a surrogate pair, as in `ValueError('\\ud800')`: a text that UTF-8 cannot say."""


async def test_a_text_that_cannot_be_said_in_utf8_crosses_spelled_out(peer):
    milestones = (Milestone(f"n{HALF}", True, 2.0, f"ValueError: {HALF}"), Milestone("plain", False, 1.0, "é"))
    end = ExecutionEnd(ExecutionStatus.TIMEOUT, HALF, turns=3, evidence={HALF: [HALF, 1, b"raw"]}, answered_calls=2)
    sent = Outcome(end, Score.of_milestones(milestones, complete=False, why=HALF), 1.5)

    async def run(message: Number) -> Outcome:
        if message.value == 13:
            raise ValueError(HALF)
        return sent

    runner, port = await serve(build_app("secret", [Endpoint("/run", Number, run)]), "127.0.0.1", 0)
    agents = Peer(peer._http, f"http://127.0.0.1:{port}", "secret", "agents")
    came = await agents.call("/run", Number(1), Outcome)
    assert came.score == Score(
        2.0 / 3.0,
        (Milestone(r"n\ud800", True, 2.0, r"ValueError: \ud800"), Milestone("plain", False, 1.0, "é")),
        False,
        r"\ud800",
    )
    assert (came.end.reason, came.end.turns, came.end.answered_calls, came.seconds) == (r"\ud800", 3, 2, 1.5)
    assert came.end.evidence == {r"\ud800": [r"\ud800", 1, b"raw"]}
    with pytest.raises(InfrastructureError, match=r"ValueError: \\ud800"):
        await agents.call("/run", Number(13), Outcome)
    await runner.cleanup()


async def test_an_answer_that_cannot_be_sent_is_told_as_such(peer):
    async def strange(message: Number) -> object:
        return object()

    runner, port = await serve(build_app("secret", [Endpoint("/strange", Number, strange)]), "127.0.0.1", 0)
    with pytest.raises(InfrastructureError, match=r"answering a request.*TypeError.*object"):
        await Peer(peer._http, f"http://127.0.0.1:{port}", "secret", "x").call("/strange", Number(1), Number)
    await runner.cleanup()


async def test_a_wrong_token_is_refused(peer):
    stranger = Peer(peer._http, peer.base_url, "guess", "doubler")
    with pytest.raises(InfrastructureError, match="401"):
        await stranger.call("/double", Number(1), Number)


async def test_a_malformed_body_is_told(peer):
    with pytest.raises(InfrastructureError, match="reading a message"):
        await peer.call("/double", "no number", Number)


async def test_a_dead_peer_is_a_lost_cell():
    async with aiohttp.ClientSession() as http:
        with pytest.raises(CellLostError, match="doubler"):
            await Peer(http, "http://127.0.0.1:9", "secret", "doubler").call("/double", Number(1), Number)


async def test_a_port_in_use_is_a_clear_error():
    runner, port = await serve(web.Application(), "127.0.0.1", 0)
    with pytest.raises(InfrastructureError, match=f"listening on 127.0.0.1:{port}.*a free port"):
        await serve(web.Application(), "127.0.0.1", port)
    await runner.cleanup()


def test_faults_keep_their_parts():
    error = CellLostError("asking", got="silence", expected="an answer", fix="Restart it.")
    again = unpack(pack(Fault.of(error)), Fault).error()
    assert type(again) is CellLostError
    assert str(again) == str(error)


# --- a real child ---------------------------------------------------------------------------------------------


class EchoHost:
    """Hosts `/double`, repeats events as questions to the run, and hangs when told to."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.app = build_app(spec.token, [Endpoint("/double", Number, _double)])

    async def start(self, link: Any, http: aiohttp.ClientSession, base_url: str) -> Number:
        if self.spec.body.get("fail"):
            raise InfrastructureError("starting the echo", got="orders to fail")
        if self.spec.body.get("exit"):
            print("last words", flush=True)
            os._exit(7)
        if self.spec.body.get("die telling"):
            asyncio.get_running_loop().call_later(0.2, os._exit, 9)
            for number in range(3):
                await link.send("told", number)
            await link.ask("hang", 0, int)
        if self.spec.body.get("ask strangely"):
            await link.ask("strange", 0, int)
        answer = await link.ask("sum", [1, 2, 3], int)
        return Number(answer)

    async def answer(self, topic: str, body: bytes) -> Any:
        return None

    async def close(self) -> None:
        return


async def make_echo(spec: ChildSpec) -> EchoHost:
    return EchoHost(spec)


class Owner:
    def __init__(self) -> None:
        self.losses: list[tuple[CellId, str]] = []
        self.lost = asyncio.Event()
        self.told: list[int | str] = []

        self.hears, self.hung_up = asyncio.Event(), asyncio.Event()
        """What a child told is handled once both are set; `hung_up` is when the child that asked listens no more."""
        self.hears.set()

    async def on_message(self, cell: CellId, topic: str, body: bytes) -> Any:
        if topic == "told":
            await self.hung_up.wait()
            await asyncio.sleep(0.1)  # in which a loss that does not wait for this would come
            await self.hears.wait()
            self.told.append(unpack(body, int))
            return None
        if topic == "hang":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.told.append("nobody listens")
                self.hung_up.set()
                raise
        if topic == "strange":
            return object()
        assert topic == "sum"
        return sum(unpack(body, list[int]))

    def on_loss(self, cell: CellId, reason: str) -> None:
        self.losses.append((cell, reason))
        self.told.append("lost")
        self.lost.set()


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    owner = Owner()
    launcher = LocalLauncher(None, ComponentContext(str(tmp_path), "test"))
    made = Fleet(launcher, tmp_path, on_message=owner.on_message, on_loss=owner.on_loss)
    await made.open()
    yield made, owner
    await made.close()


async def _start(fleet: Fleet, **body: Any) -> Child:
    return await fleet.start("echo", "test_rl_procs:make_echo", body)


async def test_a_child_attaches_asks_and_serves(fleet):
    made, _ = fleet
    child = await _start(made)
    assert await made.ready(child, Number) == Number(6)
    assert await child.reach().call("/double", Number(4), Number) == Number(8)
    assert child.id == CellId("echo", 1)


async def test_kill_9_is_noticed_and_the_next_life_has_a_higher_incarnation(fleet):
    made, owner = fleet
    child = await _start(made)
    await made.ready(child, Number)
    os.kill(child.process.pid, signal.SIGKILL)
    await asyncio.wait_for(owner.lost.wait(), 60)
    assert owner.losses[0][0] == CellId("echo", 1)
    with pytest.raises(InfrastructureError, match="gone"):
        made.get(child.id)
    second = await _start(made)
    assert second.id == CellId("echo", 2)
    assert await made.ready(second, Number) == Number(6)


async def test_what_a_child_told_before_it_died_is_handled_before_its_loss(fleet):
    made, owner = fleet
    await _start(made, **{"die telling": True})
    await asyncio.wait_for(owner.lost.wait(), 60)
    assert owner.told == ["nobody listens", 0, 1, 2, "lost"]


async def test_handling_what_a_dead_child_told_may_take_as_long_as_it_must(fleet, monkeypatch):
    made, owner = fleet
    owner.hears.clear()
    child = await _start(made, **{"die telling": True})
    await asyncio.wait_for(child.process.wait(), 60)
    while "nobody listens" not in owner.told:
        await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    real = loop.time
    for hours in (1, 2, 3):  # whatever waits for a time at all has waited long enough
        monkeypatch.setattr(loop, "time", lambda hours=hours: real() + 3600.0 * hours)
        for _ in range(20):
            await asyncio.sleep(0)
            await asyncio.to_thread(lambda: None)
        assert not owner.lost.is_set()
    owner.hears.set()
    while not owner.lost.is_set():
        await asyncio.sleep(0.01)
    assert owner.told == ["nobody listens", 0, 1, 2, "lost"]


async def test_a_connection_that_outlives_its_process_is_closed_from_here(fleet, monkeypatch):
    monkeypatch.setattr("gyre_rl.procs.fleet.CLOSING_S", 0.1)
    made, owner = fleet
    child = await _start(made)
    await made.ready(child, Number)
    ended = asyncio.Event()

    async def over() -> int:  # the process is over, says the launcher; the connection stands
        await ended.wait()
        return 0

    waiting = SimpleNamespace(wait=over)
    watch = asyncio.create_task(
        made._watch_start(Child(child.id, waiting, child.link, child.peer, child.ready, child.heard), Path("x"))
    )
    ended.set()
    await asyncio.wait_for(watch, 60)
    assert [cell for cell, _ in owner.losses] == [child.id]


async def test_a_child_that_cannot_start_says_why(fleet):
    made, _ = fleet
    with pytest.raises(InfrastructureError, match="orders to fail"):
        await made.ready(await _start(made, fail=True), Number)


async def test_an_answer_to_a_child_that_cannot_be_sent_is_told_as_such(fleet):
    made, _ = fleet
    with pytest.raises(InfrastructureError, match=r"TypeError.*object"):
        await made.ready(await _start(made, **{"ask strangely": True}), Number, 60.0)


async def test_a_child_that_dies_at_its_start_shows_its_log(fleet):
    made, _ = fleet
    with pytest.raises(InfrastructureError, match=r"status 7(.|\n)*last words"):
        await made.ready(await _start(made, exit=True), Number)


async def test_a_child_ends_when_its_run_is_gone(fleet):
    made, _ = fleet
    child = await _start(made)
    await made.ready(child, Number)
    await child.link.close()
    assert await asyncio.wait_for(child.process.wait(), 60) == 0


async def test_a_stranger_cannot_attach(fleet):
    made, _ = fleet
    async with aiohttp.ClientSession() as http:
        response = await http.get(made.control_url + "/attach", headers={"authorization": "Bearer no"})
        assert response.status == 401
        headers = {"authorization": f"Bearer {made.token}"}
        response = await http.get(made.control_url + "/attach", headers=headers, params={"hello": "{}"})
        assert response.status == 400


async def test_the_token_file_is_private(fleet, tmp_path: Path):
    made, _ = fleet
    child = await _start(made)
    assert (tmp_path / "procs" / "echo.1.json").stat().st_mode & 0o077 == 0
    await made.ready(child, Number)
    assert await child.reach().call("/double", Number(0), Number) == Number(0)
    assert isinstance(Empty(), Empty)
