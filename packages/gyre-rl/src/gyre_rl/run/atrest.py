"""What lies in the run directory for whoever starts anew: weights, and contributions to a step that was not applied.

Invariant: a contribution is at rest only as a whole (its record is written after its tensors); weights at rest can be
opened on every machine of the run. Pure reading.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
from gyre_core import Contribution, WeightSource
from gyre_weights import WeightsError, open_version

from gyre_rl.config.schema import RunConfig
from gyre_rl.run.directory import RunDirectory

SUFFIX = ".contribution.json"


def weights_at_rest(config: RunConfig, directory: RunDirectory, version: int) -> WeightSource:
    """Version 0 is the model's own; a later one must have a checkpoint."""
    if version <= 0:
        return WeightSource(0, str(config.model_dir))
    published = directory.weights / f"v{version}"
    with suppress(WeightsError):
        found = open_version(published, version=version)
        if not published.is_symlink() and not found.is_delta:
            return WeightSource(version, str(published), digest=found.digest)
    # It lies in one machine's memory, or did until its trainer ended, or it is what changed alone: the checkpoint has
    # the same weights, whole and for all machines.
    return WeightSource(version, str(directory.checkpoint(version)))


def keep_record(folder: Path, contribution: Contribution) -> None:
    """Write the record of a counted contribution beside its tensors, atomically."""
    path = folder / f"{contribution.id}{SUFFIX}"
    draft = path.with_suffix(".tmp")
    draft.write_bytes(msgspec.json.encode(contribution))
    draft.rename(path)


def contributions_at_rest(directory: RunDirectory, step: int) -> list[Contribution]:
    """The counted contributions of `step`, by id."""
    folder = directory.contributions(step)
    if not folder.is_dir():
        return []
    found = [msgspec.json.decode(path.read_bytes(), type=Contribution) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return [contribution for contribution in found if Path(contribution.location).exists()]
