"""Versions from the nearest holder: this machine, what it fetched before, another machine."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gyre_weights import (
    IncompleteError,
    PeerError,
    Publisher,
    RefusedError,
    VersionError,
    open_version,
    publish_full,
    versions_in,
)
from gyre_weights.handover import Endpoint, Holder, Receiver, ShardPlan, fetch_version, snapshot, store
from weights_models import NOWHERE, deltas, equal, left, nearest, weights

# Where it comes from


def test_what_this_machine_has_whole_is_taken_from_there(tmp_path: Path) -> None:
    published = publish_full(tmp_path / "there", 4, weights())

    def ask() -> Endpoint:
        raise AssertionError("nobody is looked up")

    found = nearest(published.location, 4, ask, tmp_path / "here")
    assert found.folder == tmp_path / "there" / "v4"
    assert not (tmp_path / "here").exists()


def test_else_it_is_fetched_once_and_stays_for_the_next(tmp_path: Path, holder: Holder) -> None:
    published = publish_full(tmp_path / "there", 4, weights(), extras={"config.json": b"{}"}, shard_bytes=5000)
    endpoint = holder.start()
    fetched = nearest(NOWHERE, 4, endpoint, tmp_path / "here")
    assert fetched.folder == tmp_path / "here" / "v4"
    assert fetched.digest == published.digest
    assert (fetched.folder / "config.json").read_bytes() == b"{}"
    assert equal(fetched, weights())
    assert nearest(NOWHERE, 4, endpoint, tmp_path / "here").folder == fetched.folder
    holder.close()
    assert nearest(NOWHERE, 4, endpoint, tmp_path / "here").folder == fetched.folder, "nobody listens there any more"
    assert holder.given == {4: 1}


def test_the_endpoint_is_looked_up_when_it_is_needed(tmp_path: Path, holder: Holder) -> None:
    published = publish_full(tmp_path / "there", 4, weights())
    place = tmp_path / "endpoint.json"
    with pytest.raises(PeerError, match="looking for an endpoint"):
        nearest(NOWHERE, 4, place, tmp_path / "here")
    holder.start().save(place)
    assert nearest(NOWHERE, 4, place, tmp_path / "here").version == 4
    place.unlink()
    assert nearest(NOWHERE, 4, place, tmp_path / "here").version == 4, "the file is gone, the version is here"

    def ask() -> Endpoint:
        raise AssertionError("with a digest nobody is asked about what is here")

    assert nearest(NOWHERE, 4, ask, tmp_path / "here", digest=published.digest).version == 4


def test_nobody_to_ask_is_told(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match=r"taking policy version 4: got none on this machine .*no such folder"):
        nearest(NOWHERE, 4, None, tmp_path / "here")
    publish_full(tmp_path / "there", 5, weights())
    with pytest.raises(VersionError, match="got version 5, expected version 4"):
        nearest(tmp_path / "there" / "v5", 4, lambda: None, tmp_path / "here")


def test_a_folder_that_is_set_later_and_links_into_memory(tmp_path: Path, memory: Path) -> None:
    publisher = Publisher("shm", tmp_path / "run")
    publisher.publish(0, weights)
    made = Holder(None)
    try:
        endpoint = made.start()
        with pytest.raises(PeerError, match="not held here"):
            nearest(NOWHERE, 0, endpoint, tmp_path / "here")
        made.folder = tmp_path / "run"
        assert (tmp_path / "run" / "v0").is_symlink()
        found = nearest(NOWHERE, 0, endpoint, tmp_path / "here")
        assert equal(found, weights())
        assert not found.folder.is_symlink()
        assert memory in (tmp_path / "run" / "v0").resolve().parents
    finally:
        made.close()


def test_a_receiver_gives_versions_too(tmp_path: Path) -> None:
    deltas(tmp_path / "there", 2)
    made = Receiver(ShardPlan({}, ()), idle_s=200.0, snapshots=lambda version: tmp_path / "there" / f"v{version}")
    try:
        assert nearest(NOWHERE, 1, made.start(), tmp_path / "here").is_delta
    finally:
        made.close()


# Deltas


def test_a_newcomer_gets_what_a_delta_rests_on(tmp_path: Path, holder: Holder) -> None:
    made = deltas(tmp_path / "there", 4)
    endpoint = holder.start()
    found = nearest(NOWHERE, 3, endpoint, tmp_path / "here")
    assert found.is_delta
    assert equal(found, made[3])
    assert found.digest == open_version(tmp_path / "there" / "v3").digest
    assert holder.given == {0: 1, 1: 1, 2: 1, 3: 1}
    found.verify_all()
    assert equal(open_version(tmp_path / "here" / "v3"), made[3]), "and whoever opens it by its name"


def test_what_lies_here_already_is_not_fetched_again(tmp_path: Path, holder: Holder) -> None:
    made = deltas(tmp_path / "there", 4)
    endpoint = holder.start()
    nearest(NOWHERE, 1, endpoint, tmp_path / "here", keep=9)
    assert equal(nearest(NOWHERE, 3, endpoint, tmp_path / "here", keep=9), made[3])
    assert holder.given == {0: 1, 1: 1, 2: 1, 3: 1}
    shutil.rmtree(tmp_path / "here" / "v1")
    assert equal(nearest(NOWHERE, 3, endpoint, tmp_path / "here", keep=9), made[3])
    assert holder.given == {0: 1, 1: 2, 2: 1, 3: 1}, "a gap is filled"


def test_the_newest_stay_with_what_they_rest_on(tmp_path: Path, holder: Holder) -> None:
    deltas(tmp_path / "there", 6, full_every=3)
    endpoint = holder.start()
    opened = [nearest(NOWHERE, version, endpoint, tmp_path / "here", keep=1) for version in range(6)]
    assert sorted(versions_in(tmp_path / "here")) == [3, 4, 5]
    opened[1].verify_all()  # was dropped, and is still whole for who holds it
    with pytest.raises(ValueError, match="at least 1"):
        nearest(NOWHERE, 9, endpoint, tmp_path / "here", keep=0)


def test_a_number_that_comes_twice_is_fetched_twice(tmp_path: Path, holder: Holder) -> None:
    endpoint = holder.start()
    for version in (4, 5, 6):
        publish_full(tmp_path / "there", version, weights(version))
        old = nearest(NOWHERE, version, endpoint, tmp_path / "here")
    again = publish_full(tmp_path / "there", 5, weights(9))  # a run that was set back; 6 goes
    assert equal(nearest(NOWHERE, 5, endpoint, tmp_path / "here"), weights(9))
    assert sorted(versions_in(tmp_path / "here")) == [5], "of a future that will not come nothing stays; 4 was too old"
    assert equal(old, weights(6)), "who holds it keeps it"
    with pytest.raises(VersionError, match="ask with the digest it has now"):
        nearest(NOWHERE, 5, endpoint, tmp_path / "here", digest=old.digest)
    assert nearest(NOWHERE, 5, None, tmp_path / "here").digest == again.digest


def test_what_the_holder_has_no_more_is_not_taken_for_it(tmp_path: Path, holder: Holder) -> None:
    endpoint = holder.start()
    published = publish_full(tmp_path / "there", 4, weights())
    nearest(NOWHERE, 4, endpoint, tmp_path / "here")
    shutil.rmtree(tmp_path / "there" / "v4")
    with pytest.raises(RefusedError, match="not held here"):
        nearest(NOWHERE, 4, endpoint, tmp_path / "here")
    assert nearest(NOWHERE, 4, endpoint, tmp_path / "here", digest=published.digest).digest == published.digest


def test_a_holder_that_is_silent_has_not_said_that_it_is_the_same(tmp_path: Path) -> None:
    published = publish_full(tmp_path / "here", 4, weights())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Endpoint("127.0.0.1", silent.getsockname()[1], "nobody", "t")
        with pytest.raises(PeerError, match=r"still the same: got silence for 0\.3 s"):
            nearest(NOWHERE, 4, place, tmp_path / "here", idle_s=0.3)
        assert nearest(NOWHERE, 4, place, tmp_path / "here", digest=published.digest).version == 4


def test_a_delta_whose_base_is_gone_is_not_here(tmp_path: Path, holder: Holder) -> None:
    made = deltas(tmp_path / "there", 2)
    endpoint = holder.start()
    digest = nearest(NOWHERE, 1, endpoint, tmp_path / "here").digest
    shutil.rmtree(tmp_path / "here" / "v0")
    assert equal(nearest(NOWHERE, 1, endpoint, tmp_path / "here", digest=digest), made[1])
    assert holder.given == {0: 2, 1: 1}


def test_a_delta_on_another_base_is_never_made_of_what_lies_here(tmp_path: Path, holder: Holder) -> None:
    publish_full(tmp_path / "here", 0, weights(5))
    made = deltas(tmp_path / "there", 2)
    assert equal(nearest(NOWHERE, 1, holder.start(), tmp_path / "here"), made[1])
    assert equal(open_version(tmp_path / "here" / "v0"), made[0])


# Once


def peer(tmp_path: Path, endpoint: Endpoint, **do: Any) -> subprocess.Popen[str]:
    place = tmp_path / "endpoint.json"
    endpoint.save(place)
    what = {"endpoint": str(place), "version": 4, "into": str(tmp_path / "here"), "point": "nowhere", "how": "die"} | do
    script = str(Path(__file__).with_name("weights_peer.py"))
    return subprocess.Popen([sys.executable, script, json.dumps(what)], stdout=subprocess.PIPE, text=True)


def test_processes_of_one_machine_fetch_once(tmp_path: Path, holder: Holder) -> None:
    published = publish_full(tmp_path / "there", 4, weights())
    endpoint = holder.start()
    handed = snapshot.locked(tmp_path / "here", "the test", 1.0)
    with handed:  # all of them come to the lock before one has it
        processes = [peer(tmp_path, endpoint) for _ in range(3)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "fetching\n"
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert json.loads(out.splitlines()[-1]) == [str(tmp_path / "here" / "v4"), published.digest]
    assert holder.given == {4: 1}


def test_waiting_for_another_ends(tmp_path: Path, holder: Holder) -> None:
    publish_full(tmp_path / "there", 4, weights())
    with (
        snapshot.locked(tmp_path / "here", "the test", 1.0),
        pytest.raises(PeerError, match=r"another process fetching into .* for 0\.2 s"),
    ):
        fetch_version(holder.start(), 4, tmp_path / "here", total_s=0.2)


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever removes the folder, as a cell does at its end, does not let two in at once."""
    into, real = tmp_path / "here", store.fcntl.flock

    def late(*args: Any) -> None:
        monkeypatch.setattr(store.fcntl, "flock", real)
        shutil.rmtree(into)
        real(*args)

    monkeypatch.setattr(store.fcntl, "flock", late)
    with (
        snapshot.locked(into, "the test", 5.0),
        pytest.raises(PeerError, match="another process fetching"),
        snapshot.locked(into, "the test", 0.1),
    ):
        raise AssertionError("two at once")


@pytest.mark.parametrize("point", ["fetch", "place"])
def test_a_process_killed_while_fetching_leaves_nothing_that_matters(
    tmp_path: Path, holder: Holder, point: str
) -> None:
    made = deltas(tmp_path / "there", 2)
    endpoint = holder.start()
    process = peer(tmp_path, endpoint, point=point, version=1)
    assert process.wait(60) == -signal.SIGKILL
    process.communicate()
    assert any(name.startswith(".v") for name in left(tmp_path / "here")), "it died in the middle"
    assert "v1" not in left(tmp_path / "here")
    assert equal(nearest(NOWHERE, 1, endpoint, tmp_path / "here"), made[1])
    assert left(tmp_path / "here") == ["v0", "v1"]
