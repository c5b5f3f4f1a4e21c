"""Tasks and folders into a workspace, and a workspace out of it, as they are: files, what can be executed, links, empty
folders.

Invariant: what is carried out stays below its target, whatever an agent left; links are carried as links and never
followed. Works with any sandbox, for what `Workspace` has no method for is done by sh, find and ln in it. Not here:
owners, times, and modes other than whether a file can be executed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gyre_core.agents import ExecRequest, Sandbox, Workspace
from gyre_core.errors import ConfigError, InfrastructureError
from gyre_core.execution import Task

_AT_ONCE = 200
"""Paths a command is given."""
_TIMEOUT_S = 120.0
_OUTPUT = 1 << 26
_LARGEST = 1 << 30
_FIND_LINKS = """find . -type l -exec sh -c 'for p; do printf "%s\\0%s\\0" "$p" "$(readlink "$p")"; done' sh {} +"""
_MAKE_LINKS = 'while [ $# -gt 0 ]; do ln -s -- "$2" "$1" || exit 1; shift 2; done'


@dataclass(slots=True)
class Tree:
    """What a folder holds, by relative path."""

    files: dict[str, bytes] = field(default_factory=dict)
    executable: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


def read_tree(folder: Path) -> Tree:
    """All that is below `folder` on this host; ConfigError when it is no folder."""
    if not folder.is_dir():
        raise ConfigError("reading the workspace", got=f"{folder}, which is no folder", expected="a folder")
    tree = Tree()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            tree.links[name] = os.readlink(path)
        elif path.is_dir():
            tree.folders.add(name)
        elif path.is_file():
            tree.files[name] = path.read_bytes()
            if path.stat().st_mode & 0o100:
                tree.executable.add(name)
    return tree


async def at_start(sandbox: Sandbox, name: str, task: Task) -> Workspace:
    """A workspace as `task` begins."""
    return await _carried(sandbox, name, Tree(dict(task.files), set(task.executable)))


async def carry_in(sandbox: Sandbox, name: str, folder: Path) -> Workspace:
    """A workspace that holds what `folder` holds."""
    return await _carried(sandbox, name, read_tree(folder))


async def _carried(sandbox: Sandbox, name: str, tree: Tree) -> Workspace:
    workspace = await sandbox.create(name, tree.files)
    try:
        await _each(workspace, ["mkdir", "-p", "--"], sorted(tree.folders))
        await _each(workspace, ["chmod", "+x", "--"], sorted(tree.executable))
        pairs = [word for path, target in sorted(tree.links.items()) for word in (path, target)]
        await _each(workspace, ["sh", "-c", _MAKE_LINKS, "sh"], pairs)
    except BaseException:
        await workspace.close()
        raise
    return workspace


async def carry_out(workspace: Workspace, target: Path) -> None:
    """Put what the workspace holds below `target`, which may be there already."""
    folders = _split(await _run(workspace, ["find", ".", "-type", "d", "-print0"]))
    executable = _split(await _run(workspace, ["find", ".", "-type", "f", "-perm", "-u+x", "-print0"]))
    words = _split(await _run(workspace, ["sh", "-c", _FIND_LINKS]))
    runs = {_plain(path) for path in executable}
    for path in sorted({_plain(path) for path in folders}):
        _inside(target, path).mkdir(parents=True, exist_ok=True)
    for path in await workspace.list():
        file = _inside(target, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink():
            file.unlink()
        file.write_bytes(await workspace.read(path, limit=_LARGEST))
        file.chmod(0o755 if _plain(path) in runs else 0o644)
    _link(target, dict(zip(words[::2], words[1::2], strict=True)))


def _link(target: Path, links: Mapping[str, str]) -> None:
    for path, leads in sorted(links.items()):
        link = _inside(target, path)
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink() or link.is_file():
            link.unlink()
        link.symlink_to(leads)


def _plain(path: str) -> str:
    return path.removeprefix("./")


def _inside(target: Path, path: str) -> Path:
    """Where `path` goes; no part above it may be a link, nor may it climb."""
    place, parts = target, Path(path).parts
    for number, part in enumerate(parts):
        if part == ".." or part.startswith("/") or (number and place.is_symlink()):
            raise InfrastructureError(f"copying {path!r} out of the workspace", got="a path that leads elsewhere")
        place = place / part
    return place


async def _each(workspace: Workspace, argv: Sequence[str], words: Sequence[str]) -> None:
    for some in _batches(words):
        await _run(workspace, [*argv, *some])


def _batches(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """So many at a time, an even number, for some come in pairs."""
    return (words[at : at + _AT_ONCE] for at in range(0, len(words), _AT_ONCE))


async def _run(workspace: Workspace, argv: Sequence[str]) -> bytes:
    done = await workspace.run(ExecRequest(argv, _TIMEOUT_S, _OUTPUT))
    if done.exit_code != 0 or done.dropped_bytes:
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise InfrastructureError(
            f"running {argv[0]} in the workspace", got=said or f"exit {done.exit_code}, limit {done.limit}"
        )
    return done.stdout


def _split(output: bytes) -> list[str]:
    return [os.fsdecode(word) for word in output.split(b"\0")[:-1]]
