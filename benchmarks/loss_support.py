"""What the loss benchmarks share: memory high-water marks, the hardware note, the JSON line.

Not a benchmark itself.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def peak_bytes() -> int:
    """High-water mark of this process's resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run ``work`` in a fork of its own, so that its high-water mark is its own; returns its dict."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            with os.fdopen(write, "w") as out:
                json.dump(work(), out)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as source:
        text = source.read()
    if os.waitpid(child, 0)[1] != 0 or not text:
        raise RuntimeError("the measured child process failed; its error is above")
    return json.loads(text)


def hardware() -> str:
    """One line on the machine that measured."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used{gpu}, torch {torch.__version__}"


def report(result: dict[str, Any], as_json: bool) -> None:
    """Print the result, one figure a line for people, and as the last line one JSON object."""
    result = {**result, "hardware": hardware()}
    if not as_json:
        for name, value in result.items():
            print(f"{name:32} {value}", file=sys.stderr)
    print(json.dumps(result))
