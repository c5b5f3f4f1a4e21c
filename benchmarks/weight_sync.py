"""A policy version from trainer memory to engine memory on one machine, each way beside a plain copy.

A plain copy uses the same medium: it writes the bytes of all tensors into one fresh file (forced to disk for disk),
puts it in the place of the one before and reads it back into the targets; it has no names and no checks, and a reader
of the one before is left in peace, as by ours. `rewrite_shm` does without that: it writes over the one file there is,
which a reader would see half new. Ours publishes (digests, manifest, atomic folder), opens, verifies and writes into
the same targets, and drops the version before; in shared memory it writes over memory of dropped versions that nobody
has open. `safetensors` is the usual way, save_file and load_file. Deltas have 2 % of the elements changed, at random.
Times are the least of several rounds, in shared memory after two that are not counted; reads come from the page cache
in all ways. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gyre_weights import Held, Shadow, Verify, apply, publish_delta, publish_full
from gyre_weights.collective import broadcast_version, receive_version
from gyre_weights.groups import StoreServer, form_group
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
SIZES = {"0.1B": (640, 12), "0.5B": (1280, 20), "1B": (1792, 22)}
"""Hidden size and layers of a Qwen3-like model with a vocabulary of 50,000."""
CHANGED = 0.02
RATIOS = ("disk_vs_copy", "shm_vs_copy", "shm_during_vs_copy", "shm_vs_rewrite")
"""Given for all sizes together, as the worst of them."""


def shapes(hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (50_000, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        found |= {f"{at}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{at}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qo"}
        found |= {f"{at}self_attn.{part}_proj.weight": (hidden // 2, hidden) for part in "kv"}
        found |= {f"{at}mlp.{part}_proj.weight": (3 * hidden, hidden) for part in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (hidden, 3 * hidden)
    return found


def make(size: str, dtype: torch.dtype) -> Tensors:
    """Random weights."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.int16 if dtype.itemsize == 2 else torch.int32
    return {
        name: torch.randint(0, 2**15 - 1, shape, generator=generator, dtype=wide).view(dtype)
        for name, shape in shapes(*SIZES[size]).items()
    }


def change(tensors: Tensors, seed: int) -> None:
    """Change CHANGED of the elements in place."""
    random = np.random.default_rng(seed)
    for tensor in tensors.values():
        words = tensor.view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()
        at = random.integers(0, len(words), int(len(words) * CHANGED))
        words[at] ^= 1


def equal(left: Tensors, right: Tensors) -> bool:
    """Bit for bit."""
    return all(torch.equal(a.view(torch.uint8), right[n].view(torch.uint8)) for n, a in left.items())


def plain_copy(source: Tensors, targets: Tensors, path: Path, flush: bool, *, over: bool = False) -> None:
    """Through one file, with nothing else; `over`: through the same one again and again."""
    draft = path if over else path.with_suffix(".draft")
    with draft.open("r+b" if over and path.exists() else "wb", buffering=0) as writer:
        for tensor in source.values():
            write_all(writer, tensor)
        if flush:
            os.fsync(writer.fileno())
    draft.replace(path)
    with path.open("rb", buffering=0) as reader:
        for tensor in targets.values():
            view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            while view:
                view = view[reader.readinto(view) :]


def write_all(writer: Any, tensor: torch.Tensor) -> None:
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    while view:
        view = view[writer.write(view) :]


def usual(source: Tensors, targets: Tensors, path: Path, flush: bool) -> None:
    """save_file and load_file."""
    draft = path.with_suffix(".draft")
    save_file(source, draft)
    if flush:
        handle = os.open(draft, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    draft.replace(path)
    for name, tensor in load_file(path).items():
        targets[name].copy_(tensor)


class Bench:
    """One model size."""

    def __init__(self, size: str, dtype: torch.dtype, disk: Path, memory: Path) -> None:
        self.source = make(size, dtype)
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in self.source.items()}
        self.roots = {"disk": disk, "shm": memory}
        self.nbytes = sum(tensor.nbytes for tensor in self.source.values())
        self.version = 0
        self.parts: dict[str, dict[str, float]] = {}
        self.bytes: dict[str, int] = {}

    def full(self, kind: str, verify: Verify) -> None:
        """Publish and apply a whole version."""
        self.version += 1
        made = publish_full(self.roots[kind], self.version, self.source, kind=kind, keep=1)
        began = time.perf_counter()
        apply(made, self.targets, verify=verify)
        self.parts[f"{kind}_{verify.value}"] = {"publish_s": made.seconds, "apply_s": time.perf_counter() - began}
        self.bytes[kind] = made.bytes

    def delta(self, kind: str, shadow: Shadow, held: Held) -> Held:
        """Publish and apply what changed."""
        self.version += 1
        made = publish_delta(
            self.roots[kind], self.version, self.source, shadow, keep=1, durable=kind == "disk"
        )  # fmt: skip
        began = time.perf_counter()
        held = apply(made, self.targets, held=held)
        self.parts[f"delta_{kind}"] = {"publish_s": made.seconds, "apply_s": time.perf_counter() - began}
        self.bytes[f"delta_{kind}"] = made.bytes
        return held

    def timed(self, call: Callable[[], Any]) -> float:
        """Seconds of a call that must leave the source's values in the targets."""
        for tensor in self.targets.values():
            tensor.view(torch.uint8).view(-1)[:1] ^= 1
        began = time.perf_counter()
        call()
        seconds = time.perf_counter() - began
        assert equal(self.source, self.targets)
        return seconds

    def whole_ways(self, rounds: int) -> dict[str, float]:
        """Least seconds of each way that moves everything. Ways by disk take turns, since a disk's speed changes with
        what came before; in memory each way's files go before the next one's come: all would not fit."""
        best = {"memcpy": self.best(lambda: [t.copy_(self.source[n]) for n, t in self.targets.items()], rounds)}
        for kind, root in self.roots.items():
            ways = self.ways_of(kind, root)
            if kind == "disk":
                turns = [{name: self.timed(call) for name, call in ways.items()} for _ in range(rounds)]
                best |= {name: min(turn[name] for turn in turns) for name in ways}
            else:
                for name, call in ways.items():
                    best[name] = self.best(call, rounds, before=2)  # from then on memory is used again
                    shutil.rmtree(root)
                    root.mkdir()
        return best

    def ways_of(self, kind: str, root: Path) -> dict[str, Callable[[], Any]]:
        """The ways through one medium, by name."""
        flush = kind == "disk"
        ways: dict[str, Callable[[], Any]] = {
            f"copy_{kind}": lambda: plain_copy(self.source, self.targets, root / "plain", flush),
            f"safetensors_{kind}": lambda: usual(self.source, self.targets, root / "usual", flush),
        }
        if kind == "shm":
            ways["rewrite_shm"] = lambda: plain_copy(self.source, self.targets, root / "over", flush, over=True)
        for verify in (Verify.BEFORE, Verify.DURING, Verify.NONE):
            ways[f"{kind}_{verify.value}"] = lambda v=verify: self.full(kind, v)
        return ways

    def best(self, call: Callable[[], Any], rounds: int, before: int = 0) -> float:
        """Least seconds, after `before` runs that are not counted."""
        for _ in range(before):
            self.timed(call)
        return min(self.timed(call) for _ in range(rounds))

    def delta_ways(self, rounds: int) -> dict[str, float]:
        """Least seconds of a delta by each medium, after a full version as its base."""
        best: dict[str, float] = {}
        for kind, root in self.roots.items():
            self.version += 1
            base = publish_full(root, self.version, self.source, kind=kind, keep=1)
            shadow, held = Shadow(base.version, base.digest, self.source), apply(base, self.targets)
            for i in range(rounds):
                change(self.source, i)
                began = time.perf_counter()
                held = self.delta(kind, shadow, held)
                seconds = time.perf_counter() - began
                assert equal(self.source, self.targets)
                best[f"delta_{kind}"] = min(best.get(f"delta_{kind}", 1e9), seconds)
            shutil.rmtree(root)
            root.mkdir()
        return best

    def collective(self, rounds: int) -> float:
        """Least seconds of a broadcast to a process that writes into place."""
        store = StoreServer()
        context = multiprocessing.get_context("fork")
        child = context.Process(target=follow, args=(store.port, self.targets, rounds))
        child.start()
        best = 1e9
        with form_group((store.host, store.port), "bench", 0, 2, timeout_s=120.0) as group:
            for version in range(rounds):
                best = min(best, broadcast_version(group, version, self.source).seconds)
        child.join()
        store.close()
        assert child.exitcode == 0
        return best


def follow(port: int, targets: Tensors, rounds: int) -> None:
    """The receiving process."""
    torch.set_num_threads(1)
    with form_group(("127.0.0.1", port), "bench", 1, 2, timeout_s=120.0) as group:
        for _ in range(rounds):
            receive_version(group, targets)


def measure(size: str, dtype: torch.dtype, rounds: int, disk: Path, memory: Path) -> dict[str, Any]:
    """All figures of one size."""
    bench = Bench(size, dtype, disk, memory)
    collective = bench.collective(rounds)
    seconds = bench.whole_ways(rounds) | {"collective": collective} | bench.delta_ways(rounds)
    deltas = {kind: seconds[f"delta_{kind}"] / seconds[f"{kind}_before"] for kind in ("disk", "shm")}
    return {
        "parameters": sum(t.numel() for t in bench.source.values()),
        "bytes": bench.nbytes,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "parts": {n: {k: round(v, 4) for k, v in p.items()} for n, p in bench.parts.items()},
        "published_bytes": bench.bytes | {"collective": bench.nbytes},
        "gb_per_s": {name: round(bench.nbytes / value / 1e9, 3) for name, value in seconds.items()},
        "disk_vs_copy": round(seconds["disk_before"] / seconds["copy_disk"], 3),
        "shm_vs_copy": round(seconds["shm_before"] / seconds["copy_shm"], 3),
        "shm_during_vs_copy": round(seconds["shm_during"] / seconds["copy_shm"], 3),
        "shm_vs_rewrite": round(seconds["shm_before"] / seconds["rewrite_shm"], 3),
        "disk_vs_safetensors": round(seconds["disk_before"] / seconds["safetensors_disk"], 3),
        "shm_vs_safetensors": round(seconds["shm_before"] / seconds["safetensors_shm"], 3),
        "delta_vs_full_bytes": round(bench.bytes["delta_disk"] / bench.bytes["disk"], 4),
        "delta_vs_full_seconds": {kind: round(value, 4) for kind, value in deltas.items()},
    }


def hardware() -> dict[str, Any]:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return {
        "cpu": model, "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(),
        "torch": torch.__version__, "note": "one virtual machine; disk is a virtual block device, shm is tmpfs",
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--sizes", nargs="+", default=["0.1B", "0.5B", "1B"], choices=sorted(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", default=None, help="a folder on the disk to measure; the system's temporary one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for size in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.disk) as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            roots = [Path(disk) / "w", Path(memory) / "w"]
            for root in roots:
                root.mkdir()
            found[size] = measure(size, getattr(torch, args.dtype), args.rounds, *roots)
        if not args.json:
            print(size, json.dumps(found[size], indent=1))
    worst = {key: max(item[key] for item in found.values()) for key in RATIOS}
    result = {
        "benchmark": "weight_sync", "dtype": args.dtype, "changed": CHANGED, **worst,
        "delta_vs_full": max(item["delta_vs_full_bytes"] for item in found.values()),
        "delta_vs_full_seconds": {
            kind: max(item["delta_vs_full_seconds"][kind] for item in found.values()) for kind in ("disk", "shm")
        },
        "sizes": found, "hardware": hardware(),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
