"""A version's folder: made aside, complete at the moment it gets its name, dropped when it is old.

Invariants: `v<N>` either does not exist or is whole (its manifest is written last, then one rename); the newest `keep`
versions stay, and with each delta everything it rests on; a number above the one just published is of a run that was
set back, and does not stay. Not here: what the shards hold.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from gyre_weights.errors import WeightsError
from gyre_weights.manifest import read_manifest
from gyre_weights.spares import Spares

_DRAFT = re.compile(r"\.v\d+\.|\.whole-\d")

Extras: TypeAlias = "Mapping[str, bytes | Path]"
"""Small files beside the weights (config.json, the tokenizer's): content, or the file to copy, by name."""


def version_folder(root: str | Path, version: int) -> Path:
    """`root`/v<version>."""
    return Path(root) / f"v{version}"


def flush(path: Path) -> None:
    """Force a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """A folder to fill; on leaving it becomes `target` in one rename (an older one is moved aside first). On an error
    it is removed and `target` stays as it was."""
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    partial, old = target.with_name(f".{target.name}.{mark}"), target.with_name(f".{target.name}.{mark}.old")
    partial.mkdir()
    try:
        yield partial
        put_in_place(partial, target, old, durable=durable)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def drop_drafts(root: str | Path) -> list[Path]:
    """Remove what publications that were killed left under `root`; which were removed. For the only process that
    publishes there, before its first publication."""
    dropped = [path for path in Path(root).glob(".*") if _DRAFT.match(path.name)]
    for path in dropped:
        if path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return dropped


def put_in_place(partial: Path, target: Path, old: Path, *, durable: bool) -> None:
    """Rename `partial` to `target`; what was there goes to `old`."""
    if durable:
        flush(partial)
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        target.rename(old)
    partial.rename(target)
    if durable:
        flush(target.parent)


def write_extras(folder: Path, extras: Extras, *, durable: bool) -> None:
    """Put the small files into `folder`."""
    for name, content in extras.items():
        if Path(name).name != name or name.startswith("."):
            raise ValueError(f"publishing: got {name!r} as the name of an extra file, expected a plain file name")
        path = folder / name
        if isinstance(content, Path):
            shutil.copyfile(content, path)
        else:
            path.write_bytes(content)
        if durable:
            flush(path)


def versions_in(root: str | Path) -> dict[int, Path]:
    """The whole versions under `root`, by number."""
    found = {}
    for path in Path(root).glob("v*"):
        if path.name[1:].isdigit() and path.is_dir():
            found[int(path.name[1:])] = path
    return found


def chain(root: str | Path, version: int) -> list[int]:
    """Versions that `version` rests on, itself first, its full anchor last; stops early where one is gone."""
    found: list[int] = []
    at: int | None = version
    while at is not None and at not in found:
        found.append(at)
        try:
            manifest = read_manifest(version_folder(root, at))
        except WeightsError:
            break
        at = manifest.base.version if manifest is not None and manifest.base is not None else None
    return found


def drop_old(
    root: str | Path,
    keep: int,
    spare: Iterable[str | Path] = (),
    spares: Spares | None = None,
    *,
    newest: int | None = None,
) -> list[int]:
    """Remove all but the newest `keep` versions, the folders in `spare`, and what these rest on; which were removed.
    Versions above `newest` are of a run that was set back since, and go as well. The last one's shards go to `spares`.
    A reader that has a dropped version open keeps its mapping."""
    versions = versions_in(root)
    spared = {Path(path).resolve() for path in spare}
    wanted: set[int] = set()
    ours = sorted(version for version in versions if newest is None or version <= newest)
    kept = ours[max(len(ours) - keep, 0) :] + [
        version for version, path in versions.items() if path.resolve() in spared
    ]
    for version in kept:
        wanted.update(chain(root, version))
    dropped = []
    for version, path in sorted(versions.items()):
        if version not in wanted:
            if path.is_symlink():
                path.unlink(missing_ok=True)
            else:
                if spares is not None:
                    spares.keep(path)
                shutil.rmtree(path, ignore_errors=True)
            dropped.append(version)
    return dropped
