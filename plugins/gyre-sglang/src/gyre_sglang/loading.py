"""A prepared version into a running server, while nothing is sampled.

Two ways: by order, in every worker, for servers that were started with our loader (all kinds of sources, nothing copied
twice); by SGLang's own /update_weights_from_disk for the others. Invariant: a load that failed after the server was
told of it, however it failed, is a `TornError`, unless every worker has said that it moved no weight.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gyre_weights
from gyre_core import CapabilityError, InfrastructureError

from gyre_sglang.facts import LOADER
from gyre_sglang.launch import Server
from gyre_sglang.weights import Prepared, materialise

PACKAGE = str(Path(gyre_weights.__file__).parent)
"""Where the server's workers find gyre-weights; it needs only the numpy and torch that they have."""
NOTHING = base64.b64encode(pickle.dumps([])).decode()
"""The tensors that SGLang is told to give to our loader: none."""


OPEN = "already open"
"""What the server says to a /begin_weight_update when an earlier one was not ended."""


class TornError(InfrastructureError):
    """A load failed after weights had moved, or may have: what the server holds is of no version."""


@contextmanager
def tearing(version: int) -> Iterator[None]:
    """While weights may move: every error of the server is a TornError."""
    try:
        yield
    except TornError:
        raise
    except InfrastructureError as error:
        raise TornError(
            f"loading policy version {version} into SGLang", got=str(error), expected="one whole set of weights",
            fix="The server may have taken them in part, or all of them.",
        ) from error  # fmt: skip


async def load_version(server: Server, prepared: Prepared) -> None:
    """Have the server take it. InfrastructureError when it did not; TornError when its weights are broken now."""
    if server.orders is not None:
        await _by_order(server, server.orders, prepared)
    elif prepared.meeting is not None:
        raise CapabilityError(
            f"receiving policy version {prepared.source.version}", got="a server without Gyre's weight loader",
            expected=f"--custom-weight-loader {LOADER}",
            fix="Let Gyre start it without replicas (dp), or publish versions to a folder.",
        )  # fmt: skip
    elif prepared.source.kind == "delta":
        folder = await _materialised(prepared)
        server.unread.append(folder.parent)  # until it has loaded this: it ends when what it reads goes
        await _from_disk(server, prepared, str(folder))
    else:
        await _from_disk(server, prepared, prepared.folder)
    with tearing(prepared.source.version):
        info = await server.client.get("/model_info", server.options.request_timeout_s)
    if info.get("weight_version") != str(prepared.source.version):
        raise TornError(
            f"loading policy version {prepared.source.version} into SGLang",
            got=f"version {info.get('weight_version')}", expected=f"version {prepared.source.version}",
            fix="Does somebody else update this server?",
        )  # fmt: skip
    server.discard_unread()


class _Making:
    """`materialise` for somebody who may leave before it is done: what nobody waits for is removed, by the thread that
    makes it if need be, since the event loop may end before that thread does."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._lock = threading.Lock()
        self._left = False
        self._made: Path | None = None

    def make(self) -> Path:
        folder = materialise(self._prepared)
        with self._lock:
            self._made, left = folder, self._left
        if left:
            shutil.rmtree(folder.parent, ignore_errors=True)
        return folder

    def leave(self) -> None:
        with self._lock:
            self._left, made = True, self._made
        if made is not None:
            shutil.rmtree(made.parent, ignore_errors=True)


async def _materialised(prepared: Prepared) -> Path:
    """`materialise` in a thread; what it makes goes when this is cancelled."""
    making = _Making(prepared)
    try:
        return await asyncio.to_thread(making.make)
    except asyncio.CancelledError:
        making.leave()
        raise


async def _from_disk(server: Server, prepared: Prepared, folder: str) -> None:
    body = {
        "model_path": folder,
        "weight_version": str(prepared.source.version),
        "abort_all_requests": False,
        "flush_cache": False,  # running calls keep their KV; later ones have another cache key
    }
    with tearing(prepared.source.version):
        await server.client.post("/update_weights_from_disk", body, server.options.weights_timeout_s)


async def _by_order(server: Server, folder: Path, prepared: Prepared) -> None:
    limit, version = server.options.weights_timeout_s, prepared.source.version
    for old in folder.glob("report-*"):
        old.unlink(missing_ok=True)
    order = _order(prepared, limit)
    partial = folder / "order.partial"
    partial.write_text(json.dumps(order), encoding="utf-8")
    partial.replace(folder / "order.json")
    await _begin(server)
    workers = server.facts.tp * server.facts.dp
    try:
        await _load(server, limit)
        _check_reports(_reports(folder), workers, order["id"], version)
    except InfrastructureError:
        if _untouched(_reports(folder), workers, order["id"]):
            raise
        with tearing(version):
            raise
    with tearing(version):
        await server.ask("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})


async def _begin(server: Server) -> None:
    """Open the server's session for weights; one that an earlier load has left open is ended first."""
    try:
        await server.ask("/begin_weight_update")
    except InfrastructureError as error:
        if OPEN not in str(error):
            raise
        await server.ask("/end_weight_update")
        await server.ask("/begin_weight_update")


async def _load(server: Server, limit: float) -> None:
    body = {"serialized_named_tensors": [NOTHING] * server.facts.tp, "load_format": LOADER, "flush_cache": False}
    try:
        await server.client.post("/update_weights_from_tensor", body, limit)
    except InfrastructureError:
        with suppress(InfrastructureError):  # the first error says more
            await server.ask("/end_weight_update")
        raise
    await server.ask("/end_weight_update")


def _order(prepared: Prepared, timeout_s: float) -> dict[str, Any]:
    common = {"id": f"{prepared.source.version}@{prepared.source.location}", "package": PACKAGE}
    if prepared.meeting is None:
        return common | {"kind": "rest", "location": prepared.folder, "all": not prepared.changed_only}
    return common | {
        "kind": "group", "meeting": asdict(prepared.meeting), "timeout_s": timeout_s,
        "shapes": {name: list(shape) for name, shape in prepared.shapes.items()}, "optional": list(prepared.optional),
    }  # fmt: skip


def _reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("report-*.json")]


def _untouched(reports: Sequence[dict[str, Any]], workers: int, order: str) -> bool:
    """Whether every worker has answered this order and says that it moved nothing."""
    said = [report for report in reports if report.get("id") == order and report.get("moved") is False]
    return len(said) == len(reports) == workers


def _check_reports(reports: Sequence[dict[str, Any]], workers: int, order: str, version: int) -> None:
    doing = f"loading policy version {version} into SGLang"
    for report in reports:
        if "error" in report or report.get("id") != order or report.get("version") not in (-1, version):
            raise InfrastructureError(
                doing, got=str(report.get("error") or f"version {report.get('version')}"),
                expected=f"version {version} in every worker",
            )  # fmt: skip
    if len(reports) != workers:
        raise InfrastructureError(doing, got=f"reports of {len(reports)} workers", expected=f"{workers}")
