"""Python environments of their own for engines and trainers whose pins no common lock can hold (docs/adr/0007).

A plugin ships an `environment.toml`; `build` makes the environment it describes in the cache folder and `find` gives
the interpreter of one that is complete. Invariant: an environment is used only when every step of its description
ended well; its folder bears the digest of the description and of the files it names, so a changed description is
another environment. Not here: which plugin needs which environment, and how processes in it are started.

    name = "vllm"
    python = "3.11"                                 # minor version; left out: the one that runs this
    check = ["-c", "import vllm"]                   # arguments for the new interpreter; must end with 0

    [[step]]                                        # in order, each a call of pip
    pip = ["install", "-r", "{here}/requirements.txt"]

    [[file]]                                        # written into site-packages after the steps
    path = "vllm-0.1+cpu.dist-info/METADATA"
    content = "..."
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_core.errors import ConfigError, InfrastructureError
from gyre_core.settings import cache_folder, inherited_environment

COMPLETE = "complete.json"
"""Marker in an environment's folder, written last."""
_KEYS = {"name", "python", "check", "step", "file"}
_TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class ExtraFile:
    """A file put into site-packages: `path` relative to it."""

    path: str
    content: str


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """What an `environment.toml` says. `digest` covers it and every file under `{here}` that a step names."""

    name: str
    python: str
    """Minor version of the interpreter, such as "3.11"."""
    steps: tuple[tuple[str, ...], ...]
    """Arguments of pip, in order, `{here}` replaced."""
    files: tuple[ExtraFile, ...]
    check: tuple[str, ...]
    digest: str


def read_spec(path: Path) -> EnvironmentSpec:
    """Read a description; ConfigError names the key that is wrong."""
    doing = f"reading the environment {path}"
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(doing, got=str(error), expected="a TOML file") from error
    if unknown := sorted(set(data) - _KEYS):
        raise ConfigError(doing, got=f"unknown keys {', '.join(unknown)}", expected=", ".join(sorted(_KEYS)))
    steps = tuple(_words(step.get("pip"), f"{doing}: step {n}") for n, step in enumerate(data.get("step", ()), 1))
    name = data.get("name")
    if not isinstance(name, str) or not name.replace("-", "").isalnum() or not steps:
        raise ConfigError(
            doing, got=f"name {name!r} and {len(steps)} steps", expected="a plain name and a step or more"
        )
    python = data.get("python", f"{sys.version_info[0]}.{sys.version_info[1]}")
    files = tuple(ExtraFile(str(f["path"]), str(f["content"])) for f in data.get("file", ()))
    for file in files:
        if Path(file.path).is_absolute() or ".." in Path(file.path).parts:
            raise ConfigError(doing, got=f"file {file.path!r}", expected="a path inside site-packages")
    here = path.resolve().parent
    digest = hashlib.sha256(text.encode())
    for named in _named_files(steps, here):
        digest.update(named.relative_to(here).as_posix().encode() + b"\0" + named.read_bytes())
    filled = tuple(tuple(word.replace("{here}", str(here)) for word in step) for step in steps)
    check = _words(data.get("check", ["-c", "pass"]), f"{doing}: check")
    return EnvironmentSpec(name, str(python), filled, files, check, digest.hexdigest()[:12])


def _words(value: Any, doing: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise ConfigError(doing, got=repr(value), expected="a list of words")
    return tuple(value)


def _named_files(steps: tuple[tuple[str, ...], ...], here: Path) -> Iterator[Path]:
    for word in (word for step in steps for word in step if word.startswith("{here}/")):
        target = here / word.removeprefix("{here}/")
        if not target.exists():
            raise ConfigError(f"reading an environment: step names {word}", got="no such file", expected=str(target))
        inside = sorted(target.rglob("*")) if target.is_dir() else [target]
        yield from (p for p in inside if p.is_file() and "__pycache__" not in p.parts)


def folder(spec: EnvironmentSpec, root: Path | None = None) -> Path:
    """Where the environment of `spec` belongs, built or not."""
    return (root or cache_folder()) / "environments" / f"{spec.name}-{spec.digest}"


def find(name: str, root: Path | None = None, *, spec: EnvironmentSpec | None = None) -> Path | None:
    """The interpreter of a complete environment: that of `spec`, or without one the newest of that name; None if
    there is none."""
    if spec is not None:
        candidates = [folder(spec, root)]
    else:
        candidates = list(((root or cache_folder()) / "environments").glob(f"{name}-????????????"))
    complete = [c for c in candidates if (c / COMPLETE).is_file()]
    newest = max(complete, key=lambda c: (c / COMPLETE).stat().st_mtime, default=None)
    return newest / "bin" / "python" if newest else None


def build(
    spec: EnvironmentSpec,
    root: Path | None = None,
    *,
    rebuild: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Make the environment unless it is complete, and give its interpreter. Two builders wait for one another.

    `report` gets a line per step. InfrastructureError with the end of the log when a step fails; what is half built is
    thrown away at the next try.
    """
    target = folder(spec, root)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock")):
        python = target / "bin" / "python"
        if (target / COMPLETE).is_file() and not rebuild:
            report(f"{spec.name}: complete in {target}")
            return python
        shutil.rmtree(target, ignore_errors=True)
        log = target.with_name(target.name + ".log")
        log.write_text("", encoding="utf-8")
        began = time.monotonic()
        _call(spec, [_interpreter(spec), "-m", "venv", str(target)], log, report)
        for step in spec.steps:
            words = ["-m", "pip", "--no-input", "--disable-pip-version-check", *_lazy(step)]
            _call(spec, [str(python), *words], log, report)
        _write_files(spec, python)
        _call(spec, [str(python), *spec.check], log, report)
        frozen = subprocess.run(
            [str(python), "-m", "pip", "freeze"], capture_output=True, text=True, check=False
        ).stdout
        seconds, packages = round(time.monotonic() - began, 1), frozen.splitlines()
        done = {"name": spec.name, "seconds": seconds, "packages": packages}
        (target / COMPLETE).write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        report(f"{spec.name}: {len(packages)} packages in {seconds} s, in {target}")
        return python


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _interpreter(spec: EnvironmentSpec) -> str:
    if spec.python == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    found = shutil.which(f"python{spec.python}")
    if found is None:
        raise InfrastructureError(
            f"building the environment {spec.name}",
            got=f"no python{spec.python} on the path",
            expected=f"Python {spec.python}",
            fix="Install it, or give the plugin the path of an environment of your own.",
        )
    return found


def _lazy(step: tuple[str, ...]) -> tuple[str, ...]:
    """Without compiling 20,000 files of which an engine imports a tenth; Python compiles those as it comes to them."""
    return (step[0], "--no-compile", *step[1:]) if step[0] == "install" else step


def _call(spec: EnvironmentSpec, argv: list[str], log: Path, report: Callable[[str], None]) -> None:
    report(f"{spec.name}: {' '.join(argv[1:])[:160]}")
    with log.open("a", encoding="utf-8") as out:
        status = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
            env=inherited_environment(),
        ).returncode
    if status != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
        raise InfrastructureError(
            f"building the environment {spec.name}: {' '.join(argv)}",
            got=f"exit status {status}:\n{tail}\n",
            expected="exit status 0",
            fix=f"The whole log is {log}.",
        )


def _write_files(spec: EnvironmentSpec, python: Path) -> None:
    if not spec.files:
        return
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    for file in spec.files:
        path = packages / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.content, encoding="utf-8")
