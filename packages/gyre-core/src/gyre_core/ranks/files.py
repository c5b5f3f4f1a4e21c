"""Published versions and checkpoints as folders; a contribution as a file. No tensors here, only names and bytes.

Invariants: a name appears complete or not at all; a checkpoint carries the size and checksum of each of its files, so
that one cut short is refused and not half used.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import uuid
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from gyre_core.errors import InfrastructureError

STATE = "state.json"
OPTIMIZER = "optimizer.state"
_COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "chat_template*", "*.model",
)  # fmt: skip
_CHUNK = 1 << 22


def flush(path: Path) -> None:
    """Force a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; on leaving it becomes `target` in one rename (an older `target` is moved aside first). On an
    error it is removed and `target` stays as it was."""
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    partial, old = target.with_name(f".{target.name}.{mark}"), target.with_name(f".{target.name}.{mark}.old")
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            flush(path)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        flush(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path to fill that becomes `target` on leaving; on an error it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield partial
        flush(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@asynccontextmanager
async def off_loop(manager: AbstractContextManager[Path]) -> AsyncIterator[Path]:
    """`manager`, entered and left in a thread: forcing a model to disk takes longer than an event loop may wait."""
    made = await asyncio.to_thread(manager.__enter__)
    try:
        yield made
    except BaseException as error:
        await asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(manager.__exit__, None, None, None)


def model_files(source: Path, dtype: str) -> dict[str, bytes]:
    """What a model's folder has beside its weights: config.json with its dtype, and the tokenizer's files."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    text = json.dumps(config | {"dtype": dtype}, indent=1, sort_keys=True)
    found = {"config.json": f"{text}\n".encode()}
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                found.setdefault(path.name, path.read_bytes())
    return found


def drop_old_versions(folder: Path, keep: int, spare: Path, newest: int) -> None:
    """Keep `keep` folders v<N> up to `newest`, and `spare`. What is above is of a run that was set back since."""
    versions = {int(p.name[1:]): p for p in folder.glob("v*") if p.is_dir() and p.name[1:].isdigit()}
    kept = sorted(version for version in versions if version <= newest)[-keep:]
    for version, path in versions.items():
        if version not in kept and path.resolve() != spare.resolve():
            shutil.rmtree(path, ignore_errors=True)


def _mark(path: Path) -> dict[str, int]:
    value = 0
    with path.open("rb") as reader:
        while piece := reader.read(_CHUNK):
            value = zlib.crc32(piece, value)
    return {"bytes": path.stat().st_size, "crc32": value}


def seal(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json with size and checksum of every file there is."""
    files = {path.name: _mark(path) for path in sorted(folder.iterdir())}
    text = json.dumps(state | {"files": files}, indent=1, sort_keys=True)
    (folder / STATE).write_text(text + "\n", encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """What `seal` wrote, after checking every file; InfrastructureError when anything is missing or cut."""
    doing = f"restoring the checkpoint {folder}"
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for name, expected in state["files"].items():
            found = _mark(folder / name)
            if found != expected:
                raise InfrastructureError(
                    doing, got=f"{name} with {found}", expected=f"{expected}",
                    fix="It was cut short or changed; use an older checkpoint.",
                )  # fmt: skip
        return state | {"version": int(state["version"]), "steps": int(state["steps"]), "dtype": str(state["dtype"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InfrastructureError(
            doing, got=f"{type(error).__name__}: {error}", expected="a complete checkpoint",
            fix="It was cut short; use an older checkpoint.",
        ) from error  # fmt: skip
