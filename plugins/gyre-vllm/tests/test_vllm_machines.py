"""Servers on several machines: what listens where, what reaches what, and what a silent machine costs."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from gyre_core import ComponentContext, FinishReason, InfrastructureError, WeightSource
from gyre_core.testing.support import load_module
from gyre_vllm import calls, handover, network
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.launch import SERVER_MODULES, Place, launch_plan
from gyre_vllm.network import free_port, interface_of, is_loopback
from gyre_vllm.options import VLLMOptions
from gyre_vllm.server import machine_of, place_of

PROMPT = list(range(40))


def planned(place: Place, **options: Any) -> tuple[str, dict[str, str]]:
    """The URL and the variables of a server in this place."""
    plan = launch_plan(VLLMOptions(transfers=True, **options), "/m", ("vllm", "serve"), place)
    assert plan.argv[plan.argv.index("--host") + 1] == place.host
    return plan.url, dict(plan.env)


def own_address() -> str:
    """An address of this machine that is not the loopback's; skips the test where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but the loopback's")
        return str(probe.getsockname()[0])


def test_only_the_side_channel_is_open_to_the_runs_other_machines() -> None:
    address = own_address()
    place = place_of(VLLMOptions(transfers=True), address, 0, 1, 0)
    url, env = planned(place)
    assert url == f"http://127.0.0.1:{place.port}"
    assert (env["VLLM_NIXL_SIDE_CHANNEL_HOST"], env["VLLM_HOST_IP"]) == (address, "127.0.0.1")
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env["UCX_NET_DEVICES"] == interface_of(address) != "lo"
    assert place.side_port != place.port


def test_on_one_machine_nothing_is_open_to_others() -> None:
    _, env = planned(place_of(VLLMOptions(transfers=True), "127.0.0.1", 0, 1, 0))
    assert (env["VLLM_NIXL_SIDE_CHANNEL_HOST"], env["UCX_NET_DEVICES"]) == ("127.0.0.1", "lo")


def test_the_users_own_words_come_first() -> None:
    address = own_address()
    place = place_of(VLLMOptions(transfers=True, host=address), "127.0.0.1", 0, 1, 0)
    url, env = planned(place, environment={"UCX_NET_DEVICES": "mlx5_0:1"})
    assert url == f"http://{address}:{place.port}"
    assert (env["VLLM_NIXL_SIDE_CHANNEL_HOST"], env["UCX_NET_DEVICES"]) == (address, "mlx5_0:1")
    with pytest.raises(ValueError, match="host"):
        VLLMOptions(transfers=True, host="0.0.0.0")
    with pytest.raises(InfrastructureError, match=r"192\.0\.2\.1.*an address of this machine"):
        place_of(VLLMOptions(host="192.0.2.1"), "127.0.0.1", 0, 1, 0)


def test_ucx_finds_its_own_way_between_accelerators_and_nothing_is_said_without_transfers() -> None:
    accelerated = Place("127.0.0.1", 1, accelerators=8, side_host="10.0.0.7", side_port=2, side_interface="eth0")
    assert "UCX_NET_DEVICES" not in planned(accelerated)[1]
    assert "UCX_NET_DEVICES" not in planned(replace(accelerated, accelerators=0, side_interface=""))[1]
    place = place_of(VLLMOptions(), "192.0.2.1", 0, 1, 0)
    assert (place.side_port, place.side_interface) == (0, "")
    plan = launch_plan(VLLMOptions(), "/m", ("vllm", "serve"), replace(accelerated, accelerators=0))
    assert not [name for name, _ in plan.env if name.startswith(("UCX_", "VLLM_NIXL_"))]


def test_addresses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [is_loopback(a) for a in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "node7", "")] == [
        True, True, True, False, False, False
    ]  # fmt: skip
    assert free_port("127.0.0.1") > 0
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == interface_of("no such name.invalid") == ""
    table = tmp_path / "if_inet6"
    monkeypatch.setattr(network, "_IPV6_TABLE", table)
    assert interface_of("fd00::7") == ""
    table.write_text("fd000000000000000000000000000007 02 40 00 80     eth3\n")
    assert interface_of("fd00::7") == "eth3"
    assert machine_of("http://node7:8000", "10.0.0.1") == "node7"
    assert machine_of("http://127.0.0.1:8000", "10.0.0.1") == "10.0.0.1"


@pytest.fixture
async def two(fake: Any, sources: list[WeightSource], tmp_path: Path) -> Any:
    """`await two("10.0.0.2", "10.0.0.3")`: two fakes with our connector, on machines of these addresses."""
    made: list[Any] = []

    async def make(*addresses: str) -> list[Any]:
        for address in addresses:
            server = fake.FakeVLLM()
            server.faults |= {"connector", "takes"}
            context = ComponentContext(str(tmp_path), f"cell-{address}", address=address)
            engine = VLLMEngine(VLLMOptions(url=await server.start()), context)
            made.extend((server, engine))
            await engine.start(sources[0])
        return made

    yield make
    for server, engine in zip(made[::2], made[1::2], strict=True):
        await engine.close()
        await server.stop()


def changed(held: Any, params: dict[str, Any] | None = None, **export: Any) -> Any:
    """The export with other words in its ticket."""
    ticket = msgspec.json.decode(held.ticket, type=handover.Ticket)
    given = replace(ticket.export, params=ticket.export.params | (params or {}), **export)
    return replace(held, ticket=msgspec.json.encode(replace(ticket, export=given)))


async def test_a_connector_on_another_machines_loopback_is_refused_at_once(two: Any, ask: Any) -> None:
    _, a, server, b = await two("10.0.0.2", "10.0.0.3")
    await ask(a, PROMPT, 3)
    held = await a.kv_export("s-a")
    for host in ("127.0.0.1", "localhost", "::1"):
        with pytest.raises(InfrastructureError, match=r"of 10\.0\.0\.2.*VLLM_NIXL_SIDE_CHANNEL_HOST"):
            await b.kv_import(changed(held, {"remote_host": host}))
    assert server.bodies == []
    assert (await b.kv_import(changed(held, {"remote_host": "10.0.0.2"}))).computed == 3
    assert (await a.kv_import(changed(held, {"remote_host": "127.0.0.1"}))).computed == 3, "it is on one machine"


async def test_a_clock_that_is_far_ahead_is_told(two: Any, ask: Any) -> None:
    """An export that seems to be of later would seem fresh when the blocks are another call's by now."""
    _, a, server, b = await two("10.0.0.2", "10.0.0.3")
    await ask(a, PROMPT, 3)
    held = await a.kv_export("s-a")
    taken = msgspec.json.decode(held.ticket, type=handover.Ticket).export.taken_at
    with pytest.raises(InfrastructureError, match="Synchronise"):
        await b.kv_import(changed(held, taken_at=taken + 60))
    assert server.bodies == []
    assert (await b.kv_import(changed(held, taken_at=taken + 2))).computed == 3


async def test_a_fetch_that_does_not_come_is_given_up(
    two: Any, ask: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's machine has fallen silent: the destination's server waits and says nothing."""
    monkeypatch.setattr(handover, "FETCH_S", 0.2)
    _, a, server, b = await two("10.0.0.2", "10.0.0.3")
    await ask(a, PROMPT, 3)
    held = await a.kv_export("s-a")
    server.room.clear()
    with pytest.raises(InfrastructureError, match=r"nothing from 10\.0\.0\.2 in 0\.2 s"):
        await b.kv_import(held)
    server.room.set()
    result = await ask(b, PROMPT, 3)
    assert result.ids[0] == fake.token_after(PROMPT, 10)


async def test_a_call_whose_kv_does_not_come_computes_it(
    two: Any, ask: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for the move, so it is the session's next call that would fetch."""
    monkeypatch.setattr(calls, "FETCH_S", 0.2)
    _, a, server, b = await two("10.0.0.2", "10.0.0.3")
    chunks: list[Any] = []
    running = asyncio.create_task(ask(a, PROMPT[:20], 100, into=chunks))
    while len(chunks) < 3:
        await asyncio.sleep(0.002)
    held = await a.kv_export("s-a", stop=True)
    context = [*PROMPT[:20], *(await running).ids]
    await b.kv_import(held)
    server.faults.add("silent-source")
    result = await asyncio.wait_for(ask(b, context, 5), 60)
    assert result.finish is FinishReason.LENGTH
    assert result.ids[0] == fake.token_after(context, 10)
    assert (len(result.ids), result.cached) == (5, 0)
    assert ["kv_transfer_params" in body for body in server.bodies] == [True, False]
    assert (await b.load()).prefilled_tokens == len(context), "what was waited for was not computed"


async def test_a_call_that_fetches_nothing_waits_as_long_as_it_takes(
    two: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "FETCH_S", 0.02)
    server, a = await two("10.0.0.2")
    server.hold_s = 0.1
    assert len((await ask(a, PROMPT, 3)).ids) == 3
    assert len(server.bodies) == 1


def test_a_worker_that_waits_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of yielding the processor, at the very name that vLLM's waiting loop looks up."""
    worker = load_module(SERVER_MODULES / "gyre_vllm_worker.py")
    name, slept = "vllm.distributed.device_communicators.shm_broadcast", []
    monkeypatch.setattr(worker.time, "sleep", slept.append)
    worker._wait_asleep()
    loop = ModuleType(name)
    loop.sched_yield = pytest.fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, loop)
    worker._wait_asleep()
    loop.sched_yield()
    assert slept == [worker.WAIT_S]
