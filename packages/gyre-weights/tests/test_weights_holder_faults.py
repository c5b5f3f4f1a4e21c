"""Holders and newcomers that fail: damage, gaps, deaths, strangers and full disks leave nothing half."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gyre_weights import (
    CorruptError,
    NoRoomError,
    PeerError,
    drop_old,
    publish_full,
)
from gyre_weights.handover import Endpoint, Holder, fetch_version, snapshot, store, wire
from weights_models import NOWHERE, deltas, equal, left, nearest, wait_for, weights


def test_what_the_holder_has_not_is_told(tmp_path: Path, holder: Holder) -> None:
    endpoint = holder.start()
    with pytest.raises(PeerError, match="not held here"):
        fetch_version(endpoint, 9, tmp_path / "here")
    (tmp_path / "there" / "v9").mkdir(parents=True)
    with pytest.raises(PeerError, match="no manifest in"):
        fetch_version(endpoint, 9, tmp_path / "here")
    with pytest.raises(PeerError, match="gradients go to a Receiver"):
        wire.connect(endpoint, {"do": "offer"}, "offering", idle_s=60, total_s=60).receive()
    assert left(tmp_path / "here") == []


def test_who_does_not_know_the_token_gets_nothing(tmp_path: Path, holder: Holder) -> None:
    publish_full(tmp_path / "there", 4, weights())
    with pytest.raises(PeerError, match="a wrong token"):
        nearest(NOWHERE, 4, replace(holder.start(), token="guess"), tmp_path / "here")
    assert left(tmp_path / "here") == []
    assert holder.given == {}


def test_a_chain_with_a_gap_is_refused(tmp_path: Path, holder: Holder) -> None:
    deltas(tmp_path / "there", 3)
    shutil.rmtree(tmp_path / "there" / "v1")
    with pytest.raises(PeerError, match=r"v1.*It may have been dropped just now"):
        nearest(NOWHERE, 2, holder.start(), tmp_path / "here")
    publish_full(tmp_path / "there", 1, weights(7), keep=9, spare=[tmp_path / "there" / "v2"])
    with pytest.raises(PeerError, match=r"got version 1 \("):
        nearest(NOWHERE, 2, holder.start(), tmp_path / "here")
    assert left(tmp_path / "here") == []


def test_damage_at_the_holder_is_found(tmp_path: Path, holder: Holder) -> None:
    folder = Path(publish_full(tmp_path / "there", 4, weights()).location)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptError, match="with digest"):
        nearest(NOWHERE, 4, holder.start(), tmp_path / "here")
    assert left(tmp_path / "here") == []


def test_a_version_dropped_while_it_is_given_is_given_to_its_end(
    tmp_path: Path, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = deltas(tmp_path / "there", 3)
    receive = snapshot._receive_file

    def drop(*args: Any) -> None:
        shutil.rmtree(tmp_path / "there", ignore_errors=True)
        receive(*args)

    monkeypatch.setattr(snapshot, "_receive_file", drop)
    assert equal(nearest(NOWHERE, 2, holder.start(), tmp_path / "here"), made[2])
    assert not (tmp_path / "there").exists()


def test_a_holder_killed_while_giving_leaves_nothing(tmp_path: Path) -> None:
    publish_full(tmp_path / "there", 4, weights())
    code = (
        "import os, sys; from pathlib import Path; from gyre_weights.handover import Holder; real = os.sendfile;"
        "os.sendfile = lambda to, file, at, count: (real(to, file, at, 1000), os.kill(os.getpid(), 9));"
        "Holder(sys.argv[2]).start().save(Path(sys.argv[1])); import time; time.sleep(60)"
    )
    place = tmp_path / "e.json"
    process = subprocess.Popen([sys.executable, "-c", code, str(place), str(tmp_path / "there")])
    wait_for(place.exists)
    with pytest.raises(PeerError, match="the peer is gone"):
        fetch_version(Endpoint.load(place), 4, tmp_path / "here", idle_s=60.0)
    process.wait()
    assert left(tmp_path / "here") == []


def test_a_peer_that_hangs_holds_up_nobody(tmp_path: Path, holder: Holder) -> None:
    publish_full(tmp_path / "there", 4, weights())
    endpoint = holder.start()
    hanging = [socket.create_connection((endpoint.host, endpoint.port)) for _ in range(3)]
    reading = wire.connect(endpoint, {"do": "fetch", "version": 4}, "hanging", idle_s=60, total_s=60)
    reading.receive()
    reading.send({"want": [4]})
    wait_for(lambda: holder._listener.peers == 4)
    try:
        assert equal(nearest(NOWHERE, 4, endpoint, tmp_path / "here"), weights())
    finally:
        reading.close()
        for sock in hanging:
            sock.close()
    wait_for(lambda: holder._listener.peers == 0)


def test_a_full_place_is_named_and_nothing_is_left(
    tmp_path: Path, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_full(tmp_path / "there", 4, weights())
    publish_full(tmp_path / "there", 5, weights(5))
    endpoint = holder.start()
    nearest(NOWHERE, 4, endpoint, tmp_path / "here", keep=1)
    free = {"bytes": 10}
    monkeypatch.setattr(store, "_free", lambda into: free["bytes"] if "v4" in left(into) else 1 << 40)
    assert equal(nearest(NOWHERE, 5, endpoint, tmp_path / "here", keep=1), weights(5)), "what is too old makes room"
    shutil.rmtree(tmp_path / "here")
    monkeypatch.setattr(store, "_free", lambda into: free["bytes"])
    with pytest.raises(NoRoomError, match=r"10 bytes free in .*here, expected \d+\. Make room there"):
        nearest(NOWHERE, 5, endpoint, tmp_path / "here")
    assert left(tmp_path / "here") == []
    assert holder.given == {4: 1, 5: 1}


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="mounts a memory file system")
def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_full(tmp_path / "there", 4, weights())
    here = tmp_path / "small"
    here.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(here)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        monkeypatch.setattr(store, "_free", lambda into: 1 << 40)
        with pytest.raises(NoRoomError, match=r"No space left on device while writing to .*small"):
            nearest(NOWHERE, 4, holder.start(), here)
        assert left(here) == []
    finally:
        subprocess.run(["umount", str(here)], check=True)


def test_closing_ends_fetches_and_leaves_no_thread(tmp_path: Path, holder: Holder) -> None:
    publish_full(tmp_path / "there", 4, weights())
    endpoint = holder.start()
    assert holder.start() == endpoint
    channel = wire.connect(endpoint, {"do": "fetch", "version": 4}, "fetching", idle_s=20, total_s=60)
    channel.receive()
    holder.close()
    with pytest.raises(PeerError):
        channel.receive()
    channel.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "gyre-handover"]
    with pytest.raises(PeerError, match="nobody at"):
        nearest(NOWHERE, 4, endpoint, tmp_path / "here")


def test_drops_on_both_sides(tmp_path: Path, holder: Holder) -> None:
    made = deltas(tmp_path / "there", 6, full_every=3)
    endpoint = holder.start()
    assert drop_old(tmp_path / "there", 1) == [0, 1, 2]
    assert equal(nearest(NOWHERE, 5, endpoint, tmp_path / "here", keep=1), made[5])
    assert drop_old(tmp_path / "here", 1) == []
    with pytest.raises(PeerError, match="not held here"):
        nearest(NOWHERE, 2, endpoint, tmp_path / "here", keep=1)
    assert left(tmp_path / "here") == ["v3", "v4", "v5"]
