"""Groups that form and dissolve: broadcast of a version, refusals before a byte moves, deaths and hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_weights import Held, MismatchError, PeerError, publish_full
from gyre_weights.collective import broadcast_version, receive_tensors, receive_version
from gyre_weights.groups import StoreServer, form_group
from weights_models import empty_like, same, weights


@pytest.fixture
def store() -> Iterator[StoreServer]:
    made = StoreServer()
    yield made
    made.close()


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run each in a thread; results or the errors they raised."""
    results: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return results


def member(
    store: StoreServer, name: str, rank: int, size: int, work: Callable[[Any], Any], timeout_s: float = 60.0
) -> Any:
    with form_group((store.host, store.port), name, rank, size, timeout_s=timeout_s) as group:
        return work(group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 30])
def test_all_members_get_the_version(store: StoreServer, dtype: torch.dtype, bucket_bytes: int, tmp_path: Path) -> None:
    tensors = weights(dtype=dtype)
    targets = [empty_like(tensors) for _ in range(2)]
    sent, *held = together(
        lambda: member(store, "v5", 0, 3, lambda g: broadcast_version(g, 5, tensors, bucket_bytes=bucket_bytes)),
        *(lambda r=r: member(store, "v5", r, 3, lambda g: receive_version(g, targets[r - 1])) for r in (1, 2)),
    )
    assert all(same(target, tensors) for target in targets)
    assert held == [Held(5, sent.digest)] * 2
    assert sent.bytes == sum(t.nbytes for t in tensors.values())
    assert sent.digest == publish_full(tmp_path, 5, tensors).digest


def test_numpy_and_streams_can_be_sent_and_targets_may_be_cast(store: StoreServer) -> None:
    tensors = weights()
    arrays = ((name, tensor.numpy()) for name, tensor in tensors.items())
    targets = {name: t.to(torch.bfloat16) for name, t in empty_like(tensors).items()}
    sent, _ = together(
        lambda: member(store, "n", 0, 2, lambda g: broadcast_version(g, 1, arrays)),
        lambda: member(store, "n", 1, 2, lambda g: receive_version(g, targets, cast=True)),
    )
    assert sent.version == 1
    assert same(targets, {name: t.to(torch.bfloat16) for name, t in tensors.items()})


def test_a_member_that_does_not_fit_stops_it_before_weights_move(store: StoreServer) -> None:
    tensors = weights()
    good, bad = empty_like(tensors), empty_like(tensors) | {"model.norm.weight": torch.zeros(12)}
    results = together(
        lambda: member(store, "m", 0, 3, lambda g: broadcast_version(g, 1, tensors)),
        lambda: member(store, "m", 1, 3, lambda g: receive_version(g, good)),
        lambda: member(store, "m", 2, 3, lambda g: receive_version(g, bad)),
    )
    assert [type(r) for r in results] == [PeerError, PeerError, MismatchError]
    assert all("member 2" in str(r) and "[11], expected [12]" in str(r) for r in results[:2])
    assert same(good, empty_like(tensors))


@pytest.mark.parametrize("missing", [True, False])
def test_names_that_differ_are_told(store: StoreServer, missing: bool) -> None:
    tensors, targets = weights(), empty_like(weights())
    if missing:
        del targets["model.norm.weight"]
    else:
        targets["extra"] = torch.zeros(1)
    _, error = together(
        lambda: member(store, "names", 0, 2, lambda g: broadcast_version(g, 1, tensors)),
        lambda: member(store, "names", 1, 2, lambda g: receive_version(g, targets)),
    )
    assert ("model.norm.weight that no target has" if missing else "extra that is not sent") in str(error)


def test_damage_on_the_way_is_found(store: StoreServer) -> None:
    tensors = weights()

    def damaging(group: Any) -> Any:
        real = group.broadcast

        def broadcast(tensor: torch.Tensor, root: int) -> None:
            real(tensor, root)
            if tensor.dtype == torch.uint8 and tensor.numel() > 1_000_000:
                tensor[1_000_000] ^= 1

        group.broadcast = broadcast
        return receive_tensors(group, lambda name, tensor: None)

    sender, error = together(
        lambda: member(store, "d", 0, 2, lambda g: broadcast_version(g, 1, tensors)),
        lambda: member(store, "d", 1, 2, damaging),
    )
    assert isinstance(error, MismatchError)
    assert "other bytes than sent" in str(error)
    assert isinstance(sender, PeerError)


def test_nobody_comes(store: StoreServer) -> None:
    with pytest.raises(PeerError, match="all members within 1 s"):
        member(store, "alone", 0, 2, lambda g: None, timeout_s=1.0)
    with pytest.raises(PeerError):
        member(StoreServerGone(), "x", 0, 1, lambda g: None, timeout_s=1.0)


class StoreServerGone:
    host, port = "127.0.0.1", 1


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_member_that_dies_or_hangs_ends_it_for_the_others_and_groups_go_on(store: StoreServer, how: str) -> None:
    code = (
        "import os, signal, sys, torch; from gyre_weights.groups import form_group;"
        "host, port = sys.argv[1], int(sys.argv[2]);"
        "ctx = form_group((host, port), 'doomed', 1, 2, timeout_s=30); group = ctx.__enter__();"
        f"os.kill(os.getpid(), signal.{how})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, store.host, str(store.port)])

    def doomed() -> None:
        with form_group((store.host, store.port), "doomed", 0, 2, timeout_s=30.0) as group:
            group._timeout = 2.0
            for _ in range(64):  # more than the sockets' buffers take
                group.broadcast(torch.zeros(1 << 20), 0)

    with pytest.raises(PeerError):
        doomed()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    values = together(
        lambda: member(store, "next", 0, 2, lambda g: g.send(torch.arange(5), 1)),
        lambda: member(store, "next", 1, 2, lambda g: _received(g)),
    )
    assert values[1].tolist() == [0, 1, 2, 3, 4]


def _received(group: Any) -> torch.Tensor:
    tensor = torch.zeros(5, dtype=torch.int64)
    group.receive(tensor, 0)
    return tensor


def test_an_unknown_backend_is_refused(store: StoreServer) -> None:
    with (
        pytest.raises(ValueError, match="gloo or nccl"),
        form_group((store.host, store.port), "b", 0, 1, backend="mpi", timeout_s=2.0),
    ):
        pass
