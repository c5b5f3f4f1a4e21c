"""Takes policy versions inside the server: `--custom-weight-loader gyre_sglang_server.loader.take`.

SGLang calls it in every worker, between /begin_weight_update and /end_weight_update. What is to be done stands in
`order.json` in the folder GYRE_SGLANG_ORDERS; each worker answers with a file beside it. Invariants: nothing is raised,
for any exception here would end the server; a version is refused before a weight moves when it does not fit; a worker
that could not take all of it says so, and whether weights had moved by then: they are of no version. Written for
SGLang 0.5.23.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gyre_sglang_server.settings import orders_folder

BATCH_BYTES = 256 << 20
"""Tensors that come one by one are given to the model in groups of about so many bytes."""


def take(model: Any, named_tensors: Any) -> None:
    """SGLang's hook. `named_tensors` is empty: the order says where the tensors come from."""
    folder = Path(orders_folder())
    began = time.perf_counter()
    answer: dict[str, Any] = {}
    mouth = Mouth(model)
    try:
        order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
        answer["id"] = order["id"]
        _gyre_weights(order["package"])
        answer["version"] = _from_group(mouth, order) if order["kind"] == "group" else _from_rest(mouth, order)
    except Exception as error:  # noqa: BLE001 - boundary: told to the engine, which brings the old weights back
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["moved"] = mouth.moved
    answer["seconds"] = time.perf_counter() - began
    path = folder / f"report-{os.getpid()}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(answer), encoding="utf-8")
    partial.replace(path)


class Mouth:
    """Feeds a model; knows whether it has begun to."""

    def __init__(self, model: Any) -> None:
        self.model, self.moved = model, False
        self._gathered: list[tuple[str, Any]] = []

    def feed(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Give tensors to the model."""
        self.moved = True
        self.model.load_weights(tensors)

    def gather(self, name: str, tensor: Any) -> None:
        """Keep a tensor until there are enough."""
        self._gathered.append((name, tensor))
        if sum(held.nbytes for _, held in self._gathered) >= BATCH_BYTES:
            self.feed_gathered()

    def feed_gathered(self) -> None:
        """Give what was kept to the model."""
        tensors, self._gathered = self._gathered, []
        if tensors:
            self.feed(tensors)


def _from_rest(mouth: Mouth, order: Mapping[str, Any]) -> int:
    """A folder on disk or in shared memory; of a delta only the tensors that changed."""
    from gyre_weights import open_version

    version = open_version(order["location"])
    names = sorted(version) if order["all"] else sorted(version.changed)
    mouth.feed((name, version[name].torch()) for name in names)
    return int(version.version)


def _from_group(mouth: Mouth, order: Mapping[str, Any]) -> int:
    """What the first member of a group broadcasts."""
    from gyre_weights.collective import receive_tensors
    from gyre_weights.groups import form_group
    from sglang.srt.runtime_context import get_parallel

    shapes = {name: list(shape) for name, shape in order["shapes"].items()}
    optional = set(order["optional"])

    def check(plan: Any) -> str:
        sent = {name: list(entry.shape) for name, entry in plan.tensors.items()}
        odd = sorted(name for name in (sent.keys() | shapes.keys()) - optional if sent.get(name) != shapes.get(name))
        return f"{odd[0]} of shape {sent.get(odd[0])}, expected {shapes.get(odd[0])}" if odd else ""

    meeting = order["meeting"]
    rank = int(meeting["first"]) + int(get_parallel().tp_rank)
    device = "cpu" if meeting["backend"] == "gloo" else str(next(mouth.model.parameters()).device)
    with form_group(
        (meeting["host"], int(meeting["port"])), meeting["name"], rank, int(meeting["size"]),
        timeout_s=float(order["timeout_s"]), backend=meeting["backend"],
    ) as group:  # fmt: skip
        held = receive_tensors(group, lambda name, value: mouth.gather(name, value.clone()), check=check, device=device)
    mouth.feed_gathered()
    return int(held.version)


def _gyre_weights(package: str) -> None:
    """Make gyre-weights importable from the folder of its package, which lies in another environment."""
    if "gyre_weights" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "gyre_weights", Path(package) / "__init__.py", submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no gyre-weights at {package}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gyre_weights"] = module
    spec.loader.exec_module(module)
