"""Handing gradients over in memory: exact, once, and over whatever the peers do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_weights import MismatchError, PeerError
from gyre_weights.arrays import host_tensor
from gyre_weights.digest import CHUNK
from gyre_weights.handover import (
    Arrived,
    Endpoint,
    Lane,
    Piece,
    Receiver,
    check_cover,
    hand_over,
    split_by_name,
    split_flat,
    whole,
)
from gyre_weights.handover import sender as sender_module
from gyre_weights.handover.lanes import chunks
from gyre_weights.handover.plan import Form
from gyre_weights.handover.wire import Channel, connect
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_peer import gradient

LANES = [Lane.MEMORY, Lane.SOCKET, pytest.param(Lane.GROUP, id="group")]
ELEMENTS = 5 * CHUNK // 4 + 3


def forms_of(tensors: dict[str, Any]) -> dict[str, Form]:
    return {name: (t.dtype, t.shape) for name, t in ((n, host_tensor(n, v)) for n, v in tensors.items())}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver(whole(forms_of(gradient(ELEMENTS))), idle_s=20.0, total_s=120.0)
    made.open_step(4)
    yield made
    made.close()


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def equal(arrived: Arrived, tensors: dict[str, np.ndarray]) -> bool:
    found = arrived.tensors()
    return found.keys() == tensors.keys() and all(np.array_equal(found[n].numpy(), tensors[n]) for n in tensors)


# Plans


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3), min_size=1, max_size=6),
    st.integers(1, 7),
    st.integers(1, 9),
)
@settings(deadline=None)
def test_flat_splits_cover_once(shapes: list[list[int]], shards: int, multiple: int) -> None:
    forms: dict[str, Form] = {f"t{i}": ("F32", tuple(shape)) for i, shape in enumerate(shapes)}
    plans = split_flat(forms, shards, multiple=multiple)
    assert len(plans) == shards
    check_cover(forms, [plan.pieces for plan in plans])
    total = sum(int(np.prod(shape)) for _, shape in forms.values())
    sizes = [plan.nbytes // 4 for plan in plans]
    assert sum(sizes) == total
    step = -(-total // (shards * multiple)) * multiple
    assert all(size <= step for size in sizes)


def test_what_is_not_covered_once_is_named() -> None:
    forms: dict[str, Form] = {"a": ("F32", (10,)), "b": ("F32", (4,))}
    check_cover(forms, [plan.pieces for plan in split_by_name(forms, {"a": 1, "b": 0}, 2)])
    for pieces, text in (
        ([Piece("a", 0, 10)], "elements 0 to 4 of b wanted by nobody"),
        ([Piece("a", 0, 5), Piece("a", 4, 10), Piece("b", 0, 4)], "elements 4 to 5 of a wanted twice"),
        ([Piece("a", 0, 5), Piece("a", 6, 10), Piece("b", 0, 4)], "elements 5 to 6 of a wanted by nobody"),
        ([Piece("a", 0, 10), Piece("b", 0, 4), Piece("c", 0, 1)], "a wish for c"),
    ):
        with pytest.raises(MismatchError, match=text):
            check_cover(forms, [pieces])


@given(st.lists(st.integers(0, 3 * CHUNK // 2), max_size=6))
@settings(deadline=None, max_examples=30)
def test_chunks_are_whole_and_in_order(sizes: list[int]) -> None:
    data = np.arange(sum(sizes), dtype=np.uint32).astype(np.uint8)
    windows = np.split(data, np.cumsum(sizes)[:-1]) if sizes else []
    found = list(chunks(windows))
    assert all(len(piece) == CHUNK for piece in found[:-1])
    assert np.array_equal(np.concatenate(found) if found else np.empty(0, np.uint8), data)


# The way


@pytest.mark.parametrize("lane", LANES)
def test_a_gradient_arrives_as_it_was(receiver: Receiver, lane: Lane) -> None:
    endpoint, tensors = receiver.start(), gradient(ELEMENTS)
    done = hand_over(endpoint, "c1", 4, tensors, meta={"batch_ids": ["x", "y"]}, lane=lane)
    assert done.lanes == (lane.value,)
    assert done.bytes == sum(t.nbytes for t in tensors.values()) == receiver.counts.payload_bytes
    assert receiver.held == ["c1"]
    arrived = receiver.take("c1")
    assert (arrived.id, arrived.version, arrived.meta) == ("c1", 4, {"batch_ids": ["x", "y"]})
    assert equal(arrived, tensors)


def test_memory_on_one_machine_and_the_socket_between_two(receiver: Receiver) -> None:
    endpoint, tensors = receiver.start(), gradient(ELEMENTS)
    assert hand_over(endpoint, "c1", 4, tensors).lanes == ("memory",)
    far = Endpoint(endpoint.host, endpoint.port, "elsewhere", endpoint.token)
    assert hand_over(far, "c2", 4, tensors).lanes == ("socket",)
    assert equal(receiver.take("c2"), tensors)
    with pytest.raises(PeerError, match="another machine"):
        hand_over(far, "c3", 4, tensors, lane="memory")


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_match_the_core_processes(shards: int) -> None:
    tensors = gradient(ELEMENTS)
    plans = split_flat(forms_of(tensors), shards, multiple=16)
    receivers = [Receiver(plan, index=i, shards=shards) for i, plan in enumerate(plans)]
    try:
        places = [r.start() for r in receivers]
        for r in receivers:
            r.open_step(0)
        done = hand_over(places, "c", 0, tensors)
        assert done.bytes == sum(t.nbytes for t in tensors.values())
        full = {name: np.full(t.size, np.nan, np.float32) for name, t in tensors.items()}
        for r in receivers:
            for piece, part in r.take("c").pieces():
                full[piece.name][piece.start : piece.stop] = part.numpy()
        assert all(np.array_equal(full[name].reshape(t.shape), t) for name, t in tensors.items())
        with pytest.raises(MismatchError if shards > 1 else PeerError):
            hand_over(places[:1], "c" if shards == 1 else "d", 0, tensors)
        wait_for(lambda: all(r.counts.broken + r.counts.refused for r in receivers[:1]))
        assert all(r.held == [] for r in receivers)
    finally:
        for r in receivers:
            r.close()


def test_one_process_that_refuses_leaves_nothing_in_the_others() -> None:
    tensors = gradient(100)
    receivers = [Receiver(plan, index=i, shards=2) for i, plan in enumerate(split_flat(forms_of(tensors), 2))]
    try:
        places = [r.start() for r in receivers]
        receivers[0].open_step(1)
        receivers[1].open_step(2)
        with pytest.raises(PeerError, match="this step is of version 2"):
            hand_over(places, "c", 1, tensors)
        wait_for(lambda: receivers[0].counts.broken == 1)
        assert receivers[0].held == []
        receivers[1].open_step(1)
        hand_over(places, "c", 1, tensors)
        assert [r.held for r in receivers] == [["c"], ["c"]]
    finally:
        for r in receivers:
            r.close()


def test_many_satellites_at_once(receiver: Receiver) -> None:
    endpoint, tensors = receiver.start(), gradient(ELEMENTS)
    errors: list[Exception] = []

    def give(i: int) -> None:
        lane = [None, "socket", "group"][i % 3]
        try:
            hand_over(endpoint, f"c{i}", 4, {n: t + i for n, t in tensors.items()}, lane=lane)
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=give, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for i in range(6):
        assert equal(receiver.take(f"c{i}"), {n: t + np.float32(i) for n, t in tensors.items()})


def test_the_cores_own_goes_without_a_copy(receiver: Receiver) -> None:
    data = np.zeros(receiver.plan.nbytes, np.uint8)
    receiver.put("own", 4, {}, data)
    assert receiver.take("own").data is data
    with pytest.raises(PeerError, match="known already"):
        receiver.put("own", 4, {}, data)
    with pytest.raises(PeerError, match="this step is of version 4"):
        receiver.put("old", 3, {}, data)


# Once


def test_a_contribution_comes_once(receiver: Receiver) -> None:
    endpoint, tensors = receiver.start(), gradient(10_000_00)
    receiver.plan = whole(forms_of(tensors))
    hand_over(endpoint, "c", 4, tensors)
    with pytest.raises(PeerError, match="known already"):
        hand_over(endpoint, "c", 4, tensors)
    receiver.take("c")
    with pytest.raises(PeerError, match="known already"):
        hand_over(endpoint, "c", 4, tensors)
    with pytest.raises(PeerError, match="none of that name"):
        receiver.take("c")


def test_stale_gradients_are_refused_and_orphans_go_with_the_step(receiver: Receiver) -> None:
    endpoint, tensors = receiver.start(), gradient(ELEMENTS)
    with pytest.raises(PeerError, match="gradients of policy version 3"):
        hand_over(endpoint, "old", 3, tensors)
    hand_over(endpoint, "orphan", 4, tensors)
    receiver.open_step(5)
    assert receiver.held == []
    with pytest.raises(PeerError):
        receiver.take("orphan")


def test_a_step_that_ends_during_a_handover_takes_nothing(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = receiver.start()
    real = sender_module._send

    def slow(*args: Any) -> int:
        sent = real(*args)
        receiver.open_step(5)
        return sent

    monkeypatch.setattr(sender_module, "_send", slow)
    with pytest.raises(PeerError):
        hand_over(endpoint, "late", 4, gradient(ELEMENTS))
    assert receiver.held == []


def test_another_model_is_refused(receiver: Receiver) -> None:
    endpoint = receiver.start()
    with pytest.raises(PeerError, match="this core has"):
        hand_over(endpoint, "c", 4, gradient(7))
    with pytest.raises(PeerError, match="b as"):
        hand_over(endpoint, "c", 4, gradient(ELEMENTS) | {"b": np.zeros((3, 5), np.float64)})


def test_damage_on_the_way_is_found(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = receiver.start()
    real = sender_module.send_socket

    def damaged(channel: Channel, windows: Any) -> str:
        return real(channel, windows)[:-1] + "x"

    monkeypatch.setattr(sender_module, "send_socket", damaged)
    with pytest.raises(PeerError, match="other bytes than sent"):
        hand_over(endpoint, "c", 4, gradient(ELEMENTS), lane="socket")
    monkeypatch.undo()
    hand_over(endpoint, "c", 4, gradient(ELEMENTS), lane="socket")


def test_a_name_is_free_before_its_refusal_is_heard(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears of damage may try again at once, however slow the receiver's thread is afterwards."""
    endpoint = receiver.start()
    real, said = Channel.send, []

    def send(channel: Channel, message: Any) -> None:
        real(channel, message)
        if "refused" in message:
            said.append(message)
            time.sleep(0.3)

    monkeypatch.setattr(Channel, "send", send)
    sent = sender_module.send_socket
    monkeypatch.setattr(sender_module, "send_socket", lambda channel, windows: sent(channel, windows)[:-1] + "x")
    with pytest.raises(PeerError, match="other bytes than sent"):
        hand_over(endpoint, "c", 4, gradient(ELEMENTS), lane="socket")
    monkeypatch.setattr(sender_module, "send_socket", sent)
    hand_over(endpoint, "c", 4, gradient(ELEMENTS), lane="socket")
    assert len(said) == 1


# Strangers


def test_who_does_not_know_the_token_is_not_heard(receiver: Receiver) -> None:
    endpoint = receiver.start()
    stranger = Endpoint(endpoint.host, endpoint.port, endpoint.local, "guess")
    with pytest.raises(PeerError, match="wrong token"):
        hand_over(stranger, "c", 4, gradient(ELEMENTS))


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\5[1,2]", b"\xff" * 64, b"\0\0\0\2{}"])
def test_noise_harms_nobody(receiver: Receiver, noise: bytes) -> None:
    endpoint = receiver.start()
    # The receiver may hang up at the first wrong byte, before all is said.
    with socket.create_connection((endpoint.host, endpoint.port)) as sock, contextlib.suppress(OSError):
        sock.sendall(noise)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    hand_over(endpoint, "c", 4, gradient(ELEMENTS))
    assert receiver.held == ["c"]


def test_the_endpoint_file_is_private_and_its_absence_is_told(tmp_path: Path, receiver: Receiver) -> None:
    path = tmp_path / "x" / "endpoint.json"
    with pytest.raises(PeerError, match="may be restarting"):
        Endpoint.load(path)
    endpoint = receiver.start()
    endpoint.save(path)
    assert Endpoint.load(path) == endpoint
    assert path.stat().st_mode & 0o077 == 0


# Deaths


def peer(tmp_path: Path, endpoint: Endpoint, **do: Any) -> subprocess.Popen[str]:
    place = tmp_path / "endpoint.json"
    endpoint.save(place)
    what = {"endpoint": str(place), "id": "dead", "version": 4, "elements": ELEMENTS, "lane": None, "how": "die"} | do
    script = str(Path(__file__).with_name("weights_peer.py"))
    return subprocess.Popen([sys.executable, script, json.dumps(what)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("point", "lane"),
    [("piece", "memory"), ("piece", "socket"), ("piece", "group"), ("digest", "memory"), ("seal", "socket")],
)
def test_a_satellite_killed_while_handing_over(tmp_path: Path, receiver: Receiver, point: str, lane: str) -> None:
    """Nothing of it stays, others are served meanwhile, and its batches come again under another name or the same."""
    endpoint = receiver.start()
    process = peer(tmp_path, endpoint, point=point, lane=lane)
    hand_over(endpoint, "alive", 4, gradient(ELEMENTS))
    assert process.wait(60) == -signal.SIGKILL
    process.communicate()
    wait_for(lambda: receiver.counts.broken == 1)
    assert receiver.held == ["alive"]
    hand_over(endpoint, "dead", 4, gradient(ELEMENTS))
    assert equal(receiver.take("dead"), gradient(ELEMENTS))
    wait_for(lambda: not receiver.peers)


@pytest.mark.parametrize("point", ["piece", "seal"])
def test_a_satellite_that_hangs_ends_by_time_out(tmp_path: Path, point: str) -> None:
    made = Receiver(whole(forms_of(gradient(ELEMENTS))), idle_s=4.0, total_s=12.0)
    made.open_step(4)
    try:
        endpoint = made.start()
        process = peer(tmp_path, endpoint, point=point, how="stop", lane="socket")
        wait_for(lambda: made.counts.broken == 1)
        assert made.held == []
        hand_over(endpoint, "next", 4, gradient(ELEMENTS))
        process.kill()
        process.communicate()
    finally:
        made.close()


def test_a_satellite_killed_while_computing_was_never_there(tmp_path: Path, receiver: Receiver) -> None:
    process = peer(tmp_path, receiver.start(), point="compute")
    assert process.wait(60) == -signal.SIGKILL
    process.communicate()
    assert (receiver.held, receiver.counts.broken) == ([], 0)


def test_a_satellite_in_another_process_ends_well(tmp_path: Path, receiver: Receiver) -> None:
    process = peer(tmp_path, receiver.start(), point="nowhere", id="c")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out.splitlines()[-1]) == [receiver.plan.nbytes, ["memory"]]
    assert equal(receiver.take("c"), gradient(ELEMENTS))


def test_the_core_killed_during_a_handover_is_an_error_at_once(tmp_path: Path) -> None:
    code = (
        "import json, os, sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path;"
        "from gyre_weights.handover import Receiver, whole, receiver, wire; from weights_peer import gradient;"
        "from gyre_weights.arrays import host_tensor;"
        f"g = gradient({ELEMENTS}); forms = {{n: ('F32', t.shape) for n, t in g.items()}};"
        "r = Receiver(whole(forms)); r.open_step(4);"
        "receiver.receive_socket = lambda channel, nbytes: os.kill(os.getpid(), 9);"
        "r.start().save(Path(sys.argv[1])); import time; time.sleep(600)"
    )
    place = tmp_path / "e.json"
    core = subprocess.Popen([sys.executable, "-c", code, str(place), str(Path(__file__).parent)])
    wait_for(place.exists)
    with pytest.raises(PeerError):  # the end of the connection tells, not the time-out
        hand_over(Endpoint.load(place), "c", 4, gradient(ELEMENTS), lane="socket", idle_s=3600.0, total_s=3600.0)
    core.wait()
    with pytest.raises(PeerError, match="nobody at"):
        hand_over(Endpoint.load(place), "c", 4, gradient(ELEMENTS))


def test_a_core_that_hangs_ends_by_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Endpoint("127.0.0.1", silent.getsockname()[1], "nobody", "t")
        with pytest.raises(PeerError, match=r"silence for 0\.3 s"):
            hand_over(place, "c", 4, gradient(10), idle_s=0.3)


def test_the_whole_conversation_is_bounded() -> None:
    left, right = socket.socketpair()
    with left, right:
        channel = Channel(left, "talking", idle_s=10.0, total_s=0.2)
        time.sleep(0.25)
        with pytest.raises(PeerError, match="within the time allowed"):
            channel.receive()


def test_closing_ends_open_handovers() -> None:
    receiver = Receiver(whole(forms_of(gradient(ELEMENTS))), idle_s=3600.0, total_s=3600.0)
    receiver.open_step(4)
    endpoint = receiver.start()
    forms = {n: [f, list(s)] for n, (f, s) in receiver.plan.forms.items()}
    channel = connect(
        endpoint, {"do": "offer", "id": "c", "version": 4, "forms": forms}, "opening", idle_s=20, total_s=60
    )
    assert channel.receive()["index"] == 0
    receiver.close()  # at once, for nobody is to wait for the time-out
    with pytest.raises(PeerError):
        channel.receive()
    channel.close()
    assert not [t for t in receiver._listener._threads if t.is_alive()]


def test_no_descriptor_is_left_open(receiver: Receiver) -> None:
    endpoint = receiver.start()
    hand_over(endpoint, "c0", 4, gradient(ELEMENTS))
    before = len(os.listdir("/proc/self/fd"))
    for i in range(1, 6):
        hand_over(endpoint, f"c{i}", 4, gradient(ELEMENTS))
        receiver.take(f"c{i}")
    wait_for(lambda: not receiver.peers)
    assert len(os.listdir("/proc/self/fd")) <= before
