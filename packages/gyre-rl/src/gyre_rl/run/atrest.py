"""Contributions that lie in the run directory: what an earlier life committed to a step that was not applied.

Invariant: a contribution is at rest only as a whole (its record is written after its tensors). Pure reading.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from gyre_core import Contribution

from gyre_rl.run.directory import RunDirectory

SUFFIX = ".contribution.json"


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
