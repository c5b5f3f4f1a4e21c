"""Work over memory by several threads is the work done in turn: results, errors, and none on one processor."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from gyre_weights import CorruptError, MismatchError, Verify, apply, open_version, parallel, publish_full

BIG = parallel.SMALL


@pytest.fixture(params=[1, 3], ids=["one processor", "three"])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda pid: set(range(request.param)))
    return int(request.param)


def test_every_item_is_worked_on_once_and_the_first_error_is_told(processors: int) -> None:
    seen: list[int] = []
    threads: set[int] = set()
    turn = threading.Barrier(min(processors, 2), timeout=60)

    def work(item: int) -> None:
        if item < 2 and processors > 1:
            turn.wait()  # both are at work at the same time, or this breaks
        seen.append(item)
        threads.add(threading.get_ident())

    parallel.each(work, range(7), lambda item: BIG - item)
    assert sorted(seen) == list(range(7))
    assert (threads == {threading.get_ident()}) == (processors == 1)

    def fail(item: int) -> None:
        if item in (2, 5):
            raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 2"):
        parallel.each(fail, range(7), lambda item: BIG + item)


def test_little_work_makes_no_threads(processors: int) -> None:
    threads: set[int] = set()
    parallel.each(lambda item: threads.add(threading.get_ident()), range(9), lambda item: 1)
    assert threads == {threading.get_ident()}
    parallel.each(lambda item: pytest.fail("there is none"), [], lambda item: 1)


@pytest.mark.parametrize("verify", list(Verify))
def test_versions_arrive_whole_in_every_order_of_checking(processors: int, verify: Verify, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {f"t{i}": random.integers(0, 255, (3, 2 * BIG // 3 + i), np.uint8) for i in range(4)}
    made = publish_full(tmp_path, 1, tensors)
    targets = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    apply(made, targets, verify=verify)
    assert all(np.array_equal(targets[name], tensors[name]) for name in tensors)
    assert open_version(made).digest == publish_full(tmp_path / "other", 1, tensors, kind="shm").digest


@pytest.mark.parametrize("verify", [Verify.BEFORE, Verify.DURING])
def test_the_damaged_tensor_is_named(processors: int, verify: Verify, tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full(BIG, i, np.uint8) for i in range(4)}
    made = publish_full(tmp_path, 1, tensors)
    entry = open_version(made).manifest.stored["t2"]
    with (Path(made.location) / entry.file).open("r+b") as file:
        file.seek(entry.offset + BIG // 2)
        file.write(b"\xff")
    targets = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.raises(CorruptError, match="t2 with digest"):
        apply(made, targets, verify=verify)
    assert any(target.any() for target in targets.values()) == (verify is Verify.DURING)


def test_a_file_that_is_cut_while_it_is_read_is_told(tmp_path: Path) -> None:
    made = publish_full(tmp_path, 1, {"t": np.ones(BIG, np.uint8)})
    version, target = open_version(made), np.zeros(BIG, np.uint8)
    version["t"]  # mapped, and found whole
    entry = version.manifest.stored["t"]
    with (Path(made.location) / entry.file).open("r+b") as file:
        file.truncate(entry.offset + BIG // 2)
    with pytest.raises(CorruptError, match="cut short"):
        apply(version, {"t": target}, verify=Verify.DURING)
    with pytest.raises(MismatchError):
        apply(version, {"t": target[:-1]}, verify=Verify.DURING)
