"""What a trainer has counted: the open contribution, and on the core the step's sum. Names and numbers, no tensors.

Invariants: the open contribution holds exactly the micro-batches it names; a micro-batch counts
once in a step; contributions are summed in the order of their ids; a file that is not the contribution it is said to
be is found out before it counts. The header of a contribution file is JSON under the metadata key "gyre".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_core.errors import InfrastructureError
from gyre_core.ranks.tensorfile import TensorFile
from gyre_core.trainer import BatchStats, Contribution, MicroBatch

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


def merge_stats(parts: Iterable[BatchStats]) -> BatchStats:
    """Statistics of several micro-batches, or of several ranks' shares of one, together."""
    loss, tokens, trained, seconds = 0.0, 0, 0, 0.0
    metrics: dict[str, float] = {}
    for part in parts:
        loss, tokens = loss + part.loss_sum, tokens + part.tokens
        trained, seconds = trained + part.trained_tokens, seconds + part.seconds
        metrics = merge_metrics(metrics, part.metrics)
    return BatchStats(loss, tokens, trained, seconds, metrics)


def merge_metrics(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """Sums add, maxima do not."""
    found = dict(left)
    for name, value in right.items():
        if name.endswith(MAX_SUFFIX):
            found[name] = max(found.get(name, value), value)
        else:
            found[name] = found.get(name, 0.0) + value
    return found


@dataclass(slots=True)
class OpenContribution:
    """The micro-batches that were accumulated since the last export."""

    batches: list[MicroBatch] = field(default_factory=list)
    stats: list[BatchStats] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)

    def check(self, batch: MicroBatch) -> None:
        """ValueError when the batch cannot join."""
        if any(batch.id == other.id for other in self.batches):
            raise ValueError(f"accumulating micro-batch {batch.id!r}: the open contribution has it already")
        if self.batches and batch.step != self.batches[0].step:
            raise ValueError(
                f"accumulating micro-batch {batch.id!r}: got step {batch.step}, expected step {self.batches[0].step} "
                "of the open contribution; export or discard that first"
            )

    def close(self, name: str, step: int, version: int, folder: str) -> Contribution:
        """The contribution it makes; ValueError for an id that is no plain file name, no batch or another step."""
        doing = f"exporting contribution {name!r}"
        if not name or Path(name).name != name or name.startswith("."):
            raise ValueError(f"{doing}: got that id, expected a plain name without path separators")
        if not self.batches:
            raise ValueError(f"{doing}: got no micro-batch, expected at least one")
        if step != self.batches[0].step:
            raise ValueError(f"{doing}: got step {step}, expected {self.batches[0].step}")
        location = str(Path(folder) / f"{name}.safetensors")
        ids = tuple(batch.id for batch in self.batches)
        return Contribution(name, step, version, ids, location, merge_stats(self.stats))

    def header(self, made: Contribution) -> dict[str, str]:
        """Metadata of its file."""
        suspects = [[suspect.batch_id, list(suspect.executions)] for suspect in self.suspects]
        return {"gyre": json.dumps(_header(made) | {"suspects": suspects})}


def _header(contribution: Contribution) -> dict[str, Any]:
    return {
        "id": contribution.id,
        "step": contribution.step,
        "version": contribution.version,
        "batch_ids": list(contribution.batch_ids),
        "format": FORMAT,
    }


def read_suspects(contribution: Contribution, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Suspect, ...]:
    """Check a contribution's file. InfrastructureError when it is missing, cut or another model's; ValueError when it
    is not the contribution it is said to be."""
    doing = f"reading contribution {contribution.id!r} from {contribution.location}"
    file = TensorFile(Path(contribution.location))
    try:
        header = json.loads(file.metadata.get("gyre", "{}"))
        suspects = tuple(Suspect(str(batch), tuple(names)) for batch, names in header.get("suspects", ()))
    except (ValueError, TypeError, AttributeError) as error:
        raise InfrastructureError(doing, got=f"{error}", expected="a contribution's header") from error
    expected = _header(contribution)
    differ = [key for key, value in expected.items() if header.get(key) != value]
    if differ:
        raise ValueError(
            f"{doing}: got {', '.join(f'{k} {header.get(k)!r}' for k in differ)} in the file, expected "
            f"{', '.join(f'{k} {expected[k]!r}' for k in differ)}"
        )
    if file.shapes() != dict(shapes):
        wrong = sorted(set(file.shapes().items()) ^ set(shapes.items()))[:4]
        raise InfrastructureError(
            doing, got=f"gradients that differ from this model's parameters, first {wrong}",
            expected="one gradient of equal shape for each trained parameter",
            fix="All cells must train the same model.",
        )  # fmt: skip
    return suspects


@dataclass(slots=True)
class StepSum:
    """The contributions of the step that is being gathered; only the core has one."""

    added: dict[str, tuple[Contribution, tuple[Suspect, ...]]] = field(default_factory=dict)

    def check(self, contribution: Contribution, version: int) -> None:
        """ValueError when it or one of its batches was counted, or it is of another version or step."""
        doing = f"adding contribution {contribution.id!r} of step {contribution.step}"
        if contribution.version != version:
            raise ValueError(f"{doing}: got gradients of policy version {contribution.version}, expected {version}")
        if contribution.id in self.added:
            raise ValueError(f"{doing}: it was added already")
        steps = {other.step for other, _ in self.added.values()}
        if steps and contribution.step not in steps:
            raise ValueError(f"{doing}: expected step {min(steps)}, which the others of the sum have")
        counted = {batch for other, _ in self.added.values() for batch in other.batch_ids}
        twice = sorted(counted & set(contribution.batch_ids))
        if twice or len(set(contribution.batch_ids)) < len(contribution.batch_ids):
            raise ValueError(f"{doing}: got micro-batches that were counted already ({twice[:5]}), expected new ones")

    def add(self, contribution: Contribution, suspects: tuple[Suspect, ...]) -> None:
        """Count it."""
        self.added[contribution.id] = (contribution, suspects)

    def ordered(self) -> list[Contribution]:
        """In the order of their ids."""
        return [self.added[name][0] for name in sorted(self.added)]

    def blame(self, guilty: Sequence[int]) -> str:
        """Which of `ordered` are not finite, and whose micro-batches; empty when none is."""
        told = []
        for index in guilty:
            contribution = self.ordered()[index]
            suspects = "; ".join(map(str, self.added[contribution.id][1])) or "no micro-batch stood out"
            told.append(f"contribution {contribution.id} has a gradient that is not finite: {suspects}")
        return "; ".join(told)
