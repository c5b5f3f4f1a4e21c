"""A prepared version into a running server, while nothing is sampled.

Two ways: by order, in every worker, for servers that were started with our loader (all kinds of sources, nothing copied
twice); by SGLang's own /update_weights_from_disk for the others. Invariant: after a load that failed the server has the
version it had before, or the engine is told that it has none.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import shutil
from collections.abc import Sequence
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


class TornError(InfrastructureError):
    """A load failed after weights had moved: what the server holds is of no version."""


async def load_version(server: Server, prepared: Prepared) -> None:
    """Have the server take it. InfrastructureError when it did not; TornError when its weights are broken now."""
    if server.orders is not None:
        await _by_order(server, server.orders, prepared)
    elif prepared.meeting is not None:
        raise CapabilityError(
            f"receiving policy version {prepared.source.version}", got="a server without Gyre's weight loader",
            expected=f"--custom-weight-loader {LOADER}", fix="Let Gyre start it, or publish versions to a folder.",
        )  # fmt: skip
    elif prepared.source.kind == "delta":
        folder = await asyncio.to_thread(materialise, prepared)
        try:
            await _from_disk(server, prepared, str(folder))
        finally:
            shutil.rmtree(folder.parent, ignore_errors=True)
    else:
        await _from_disk(server, prepared, prepared.folder)
    info = await server.client.get("/model_info", server.options.request_timeout_s)
    if info.get("weight_version") != str(prepared.source.version):
        raise TornError(
            f"loading policy version {prepared.source.version} into SGLang",
            got=f"version {info.get('weight_version')}", expected=f"version {prepared.source.version}",
            fix="Does somebody else update this server?",
        )  # fmt: skip


async def _from_disk(server: Server, prepared: Prepared, folder: str) -> None:
    body = {
        "model_path": folder,
        "weight_version": str(prepared.source.version),
        "abort_all_requests": False,
        "flush_cache": False,  # running calls keep their KV; later ones have another cache key
    }
    await server.client.post("/update_weights_from_disk", body, server.options.weights_timeout_s)


async def _by_order(server: Server, folder: Path, prepared: Prepared) -> None:
    limit, version = server.options.weights_timeout_s, prepared.source.version
    for old in folder.glob("report-*"):
        old.unlink(missing_ok=True)
    order = _order(prepared, limit)
    partial = folder / "order.partial"
    partial.write_text(json.dumps(order), encoding="utf-8")
    partial.replace(folder / "order.json")
    await server.ask("/begin_weight_update")
    try:
        workers = server.facts.tp * server.facts.dp
        body = {"serialized_named_tensors": [NOTHING] * server.facts.tp, "load_format": LOADER, "flush_cache": False}
        await server.client.post("/update_weights_from_tensor", body, limit)
    finally:
        await server.ask("/end_weight_update")
    _check_reports(
        [json.loads(path.read_text()) for path in folder.glob("report-*.json")], workers, order["id"], version
    )
    await server.ask("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})


def _order(prepared: Prepared, timeout_s: float) -> dict[str, Any]:
    common = {"id": f"{prepared.source.version}@{prepared.source.location}", "package": PACKAGE}
    if prepared.meeting is None:
        return common | {"kind": "rest", "location": prepared.folder, "all": not prepared.changed_only}
    return common | {
        "kind": "group", "meeting": asdict(prepared.meeting), "timeout_s": timeout_s,
        "shapes": {name: list(shape) for name, shape in prepared.shapes.items()}, "optional": list(prepared.optional),
    }  # fmt: skip


def _check_reports(reports: Sequence[dict[str, Any]], workers: int, order: str, version: int) -> None:
    doing = f"loading policy version {version} into SGLang"
    moved = any(report.get("moved", True) for report in reports) or len(reports) != workers
    broken = TornError if moved else InfrastructureError
    for report in reports:
        if "error" in report or report.get("id") != order or report.get("version") not in (-1, version):
            raise broken(
                doing, got=str(report.get("error") or f"version {report.get('version')}"),
                expected=f"version {version} in every worker",
            )  # fmt: skip
    if len(reports) != workers:
        raise broken(doing, got=f"reports of {len(reports)} workers", expected=f"{workers}")
