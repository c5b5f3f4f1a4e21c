"""A project's source distribution: fetched with pip, kept in a folder, read as files.

Invariant: an archive is in the folder whole or not at all, so several processes may fetch at a time; reading one takes
regular files inside its one top folder and follows no link. That something cannot be fetched is our fault, never the
agent's (InfrastructureError). pip builds the project's metadata, so fetching runs its build script: fetch only what you
would install. Which index is asked is pip's own configuration.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from gyre_core import InfrastructureError

_ARCHIVES = (".tar.gz", ".zip", ".tar.bz2", ".tgz")
_LARGEST = 1 << 28
"""Bytes of one archive, unpacked."""


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_archive(folder: Path, name: str) -> Path | None:
    """The source archive of distribution `name` in `folder`; the last by name when there are several."""
    found = [
        path
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if path.name.endswith(_ARCHIVES) and normal(path.name.rpartition("-")[0]) == normal(name)
    ]
    return found[-1] if found else None


def fetch(requirement: str, folder: Path, python: str | None, timeout_s: float) -> Path:
    """The source archive that pip finds for `requirement`, in `folder`; fetched unless it is there already."""
    key = re.sub(r"[^A-Za-z0-9.=<>!~-]+", "-", requirement)
    kept = folder / key
    name = re.split(r"[\s=<>!~;\[]", requirement.strip(), maxsplit=1)[0]
    found = find_archive(kept, name)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        _download(requirement, name, Path(scratch), python or find_python(), timeout_s)
        archive = find_archive(Path(scratch), name)
        if archive is None:
            got = ", ".join(sorted(path.name for path in Path(scratch).iterdir())) or "nothing"
            raise InfrastructureError(
                f"fetching the sources of {requirement}", got=got, expected=f"a source archive of {name}"
            )
        kept.mkdir(exist_ok=True)
        target = kept / archive.name
        os.replace(archive, target)
        return target


def find_python() -> str:
    """An interpreter that has pip: this one, the one this environment was made from, or any on the path."""
    if importlib.util.find_spec("pip") is not None:
        return sys.executable
    names = [os.path.join(sys.base_prefix, "bin", "python3")]
    names += [os.path.join(folder, name) for folder in os.get_exec_path() for name in ("python3", "python")]
    for path in dict.fromkeys(names):
        if os.access(path, os.X_OK) and _has_pip(path):
            return path
    raise InfrastructureError(
        "fetching a project's sources",
        got="no interpreter with pip",
        expected="pip, to ask the package index",
        fix="Install pip, set tasks.python to an interpreter that has it, or give the tests with tasks.tests.",
    )


def _has_pip(python: str) -> bool:
    try:
        return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _download(requirement: str, name: str, into: Path, python: str, timeout_s: float) -> None:
    flags = ["--no-deps", "--no-binary", name, "--no-input", "--disable-pip-version-check", "--quiet"]
    doing = f"fetching the sources of {requirement} with {python} -m pip"
    fix = "Check pip's configuration and the network, or give the tests with tasks.tests."
    try:
        done = subprocess.run(
            [python, "-m", "pip", "download", *flags, "--dest", str(into), "--", requirement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(doing, got=str(error)[:300], expected="an archive", fix=fix) from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise InfrastructureError(doing, got=said or f"exit {done.returncode}", expected="an archive", fix=fix)


def read_archive(path: Path) -> dict[str, bytes]:
    """Regular files of a source archive by path below its top folder."""
    files: dict[str, bytes] = {}
    total = 0
    try:
        for inside, data in _members(path):
            total += len(data)
            if total > _LARGEST:
                raise InfrastructureError(
                    f"reading {path}", got="more than it may hold", expected=f"at most {_LARGEST} bytes"
                )
            below = inside.partition("/")[2]
            if below and ".." not in below.split("/"):
                files[below] = data
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise InfrastructureError(f"reading {path}", got=str(error), expected="a source archive") from error
    return files


def _members(path: Path) -> list[tuple[str, bytes]]:
    if path.name.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            return [(each.filename, archive.read(each)) for each in archive.infolist() if not each.is_dir()]
    members = []
    with tarfile.open(path) as tar:
        for member in tar:
            opened = tar.extractfile(member) if member.isreg() else None
            if opened is not None:
                members.append((member.name, opened.read(_LARGEST + 1)))
    return members
