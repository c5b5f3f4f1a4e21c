"""Giving memory back to the machine.

Invariant: called after the owner let go of its storage by name (`EngineCore.drop`), so no garbage collection is
needed, which in a process with transformers in it takes longer than the whole switch. Not here: deciding what to drop.
"""

from __future__ import annotations

import ctypes
import sys

import torch


def give_back(device: torch.device) -> None:
    """Return freed memory to the device or, on Linux, to the operating system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent outside glibc
        if trim is not None:
            trim(0)
