"""Fresh copies of a workspace with the hidden suite in them.

Invariant: a copy is made for one run and has a name that was never told before, so that nothing a run did to its copy
reaches the next; the workspace is touched by commands run in it alone. What the work itself makes impossible, by its
size, its modes or what it does to its folder while it is judged, is an `UnfitError` and earns nothing: only what would
have failed with ordinary work is our fault. Not here: what is run in a copy.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import shlex
import zipfile
from collections.abc import Mapping

from gyre_core import ExecRequest, ExecResult, InfrastructureError, Task, Workspace

from gyre_scorers.hidden.suite import Suite
from gyre_scorers.hidden.tools import pytest_archive
from gyre_scorers.options import PytestOptions

ENV = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
_REMOVED = ("__pycache__", "*.pyc", "*.pth", "conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini")
_INI = b"[pytest]\n"
_ORDINARY_BYTES = 1 << 28
"""Of work beyond what its task brought: what any host has room and time to copy."""
_ROOM_BYTES = 1 << 26
"""Less on the disk means that it is full."""
_COPY = f"""
mkdir -p "$1/repo" || exit 3
find . -mindepth 1 -maxdepth 1 ! -name '.gyre-*' -exec sh -c 'cp -RP "$@" "$0/repo/"' "$1" '{{}}' + || part=1
chmod -R u+rwX "$1"
cd "$1/repo" || exit 3
find . '(' {" -o ".join(f"-name {shlex.quote(name)}" for name in _REMOVED)} ')' -prune -exec rm -rf '{{}}' +
exit "${{part:-0}}"
"""
_CLEAR = """
cd "$0" || exit 3
for target in "$@"; do
    if [ -L "$target" ]; then rm -f -- "$target"; fi
    if [ -d "$target" ]; then find "./$target" '(' -name 'test_*.py' -o -name '*_test.py' ')' -exec rm -rf '{}' +; fi
done
"""
_REMOVE = 'for each in "$@"; do chmod -R u+rwX "$each"; rm -rf "$each"; done'
_PUT = """
import io, os, shutil, stat, sys, zipfile
print("here", flush=True)
os.chdir(sys.argv[1])
archive = zipfile.ZipFile(io.BytesIO(sys.stdin.buffer.read()))
for name in archive.namelist():
    parts = [part for part in name.split("/") if part not in ("", ".")]
    for end in range(1, len(parts) + 1):
        place, last = "/".join(parts[:end]), end == len(parts)
        try:
            folder = stat.S_ISDIR(os.lstat(place).st_mode)
        except FileNotFoundError:
            folder = None
        if folder and last:
            shutil.rmtree(place)
        elif folder is False:
            os.unlink(place)
        if not last and not folder:
            os.mkdir(place)
    with open("/".join(parts), "xb") as file:
        file.write(archive.read(name))
print("done", flush=True)
"""
"""Whatever the work, or its set-up, left where a file or one of its folders goes is replaced; no link is followed."""
_LOOK = """
import os
def stop(error):
    raise error
total = 0
for place in {os.getcwd(), os.environ.get("HOME", "."), os.environ.get("TMPDIR", ".")}:
    for folder, folders, files in os.walk(place, onerror=stop):
        for name in folders + files:
            info = os.lstat(os.path.join(folder, name))
            total += max(info.st_blocks * 512, info.st_size, 4096)
room = os.statvfs(".")
print(total, room.f_bavail * room.f_frsize if room.f_favail or not room.f_files else 0)
"""


class UnfitError(Exception):
    """The work does not let itself be copied or judged; says how."""


class Copies:
    """Makes copies of one workspace for one suite, one at a time."""

    def __init__(self, suite: Suite, options: PytestOptions, task: Task, workspace: Workspace) -> None:
        self._suite, self._options, self._workspace = suite, options, workspace
        self._brought = 2 * sum(len(data) for data in task.files.values())
        self._made: list[str] = []

    @property
    def python(self) -> tuple[str, ...]:
        """The interpreter, which sees nothing of its environment."""
        packages = () if self._suite.site_packages else ("-S",)
        return (self._suite.python or self._options.python, "-I", "-B", *packages)

    async def fresh(self, files: Mapping[str, bytes]) -> str:
        """The folder of a new copy with these files of the suite, in `repo`; the copy before it is gone."""
        await self.remove()
        scratch = f".gyre-{secrets.token_hex(8)}"
        self._made.append(scratch)
        copied = await self._run(["sh", "-c", _COPY, "sh", scratch], self._options.setup_s)
        if copied.exit_code == 127:
            raise InfrastructureError(
                "copying a workspace to score it", got=_said(copied), expected="sh, find, cp and chmod in the sandbox"
            )
        if copied.exit_code != 0:
            await self._blame("copying the workspace", copied, goes_on=copied.exit_code == 1)
        await self._put(scratch, files)
        for line in self._suite.setup:
            await self._run(["sh", "-c", line], self._options.setup_s, cwd=f"{scratch}/repo")
        if self._suite.setup:
            await self._put(scratch, files)
        return scratch

    async def remove(self) -> None:
        """Delete the copies, as far as the work lets us."""
        with contextlib.suppress(UnfitError):
            if self._made:
                await self._run(["sh", "-c", _REMOVE, "sh", *self._made], self._options.setup_s)

    async def judge(self, scratch: str, program: bytes, timeout_s: float) -> ExecResult:
        """Run the guard in a copy."""
        request = ExecRequest(
            [*self.python, "-"], timeout_s, self._options.output_bytes, ENV, program, f"{scratch}/repo"
        )
        return await self._asked(request)

    async def _put(self, scratch: str, files: Mapping[str, bytes]) -> None:
        await self._run(["sh", "-c", _CLEAR, f"{scratch}/repo", *self._suite.targets], self._options.setup_s)
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as writer:
            for path, data in {"tools.zip": pytest_archive(), "suite.ini": _INI}.items():
                writer.writestr(zipfile.ZipInfo(path), data)
            for path, data in files.items():
                writer.writestr(zipfile.ZipInfo(f"repo/{path}"), data)
        request = [*self.python, "-c", _PUT, scratch]
        put = await self._run(request, self._options.setup_s, archive.getvalue())
        if put.limit is None and not put.stdout.startswith(b"here"):
            raise no_python(put, self.python[0])
        if not put.stdout.endswith(b"done\n"):
            await self._blame("putting the suite into the copy", put)

    async def _blame(self, doing: str, result: ExecResult, *, goes_on: bool = False) -> None:
        """Raises whose fault it was: ours only if the work is no larger than what its task brought, or than any host
        bears where it was not the sandbox's own limit of disk that was hit."""
        look = await self._run([*self.python, "-c", _LOOK], self._options.setup_s)
        words = look.stdout.split() if look.exit_code == 0 else []
        size, room = (int(words[0]), int(words[1])) if len(words) == 2 else (1 << 62, 1 << 62)
        ordinary = size <= self._brought + (0 if result.limit == "disk" else _ORDINARY_BYTES)
        if ordinary and (result.limit is not None or room < _ROOM_BYTES):
            raise InfrastructureError(
                f"{doing} to score it",
                got=_said(result),
                expected="room and time for a second copy",
                fix="Free the disk, or raise the sandbox's disk limit or the scorer's option setup_s.",
            )
        if not goes_on:
            raise UnfitError(f"{doing} failed: {_said(result)}")

    async def _run(self, argv: list[str], timeout_s: float, stdin: bytes = b"", cwd: str = ".") -> ExecResult:
        return await self._asked(ExecRequest(argv, timeout_s, 1 << 16, ENV, stdin, cwd))

    async def _asked(self, request: ExecRequest) -> ExecResult:
        """A folder that commands cannot be run in is the work's doing: we gave it one that they could."""
        try:
            return await self._workspace.run(request)
        except OSError as error:
            raise UnfitError(f"no command can be run in {request.cwd!r}: {error.strerror or error}") from error


def no_python(run: ExecResult, name: str) -> InfrastructureError:
    """The error when the interpreter did not even start."""
    return InfrastructureError(
        f"running the hidden suite with {name}",
        got=_said(run),
        expected="a Python of at least 3.10 in the sandbox that can run the pytest brought along",
        fix="Install one in the sandbox, or set the scorer's option python.",
    )


def _said(result: ExecResult) -> str:
    if result.limit is not None:
        return f"killed at the limit of {result.limit}"
    return (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-500:] or f"exit {result.exit_code}"
