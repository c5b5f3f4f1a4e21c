"""Sandbox `swe-rex`: each workspace a folder behind a swe-rex server, reached over its HTTP interface.

Invariant: a command ends with its limit, its cancellation or its workspace, to the last process that kept its mark;
paths that lead out are refused on the far side. How far a workspace is isolated is up to where its server runs: with
`start` each has a server of its own, such as a container. A server that is gone is our fault, never the agent's.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import io
import os
import secrets
import signal
import socket
import tarfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from gyre_core import ComponentContext, ConfigError, ExecRequest, ExecResult, InfrastructureError

from gyre_harnesses.options import SweRexOptions
from gyre_harnesses.sandbox import rex_scripts as scripts
from gyre_harnesses.sandbox.docker import get_archive, put_archive

_REQUEST_S = 300.0
_FLOOD_BYTES = 1 << 28
_LOOK_S = (0.01, 0.3)
"""Seconds between two looks at a running command: at first, at last."""
PORT_TRIES = 3
"""Ports on which a server of ours is started before its end is an error."""
_ERRORS: Mapping[int, tuple[type[OSError], int]] = {
    40: (FileNotFoundError, errno.ENOENT),
    41: (PermissionError, errno.EPERM),
    42: (PermissionError, errno.EPERM),
    43: (IsADirectoryError, errno.EISDIR),
    44: (FileNotFoundError, errno.ENOENT),
}


@dataclass(frozen=True, slots=True)
class Server:
    """A swe-rex server: `execute` and `write_file` of its interface (swe-rex 1.x)."""

    http: aiohttp.ClientSession
    url: str
    token: str

    async def ask(self, path: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """POST `body` (GET without one); InfrastructureError when the server does not answer as it should."""
        doing = f"asking the swe-rex server {self.url}{path}"
        headers = {"X-API-Key": self.token} if self.token else {}
        method = "GET" if body is None else "POST"
        try:
            timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
            url = f"{self.url}{path}"
            async with self.http.request(method, url, json=body, headers=headers, timeout=timeout) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise InfrastructureError(doing, got=f"HTTP {answer.status}: {text[:300]}", expected="200")
                found: Mapping[str, Any] = await answer.json()
                return found
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise InfrastructureError(doing, got=f"{type(error).__name__}: {error}", expected="an answer") from error

    async def script(
        self, text: str, *words: str, env: Mapping[str, str] | None = None, path: str = ""
    ) -> Mapping[str, Any]:
        """Run a script of `rex_scripts`; its exit codes from 40 on are errors about `path`."""
        told = await self.ask("/execute", {"command": ["sh", "-c", text, "sh", *words], "env": env})
        code = told["exit_code"]
        if code in _ERRORS:
            kind, number = _ERRORS[code]
            why = "path leads out of the workspace" if code == 41 else os.strerror(number)
            raise kind(number, why, path)
        if code != 0:
            raise InfrastructureError(
                f"working behind the swe-rex server {self.url}", got=f"exit {code}: {told['stderr'][-300:]}"
            )
        return told

    async def put(self, place: str, data: bytes) -> None:
        """`data` as base64 in a file there."""
        await self.ask("/write_file", {"path": place, "content": base64.b64encode(data).decode()})


@dataclass
class RexWorkspace:
    """A folder behind a server. Commands run one at a time."""

    server: Server
    base: str
    """Folder on the far side; `work` in it is the workspace, `jobs` holds what runs."""
    tell_closed: Callable[[RexWorkspace], None]
    process: asyncio.subprocess.Process | None = None
    """The server's, when it is this workspace's own."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closed: bool = False

    def __hash__(self) -> int:
        return id(self)

    @property
    def path(self) -> None:
        """It is not on this host, or need not be."""
        return None

    @property
    def _work(self) -> str:
        return f"{self.base}/work"

    def _outer(self) -> dict[str, str]:
        return {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": f"{self.base}/home", "LANG": "C.UTF-8"}

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run a command to its end or limit; see `gyre_core.Workspace.run`."""
        cwd = os.path.normpath(os.path.join(self._work, request.cwd))
        if cwd != self._work and not cwd.startswith(f"{self._work}/"):
            raise PermissionError(errno.EPERM, "path leads out of the workspace", request.cwd)
        async with self._lock:
            mark = uuid.uuid4().hex
            job = f"{self.base}/jobs/{mark}"
            began = time.monotonic()
            await self.server.put(f"{job}/in64", request.stdin)
            limit: str | None = "wall"
            try:
                env = {**self._outer(), **request.env}
                await self.server.script(scripts.START, job, cwd, mark, *request.argv, env=env, path=request.cwd)
                code, limit = await self._watch(job, began + request.timeout_s, request.output_bytes)
            finally:
                await asyncio.shield(self._end(mark))
            seconds = time.monotonic() - began
            told = await self.server.script(scripts.TAKE, job, str(request.output_bytes))
        size_out, size_err, out, err = told["stdout"].split("\n")[:4]
        kept_out, kept_err = base64.b64decode(out), base64.b64decode(err)
        dropped = int(size_out) + int(size_err) - len(kept_out) - len(kept_err)
        return ExecResult(code, kept_out, kept_err, seconds, limit, dropped)

    async def _watch(self, job: str, deadline: float, keep: int) -> tuple[int | None, str | None]:
        pause = _LOOK_S[0]
        while True:
            told = await self.server.script(scripts.LOOK, job)
            code, size = told["stdout"].split()
            if code != "-":
                return int(code), None
            if int(size) > keep + _FLOOD_BYTES:
                return None, "output"
            left = deadline - time.monotonic()
            if left <= 0:
                return None, "wall"
            await asyncio.sleep(min(pause, max(left, 0.001)))
            pause = min(1.5 * pause, _LOOK_S[1])

    async def _end(self, mark: str) -> None:
        await self.server.script(scripts.KILL, mark)

    async def _reach(self, script: str, path: str, *more: str) -> bytes:
        if "\0" in path:
            raise PermissionError(errno.EPERM, "path holds a NUL byte", path.replace("\0", "\\0"))
        told = await self.server.script(script, self._work, path, *more, path=path)
        return base64.b64decode(told["stdout"])

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """At most `limit` bytes of a regular file inside."""
        return await self._reach(scripts.READ, path, str(limit))

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file inside, with its parents."""
        place = f"{self.base}/jobs/{uuid.uuid4().hex}.64"
        await self.server.put(place, data)
        await self._reach(scripts.WRITE, path, place)

    async def list(self, path: str = ".") -> Sequence[str]:
        """Relative paths of all regular files below `path`, sorted."""
        found = (await self._reach(scripts.LIST, path)).decode("utf-8", "surrogateescape").split("\0")
        return sorted(name.removeprefix(f"{self._work}/") for name in found if name)

    async def snapshot(self, location: str) -> None:
        """The folder as a tar file at `location` on this host, atomically."""
        async with self._lock:
            told = await self.server.script(scripts.PACK, self._work)
        await asyncio.to_thread(put_archive, location, base64.b64decode(told["stdout"]))

    async def fill(self, archive: bytes) -> None:
        """Unpack a tar archive into the folder."""
        place = f"{self.base}/jobs/fill.64"
        await self.server.put(place, archive)
        await self.server.script(scripts.UNPACK, self._work, f"{self.base}/home", place)

    async def close(self) -> None:
        """Remove the folder; end the server if it is this workspace's own."""
        if self._closed:
            return
        self._closed = True
        self.tell_closed(self)
        if self.process is None:
            with contextlib.suppress(InfrastructureError):
                await self.server.script('rm -rf "$1"', self.base)
            return
        with contextlib.suppress(InfrastructureError):
            await self.server.script('rm -rf "$1"', self.base)
        await end(self.process)


async def end(process: asyncio.subprocess.Process) -> None:
    """End a server: asked first (a container's client passes that on), then by force."""
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience)
            return


class SweRexSandbox:
    """Makes workspaces behind swe-rex servers. `Class(options, context)` as registrations require."""

    def __init__(self, options: SweRexOptions | None, context: ComponentContext) -> None:
        self.options = options or SweRexOptions()
        self._http: aiohttp.ClientSession | None = None
        self._made: set[RexWorkspace] = set()
        self._turn = 0

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None or self._http.closed:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._http

    async def _server(self) -> tuple[Server, asyncio.subprocess.Process | None]:
        options = self.options
        if options.urls:
            url = options.urls[self._turn % len(options.urls)]
            self._turn += 1
            return Server(self._session(), url.rstrip("/"), options.token), None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        token = secrets.token_urlsafe(24)
        words = [word.replace("{port}", str(port)).replace("{token}", token) for word in options.start]
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(
                f"starting a swe-rex server with {words[0]}",
                got=str(error),
                expected="a program that serves",
                fix="Install swe-rex, or set the sandbox's option start or urls.",
            ) from error
        return Server(self._session(), f"http://127.0.0.1:{port}", token), process

    async def _open(self, name: str, archive: bytes) -> RexWorkspace:
        for _ in range(PORT_TRIES - 1):
            opened = await self._try_to_open(archive, again=True)
            if opened is not None:
                return opened
        opened = await self._try_to_open(archive, again=False)
        assert opened is not None
        return opened

    async def _try_to_open(self, archive: bytes, *, again: bool) -> RexWorkspace | None:
        """None, if there may be another try, when our server ended before it answered: between the moment its port was
        found free and its own start another process may have taken it."""
        server, process = await self._server()
        base = f"{self.options.workdir}/{uuid.uuid4().hex}"
        workspace = RexWorkspace(server, base, self._made.discard, process)
        self._made.add(workspace)
        try:
            await self._alive(server, process)
            await workspace.fill(archive)
        except BaseException as error:
            ended = process is not None and process.returncode is not None
            await workspace.close()
            if again and ended and isinstance(error, InfrastructureError):
                return None
            raise
        return workspace

    async def _alive(self, server: Server, process: asyncio.subprocess.Process | None) -> None:
        deadline = time.monotonic() + self.options.start_s
        while True:
            try:
                if (await server.ask("/is_alive", None)).get("is_alive"):
                    return
                problem = InfrastructureError(f"reaching the swe-rex server {server.url}", got="not alive")
            except InfrastructureError as error:
                problem = error
            if time.monotonic() > deadline or (process is not None and process.returncode is not None):
                raise problem
            await asyncio.sleep(0.1)

    async def create(self, name: str, files: Mapping[str, bytes]) -> RexWorkspace:
        """A fresh workspace with these files."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for path, data in files.items():
                if path.startswith("/") or ".." in path.split("/"):
                    raise ConfigError(f"filling workspace {name!r}", got=path, expected="paths inside it")
                member = tarfile.TarInfo(path)
                member.size, member.mode = len(data), 0o644
                tar.addfile(member, io.BytesIO(data))
        return await self._open(name, buffer.getvalue())

    async def restore(self, name: str, location: str) -> RexWorkspace:
        """A workspace as `RexWorkspace.snapshot` left it."""
        try:
            archive = await asyncio.to_thread(get_archive, location)
        except (OSError, tarfile.TarError) as error:
            raise InfrastructureError(f"restoring a workspace from {location}", got=str(error)) from error
        return await self._open(name, archive)

    async def close(self) -> None:
        """Close all workspaces."""
        await asyncio.gather(*(workspace.close() for workspace in list(self._made)))
        if self._http is not None:
            await self._http.close()
