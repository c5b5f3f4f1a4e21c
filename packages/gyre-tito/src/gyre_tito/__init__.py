"""Token-in-token-out recording proxy, trajectory tree and store.

The names below are the package's public face. They load on first use, so that a reader of stores does not import the
web server, and nothing imports a model library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_tito.arrays import TreeArrays
    from gyre_tito.backend import (
        Backend,
        BackendError,
        BackendOverloadedError,
        GenerateCall,
        GenerateChunk,
        PromptTooLongError,
        Sampling,
    )
    from gyre_tito.chat_format import ChatFormat
    from gyre_tito.dispatch import Limits
    from gyre_tito.families import load_format, make_format
    from gyre_tito.records import (
        CallRecord,
        ExecutionInfo,
        ExecutionSpec,
        Link,
        OpenedExecution,
        Prescribed,
        Score,
        SessionInfo,
        Status,
    )
    from gyre_tito.schema import StoreError
    from gyre_tito.server import ProxyServer, create_app
    from gyre_tito.service import TitoService
    from gyre_tito.store import Store
    from gyre_tito.tree import TrajectoryTree

__all__ = [
    "Backend",
    "BackendError",
    "BackendOverloadedError",
    "CallRecord",
    "ChatFormat",
    "ExecutionInfo",
    "ExecutionSpec",
    "GenerateCall",
    "GenerateChunk",
    "Limits",
    "Link",
    "OpenedExecution",
    "Prescribed",
    "PromptTooLongError",
    "ProxyServer",
    "Sampling",
    "Score",
    "SessionInfo",
    "Status",
    "Store",
    "StoreError",
    "TitoService",
    "TrajectoryTree",
    "TreeArrays",
    "create_app",
    "load_format",
    "make_format",
]

_HOMES = {
    "arrays": ("TreeArrays",),
    "backend": (
        "Backend",
        "BackendError",
        "BackendOverloadedError",
        "GenerateCall",
        "GenerateChunk",
        "PromptTooLongError",
        "Sampling",
    ),
    "chat_format": ("ChatFormat",),
    "families": ("load_format", "make_format"),
    "records": (
        "CallRecord",
        "ExecutionInfo",
        "ExecutionSpec",
        "Link",
        "OpenedExecution",
        "Prescribed",
        "Score",
        "SessionInfo",
        "Status",
    ),
    "schema": ("StoreError",),
    "server": ("ProxyServer", "create_app"),
    "dispatch": ("Limits",),
    "service": ("TitoService",),
    "store": ("Store",),
    "tree": ("TrajectoryTree",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"gyre_tito.{module}"), name)
    raise AttributeError(f"module 'gyre_tito' has no attribute {name!r}")
