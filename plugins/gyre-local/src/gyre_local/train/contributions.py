"""The file a contribution is: summed gradients in Hugging Face names, with what they cover in the header.

Invariants: the file is complete or absent; its header repeats the `Contribution`, so a file that was swapped, cut or
written for another step is found out before it counts. Format: safetensors, metadata key "gyre" holding JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gyre_core import BatchStats, Contribution, InfrastructureError
from safetensors import SafetensorError, safe_open

from gyre_local.files import save_tensors

FORMAT = 1
MAX_SUFFIX = ":max"
"""Metrics whose name ends so combine by maximum, all others by sum."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A micro-batch whose gradient was not finite, and the executions in it."""

    batch_id: str
    executions: tuple[str, ...]

    def __str__(self) -> str:
        return f"micro-batch {self.batch_id} (executions {', '.join(self.executions)})"


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a contribution file holds."""

    tensors: Mapping[str, torch.Tensor]
    suspects: tuple[Suspect, ...]


def merge_stats(parts: Iterable[BatchStats]) -> BatchStats:
    """Statistics of several micro-batches together."""
    loss, tokens, trained, seconds = 0.0, 0, 0, 0.0
    metrics: dict[str, float] = {}
    for part in parts:
        loss, tokens = loss + part.loss_sum, tokens + part.tokens
        trained, seconds = trained + part.trained_tokens, seconds + part.seconds
        for name, value in part.metrics.items():
            if name.endswith(MAX_SUFFIX):
                metrics[name] = max(metrics.get(name, value), value)
            else:
                metrics[name] = metrics.get(name, 0.0) + value
    return BatchStats(loss, tokens, trained, seconds, metrics)


def contribution_path(folder: str | Path, contribution_id: str) -> Path:
    """`folder`/<id>.safetensors; ValueError for an id that is no plain file name."""
    if not contribution_id or Path(contribution_id).name != contribution_id or contribution_id.startswith("."):
        raise ValueError(
            f"exporting a contribution: got id {contribution_id!r}, expected a plain name without path separators"
        )
    return Path(folder) / f"{contribution_id}.safetensors"


def write_contribution(contribution: Contribution, gradients: Gradients) -> None:
    """Put it at rest at `contribution.location`."""
    path = Path(contribution.location)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(gradients.tensors, path, {"gyre": json.dumps(header_of(contribution, gradients.suspects))})


def header_of(contribution: Contribution, suspects: Iterable[Suspect]) -> dict[str, Any]:
    """What travels with the gradients: the contribution again, and whose micro-batches were not finite."""
    listed = [[suspect.batch_id, list(suspect.executions)] for suspect in suspects]
    return _header(contribution) | {"format": FORMAT, "suspects": listed}


def check_header(contribution: Contribution, header: Mapping[str, Any], doing: str) -> None:
    """ValueError when the gradients are not those of `contribution`."""
    expected = _header(contribution) | {"format": FORMAT}
    differ = [key for key, value in expected.items() if header.get(key) != value]
    if differ:
        raise ValueError(
            f"{doing}: got {', '.join(f'{k} {header.get(k)!r}' for k in differ)} with it, expected "
            f"{', '.join(f'{k} {expected[k]!r}' for k in differ)}"
        )


def _header(contribution: Contribution) -> dict[str, Any]:
    return {
        "id": contribution.id,
        "step": contribution.step,
        "version": contribution.version,
        "batch_ids": list(contribution.batch_ids),
    }


def read_contribution(contribution: Contribution, shapes: Mapping[str, tuple[int, ...]]) -> Gradients:
    """Its gradients, mapped from the file. InfrastructureError when the file is missing, cut or another model's;
    ValueError when it is not the contribution it is said to be."""
    doing = f"reading contribution {contribution.id!r} from {contribution.location}"
    try:
        with safe_open(contribution.location, framework="pt") as reader:
            header = json.loads((reader.metadata() or {}).get("gyre", "{}"))
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, ValueError, SafetensorError) as error:
        raise InfrastructureError(
            doing, got=f"{type(error).__name__}: {error}", expected="a complete contribution file",
            fix="Lease its micro-batches again.",
        ) from error  # fmt: skip
    check_header(contribution, header, doing)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != dict(shapes):
        wrong = sorted(set(found.items()) ^ set(shapes.items()))[:4]
        raise InfrastructureError(
            doing, got=f"gradients that differ from this model's parameters, first {wrong}",
            expected="one gradient of equal shape for each trained parameter",
            fix="All cells must train the same model.",
        )  # fmt: skip
    return Gradients(tensors, tuple(Suspect(batch, tuple(names)) for batch, names in header.get("suspects", ())))
