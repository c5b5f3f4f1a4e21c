"""What this package takes from the process environment; nothing else in it reads one."""

from __future__ import annotations

import os


def wanted_platform() -> str:
    """SGLANG_PLATFORM: the platform plugin SGLang was asked to use, "" for its own choice."""
    return os.environ.get("SGLANG_PLATFORM", "")


def orders_folder() -> str:
    """GYRE_SGLANG_ORDERS: where the engine puts what the weight loader is to do."""
    return os.environ["GYRE_SGLANG_ORDERS"]
