"""Peers at an address of their own: what listens is bound to it alone, IPv4 or IPv6, in every lane."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gyre_weights import PeerError, publish_full
from gyre_weights.groups import StoreServer, form_group
from gyre_weights.handover import Holder, Receiver, hand_over, whole
from weights_models import nearest, same, weights


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


HOSTS = [
    "127.0.0.2",
    "localhost",
    pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")),
]


@pytest.mark.parametrize("lane", ["socket", "group"])
@pytest.mark.parametrize("host", HOSTS)
def test_a_gradient_to_an_address(host: str, lane: str) -> None:
    gradient = {"a": np.arange(1000, dtype=np.float32)}
    core = Receiver(whole({"a": ("F32", (1000,))}), host=host, idle_s=200.0)
    try:
        core.open_step(1)
        far = replace(core.start(), local="elsewhere")
        assert far.host == host
        assert hand_over(far, "c", 1, gradient, lane=lane, idle_s=200.0).lanes == (lane,)
        assert np.array_equal(core.take("c").tensors()["a"].numpy(), gradient["a"])
        if host == "127.0.0.2":
            store = core._store
            assert (store is not None) == (lane == "group")
            for port in [far.port] + ([store.port] if store else []):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port), timeout=5)
    finally:
        core.close()


@pytest.mark.parametrize("host", HOSTS)
def test_a_version_from_an_address(tmp_path: Path, host: str) -> None:
    publish_full(tmp_path / "there", 0, weights())
    holder = Holder(tmp_path / "there", host=host)
    try:
        far = replace(holder.start(), local="elsewhere")
        found = nearest("/nowhere", 0, far, tmp_path / "here")
        assert same({name: found[name].torch() for name in found}, weights())
    finally:
        holder.close()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_every_address_is_none(host: str) -> None:
    with pytest.raises(PeerError, match="stands for every address"):
        Holder(None, host=host).start()
    with pytest.raises(PeerError, match="stands for every address"):
        StoreServer(host)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PeerError, match=r"got '192\.0\.2\.1' as the host.*expected a name or address of this machine"):
        Holder(None, host="192.0.2.1").start()


@pytest.mark.parametrize("host", HOSTS)
def test_a_group_at_an_address(host: str) -> None:
    store = StoreServer(host)
    try:
        with form_group((host, store.port), "one", 0, 1, timeout_s=20) as group:
            assert group.size == 1
        assert socket.getaddrinfo(host, store.port, type=socket.SOCK_STREAM)[0][4][0] == store.host
    finally:
        store.close()
