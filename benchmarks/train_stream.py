"""A training step with satellites that come free in the middle of it: joining midway, at the step's start, or never.

Real processes, weights and gradients; compute is paced (a micro-batch sleeps), so that one small machine can stand for
several cells. The core works from the start of each step. Satellites sample until `free_s` into the step. Four ways:

  never      the core computes everything
  next       a newcomer may join at a step's start only and is busy then: as never, but for the join itself
  wait       the step starts when all have come: the group is formed at the start and must be complete
  midway     satellites take the snapshot when they are free and lease what is left, gradients go over in memory

`join_over_transfer` is the time from "you are free" to the first micro-batch, over that of a plain copy of the
snapshot's bytes into the same memory; snapshots are verified while they are copied (`--verify before` reads them twice
and changes nothing if they are damaged). Every step's sum is checked. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import signal
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gyre_weights import Published, Publisher, apply, open_version
from gyre_weights.handover import Endpoint, Receiver, hand_over, whole
from gyre_weights.handover.plan import Form

WAYS = ("never", "next", "wait", "midway")
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    parameters: int
    satellites: int
    batches: int
    batch_s: float
    free_s: float
    lease: int
    verify: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Sixteen matrices."""
        return {f"layer.{i}.weight": (self.parameters // 16,) for i in range(16)}


def gradient(plan: Plan, ids: list[int]) -> dict[str, np.ndarray]:
    """The summed gradient of some micro-batches: exactly representable, so the order of sums does not matter."""
    value = np.float32(sum(i + 1 for i in ids))
    return {name: np.full(shape, value, np.float32) for name, shape in plan.shapes().items()}


class Ledger:
    """The step's micro-batches: leased, returned, counted once."""

    def __init__(self, batches: int) -> None:
        self.lock = threading.Condition()
        self.todo = list(range(batches))
        self.out: dict[int, list[int]] = {}
        self.done: set[int] = set()
        self.total = batches
        self.made = 0

    def lease(self, count: int) -> tuple[int, list[int]]:
        """Up to `count`; nothing when nothing is left to give out."""
        with self.lock:
            ids, self.todo = self.todo[:count], self.todo[count:]
            self.made += 1
            self.out[self.made] = ids
            return self.made, ids

    def returned(self, lease: int) -> None:
        """Its holder is gone."""
        with self.lock:
            self.todo = self.out.pop(lease, []) + self.todo
            self.lock.notify_all()

    def counted(self, lease: int) -> list[int]:
        """Its gradient is in the sum."""
        with self.lock:
            ids = self.out.pop(lease)
            assert not self.done & set(ids)
            self.done |= set(ids)
            self.lock.notify_all()
            return ids

    @property
    def complete(self) -> bool:
        """Every batch counted."""
        return len(self.done) == self.total


def satellite(plan: Plan, endpoint: Endpoint, pipe: Any) -> None:
    """A cell's process: has its memory, takes snapshots, computes, hands over."""
    weights = {name: np.zeros(shape, np.float32) for name, shape in plan.shapes().items()}
    while (word := pipe.recv()) is not None:
        if word[0] == "join":
            began = time.perf_counter()
            held = apply(word[1], weights, verify=plan.verify)
            pipe.send(("joined", held.version, time.perf_counter() - began))
        elif word[0] == "copy":
            pipe.send(plain_copy(word[1], weights))
        else:
            _, name, version, ids = word
            time.sleep(plan.batch_s * len(ids))
            done = hand_over(endpoint, name, version, gradient(plan, ids), meta={"ids": ids})
            pipe.send((done.bytes, done.seconds))


def plain_copy(published: Published, weights: dict[str, np.ndarray]) -> float:
    """Seconds to read as many bytes from the published file into the same memory, with no names and no checks."""
    (path,) = Path(published.location).glob("*.safetensors")
    best = 1e9
    for _ in range(3):
        began = time.perf_counter()
        with path.open("rb", buffering=0) as reader:
            for array in weights.values():
                view = memoryview(array).cast("B")
                while view:
                    view = view[reader.readinto(view) :]
        best = min(best, time.perf_counter() - began)
    return best


@dataclass
class Cell:
    """A satellite's process."""

    process: Any
    pipe: Any
    version: int = -1
    join_s: list[float] = field(default_factory=list)
    first_work_s: list[float] = field(default_factory=list)
    handover_s: list[float] = field(default_factory=list)


class Core:
    """Weights, the ledger, and the step."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.weights = {name: np.ones(shape, np.float32) for name, shape in plan.shapes().items()}
        forms: dict[str, Form] = {name: ("F32", shape) for name, shape in plan.shapes().items()}
        self.receiver = Receiver(whole(forms))
        self.endpoint = self.receiver.start()
        self.publisher = Publisher("shm", folder)
        self.version = 0
        self.publish_s: list[float] = []
        self.contributions = 0
        self.cells = [self.make_cell() for _ in range(plan.satellites)]
        self.publish()

    def make_cell(self) -> Cell:
        """Start a satellite."""
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=satellite, args=(self.plan, self.endpoint, theirs), daemon=True)
        process.start()
        return Cell(process, ours)

    def publish(self) -> None:
        """The version of now, in shared memory; steps of it may come."""
        self.published = self.publisher.publish(self.version, lambda: self.weights)
        self.publish_s.append(self.published.seconds)
        self.receiver.open_step(self.version)

    def step(self, way: str, kill: bool = False) -> float:
        """One step; seconds from its start to its end, publication left out."""
        plan, ledger = self.plan, Ledger(self.plan.batches)
        total = {name: np.zeros(shape, np.float32) for name, shape in plan.shapes().items()}
        arrived: queue.Queue[int] = queue.Queue()
        began = time.perf_counter()
        threads = []
        if way in ("wait", "midway"):
            for index, cell in enumerate(self.cells):
                dies = kill and index == 0
                thread = threading.Thread(target=self.serve, args=(cell, ledger, arrived, began, dies))
                thread.start()
                threads.append(thread)
        if way == "wait":
            time.sleep(plan.free_s)
        while not ledger.complete:
            while not arrived.empty():
                self.add(total, ledger, arrived.get())
            lease, ids = ledger.lease(1)
            if ids:
                time.sleep(plan.batch_s)
                for name, part in gradient(plan, ids).items():
                    total[name] += part
                ledger.counted(lease)
                continue
            ledger.returned(lease)
            try:
                self.add(total, ledger, arrived.get(timeout=0.005))
            except queue.Empty:
                continue
        seconds = time.perf_counter() - began
        for thread in threads:
            thread.join()
        expected = plan.batches * (plan.batches + 1) / 2
        assert all((array == expected).all() for array in total.values()), "the sum is not every batch once"
        for name, array in self.weights.items():
            array -= 1e-6 * total[name]
        self.version += 1
        self.publish()
        return seconds

    def add(self, total: dict[str, np.ndarray], ledger: Ledger, lease: int) -> None:
        """Count a contribution that lies in memory."""
        for piece, part in self.receiver.take(f"{self.version}.{lease}").pieces():
            total[piece.name] += part.numpy()
        ledger.counted(lease)
        self.contributions += 1

    def serve(self, cell: Cell, ledger: Ledger, arrived: queue.Queue[int], began: float, dies: bool) -> None:
        """A satellite's part of the step, from the moment it is free."""
        time.sleep(max(0.0, began + self.plan.free_s - time.perf_counter()))
        free = time.perf_counter()
        cell.pipe.send(("join", self.published))
        _, cell.version, seconds = cell.pipe.recv()
        cell.join_s.append(seconds)
        while True:
            lease, ids = ledger.lease(self.plan.lease)
            if not ids:
                ledger.returned(lease)
                return
            if free:
                cell.first_work_s.append(time.perf_counter() - free)
                free = 0.0
            try:
                cell.pipe.send(("work", f"{self.version}.{lease}", cell.version, ids))
                if dies:
                    time.sleep(self.plan.batch_s / 2)
                    os.kill(cell.process.pid, signal.SIGKILL)
                _, took = cell.pipe.recv()
            except (EOFError, OSError):
                ledger.returned(lease)
                return
            cell.handover_s.append(took)
            arrived.put(lease)

    def close(self) -> None:
        """End all processes and give the memory back."""
        for cell in self.cells:
            if cell.process.is_alive():
                cell.pipe.send(None)
            cell.process.join(10)
        self.receiver.close()
        self.publisher.close()


def measure(plan: Plan, steps: int, folder: Path) -> dict[str, Any]:
    """All figures."""
    core = Core(plan, folder)
    try:
        core.step("midway")  # first touches
        for cell in core.cells:  # all at once, as they join
            cell.pipe.send(("copy", core.published))
        copy_s = [cell.pipe.recv() for cell in core.cells]
        for cell in core.cells:
            cell.join_s.clear()
            cell.first_work_s.clear()
            cell.handover_s.clear()
        seconds = {way: statistics.median(core.step(way) for _ in range(steps)) for way in WAYS}
        joins = [s for cell in core.cells for s in cell.first_work_s]
        snapshot = [s for cell in core.cells for s in cell.join_s]
        handed = [s for cell in core.cells for s in cell.handover_s]
        nbytes, contributions = core.receiver.counts.payload_bytes, core.contributions
        death = core.step("midway", kill=True)
        version = open_version(core.published)
    finally:
        core.close()
    gradient_bytes = plan.parameters * 4
    free, work = plan.free_s, plan.batches * plan.batch_s
    return {
        "seconds": {way: round(value, 3) for way, value in seconds.items()},
        "midway_with_a_death_s": round(death, 3),
        "ideal_midway_s": round(free + (work - free) / (plan.satellites + 1), 3),
        "midway_over_never": round(seconds["midway"] / seconds["never"], 3),
        "midway_over_wait": round(seconds["midway"] / seconds["wait"], 3),
        "snapshot_bytes": version.manifest.full_bytes,
        "publish_s": round(statistics.median(core.publish_s), 4),
        "snapshot_s": round(statistics.median(snapshot), 4),
        "plain_copy_s": round(statistics.median(copy_s), 4),
        "join_to_work_s": round(statistics.median(joins), 4),
        "join_over_transfer": round(statistics.median(joins) / statistics.median(copy_s), 2),
        "handover_s": round(statistics.median(handed), 4),
        "handover_bytes": nbytes,
        "handover_over_gradient": nbytes / (contributions * gradient_bytes),
        "contributions": contributions,
    }


def hardware() -> dict[str, Any]:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return {
        "cpu": model, "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(),
        "note": "paced compute: a micro-batch sleeps; snapshots and gradients are real; one virtual machine",
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--parameters", type=int, default=16 << 20)
    parser.add_argument("--satellites", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--batch-s", type=float, default=0.25)
    parser.add_argument("--free-s", type=float, default=4.0)
    parser.add_argument("--lease", type=int, default=3)
    parser.add_argument("--verify", default="during", choices=["before", "during"], help="of snapshots")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    plan = Plan(args.parameters, args.satellites, args.batches, args.batch_s, args.free_s, args.lease, args.verify)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(plan, args.steps, Path(folder) / "weights")
    result = {
        "benchmark": "train_stream", **found, "plan": plan.__dict__ | {"steps": args.steps}, "hardware": hardware(),
    }  # fmt: skip
    if not args.json:
        for name, value in found.items():
            print(f"{name:24} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
