"""Reads a task from a folder.

    NAME/task.toml     prompt, scorer, split, floor
    NAME/start/…       the workspace at its start
    NAME/hidden/…      what only the scorer sees: test suites, probes, expected files

Invariant: nothing of `hidden/` reaches the prompt or the workspace; what is wrong in a folder is a ConfigError with
the file and the line. Reads files and runs nothing. Not here: what a scorer's options mean, beyond the paths into
`hidden/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_core import ConfigError, ScorerSpec, Task

from gyre_tasks.located import Table, read_toml
from gyre_tasks.splits import SPLITS, split_of

DESCRIPTION = "task.toml"
_ALONE = (
    "import ctypes, os, sys; "
    "text = sys.stdin.buffer.read(); "
    "os.dup2(os.open(os.devnull, os.O_RDONLY), 0); "
    "ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0) == 0 or sys.exit('prctl(PR_SET_DUMPABLE) failed'); "
    "exec(compile(text, 'probe', 'exec'), {'__name__': '__main__'})"
)
"""A probe starts the agent's program, which then runs as the same user: it may neither open the probe's memory or files
(the kernel refuses that for a process that is not dumpable) nor find the probe's text on an inherited input."""
PYTHON = ("python3", "-I", "-c", _ALONE)
"""How a probe of `hidden/` runs: from standard input, without the workspace on its path, closed to what it starts."""


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """One task as it lies on disk."""

    name: str
    prompt: str
    scorer: ScorerSpec
    split: str
    floor: float
    """What the workspace earns as it is at the start, in [0, 1]."""
    files: Mapping[str, bytes]
    system: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    executable: tuple[str, ...] = ()

    def task(self, family: str, number: int = 0) -> Task:
        """As a Gyre task; `number` tells repetitions apart."""
        return Task(
            id=f"{family}/{self.name}" if number == 0 else f"{family}/{number}/{self.name}",
            prompt=self.prompt,
            scorer=self.scorer,
            files=self.files,
            system=self.system,
            metadata={"family": family, "floor": self.floor, **self.metadata},
            executable=self.executable,
        )


def read_folder(folder: Path) -> dict[str, bytes]:
    """Every regular file below `folder` by relative path; empty when there is no such folder. Links are refused."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_symlink():
            raise ConfigError(f"reading {path}", got="a link", expected="files and folders only")
        if path.is_file() and "__pycache__" not in path.parts:
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def read_task(folder: Path) -> TaskFolder:
    """The task in `folder`; ConfigError with file and line when it cannot be used."""
    top = read_toml(folder / DESCRIPTION)
    prompt = top.take("prompt", str).strip()
    if not prompt:
        raise top.fault("prompt", "an empty text", "what the agent is to do")
    split = top.take("split", str, split_of(folder.name))
    if split not in SPLITS:
        raise top.fault("split", repr(split), f"one of {', '.join(SPLITS)}")
    floor = top.take("floor", float, 0.0)
    if not 0.0 <= floor < 1.0:
        raise top.fault("floor", repr(floor), "a score of at least 0 and below 1")
    hidden = read_folder(folder / "hidden")
    scorer = _scorer(top.table("scorer"), hidden)
    system = top.take("system", str, "")
    metadata = {"about": top.take("about", str, ""), "tags": top.texts("tags")}
    top.finish()
    start = read_folder(folder / "start")
    runs = tuple(name for name in start if (folder / "start" / name).stat().st_mode & 0o100)
    return TaskFolder(folder.name, prompt, scorer, split, floor, start, system or None, metadata, runs)


def read_tasks(root: Path) -> list[TaskFolder]:
    """The tasks of all folders in `root` that have a description, by name; ConfigError when there is none."""
    if not root.is_dir():
        raise ConfigError(f"reading tasks from {root}", got="no such folder", expected="a folder of task folders")
    found = [read_task(file.parent) for file in sorted(root.glob(f"*/{DESCRIPTION}"))]
    if not found:
        raise ConfigError(
            f"reading tasks from {root}", got="no task", expected=f"folders with a {DESCRIPTION}, one a task"
        )
    return found


def _scorer(table: Table, hidden: Mapping[str, bytes]) -> ScorerSpec:
    name = table.take("name", str)
    if name == "composite":
        options = {"parts": [_part(part, hidden) for part in table.tables("parts")], **table.rest()}
    else:
        options = _options(name, table, hidden)
    table.finish()
    return ScorerSpec(name, options)


def _part(table: Table, hidden: Mapping[str, bytes]) -> dict[str, Any]:
    """One part of a composite scorer: what is not the part's own belongs to its scorer."""
    name = table.take("scorer", str)
    own = {key: table.values[key] for key in ("weight", "gate", "name") if key in table.values}
    rest = {key: value for key, value in table.values.items() if key not in {*own, "scorer"}}
    inner = Table(table.file, rest, table.lines, table.path)
    return {"scorer": name, **own, "options": _options(name, inner, hidden)}


def _options(name: str, table: Table, hidden: Mapping[str, bytes]) -> dict[str, Any]:
    """A scorer's options with the hidden files in the places where they are named."""
    if name == "pytest" and "files" not in table.values and "folder" not in table.values:
        if not hidden:
            raise table.fault("", "no folder 'hidden', or an empty one", "a test suite in it")
        probes = "probes/"
        suite = {path: data for path, data in hidden.items() if not path.startswith(probes)}
        return {"files": suite, **table.rest()}
    if name in ("commands", "files") and "milestones" in table.values:
        return {"milestones": [_milestone(each, hidden) for each in table.tables("milestones")], **table.rest()}
    return table.rest()


def _milestone(table: Table, hidden: Mapping[str, bytes]) -> dict[str, Any]:
    """`probe = "p.py"` runs a hidden program; `expect = "f"` is a hidden file's content."""
    spec: dict[str, Any] = {}
    if "probe" in table.values:
        words = table.take("probe", str).split()
        data = _hidden(table, "probe", words[0] if words else "", hidden)
        spec |= {"run": [*PYTHON, *words[1:]], "stdin": _text(table, "probe", data)}
        spec["name"] = table.take("name", str, " ".join(words))
    if "expect" in table.values:
        spec["content"] = _hidden(table, "expect", table.take("expect", str), hidden)
    clash = sorted(set(spec) & (set(table.values) - {"name"}))
    if clash:
        raise table.fault(clash[0], "a key beside 'probe' or 'expect', which set it", "one of the two")
    return {**spec, **table.rest()}


def _hidden(table: Table, key: str, path: str, hidden: Mapping[str, bytes]) -> bytes:
    if path not in hidden:
        raise table.fault(key, f"{path!r}, which is not in 'hidden'", f"one of {', '.join(hidden) or 'no files'}")
    return hidden[path]


def _text(table: Table, key: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise table.fault(key, f"a file that is not text ({error})", "a Python program") from error
