"""A workspace that is a plain folder with plain subprocesses: for tests without a sandbox plugin.

Invariant: it keeps the letter of the `Workspace` protocol for well-behaved commands (limits of time and output, refusal
of paths that lead out). It isolates nothing: never give it commands of a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gyre_core.agents import ExecRequest, ExecResult


class FolderWorkspace:
    """Commands run as children of this process in `path`."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path)

    @property
    def path(self) -> str:
        """The folder."""
        return self._path

    def _inside(self, path: str) -> str:
        real = os.path.realpath(os.path.join(self._path, path))
        if "\0" in path or not f"{real}/".startswith(f"{self._path}/"):
            raise PermissionError(1, "path leads out of the workspace", path)
        return real

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run to the end or the limit of time; kills the process group."""
        began = time.monotonic()
        cwd = self._inside(request.cwd)
        if not Path(cwd).is_dir():
            raise FileNotFoundError(2, "no such folder", request.cwd)
        try:
            process = await asyncio.create_subprocess_exec(
                *request.argv,
                cwd=cwd,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": os.defpath, "HOME": self._path, **request.env},
                start_new_session=True,
            )
        except OSError as error:
            return ExecResult(127, b"", str(error).encode()[: request.output_bytes], 0.0)
        reading = asyncio.ensure_future(process.communicate(request.stdin))
        limit = None
        try:
            # Not process.wait(): that waits for the pipes too, which background processes hold open.
            while process.returncode is None and time.monotonic() - began < request.timeout_s:
                await asyncio.sleep(0.005)
            limit = "wall" if process.returncode is None else None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        out, err = await reading
        kept_out = out[: request.output_bytes]
        kept_err = err[: request.output_bytes - len(kept_out)]
        code = process.returncode if process.returncode is None or process.returncode >= 0 else 128 - process.returncode
        dropped = len(out) + len(err) - len(kept_out) - len(kept_err)
        return ExecResult(None if limit else code, kept_out, kept_err, time.monotonic() - began, limit, dropped)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """At most `limit` bytes of a file inside."""
        return _read(self._inside(path), limit)

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file inside, with its parents."""
        _write(Path(self._inside(path)), data)

    async def list(self, path: str = ".") -> Sequence[str]:
        """Regular files below `path`."""
        return _list(Path(self._inside(path)), Path(self._path))

    async def snapshot(self, location: str) -> None:
        """A tar file."""
        with tarfile.open(f"{location}.partial", "w") as tar:
            tar.add(self._path, arcname=".")
        os.replace(f"{location}.partial", location)

    async def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._path, ignore_errors=True)


class FolderSandbox:
    """Makes `FolderWorkspace`s below `base`."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._made: list[FolderWorkspace] = []

    async def create(self, name: str, files: Mapping[str, bytes]) -> FolderWorkspace:
        """A fresh folder with these files."""
        workspace = FolderWorkspace(tempfile.mkdtemp(prefix=f"{name}-", dir=self._base))
        self._made.append(workspace)
        for path, data in files.items():
            await workspace.write(path, data)
        return workspace

    async def restore(self, name: str, location: str) -> FolderWorkspace:
        """A folder as `FolderWorkspace.snapshot` left it."""
        workspace = await self.create(name, {})
        with tarfile.open(location) as tar:
            tar.extraction_filter = lambda member, _: member  # our own archive; Python before 3.11.4 has no filters
            tar.extractall(workspace.path)
        return workspace

    async def close(self) -> None:
        """Delete all folders."""
        for workspace in self._made:
            await workspace.close()


def _read(path: str, limit: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(limit)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _list(start: Path, root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in start.rglob("*") if path.is_file() and not path.is_symlink())
