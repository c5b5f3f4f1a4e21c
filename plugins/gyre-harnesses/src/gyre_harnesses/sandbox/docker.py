"""Sandbox `docker`: each workspace a container, driven by the docker command line (podman's is the same).

Invariant: a container is made with no network, no capabilities and limits, and removed with its workspace; what a
command left running is killed before `run` returns; paths that lead out of the working folder are refused inside. The
client failing is our fault, the command failing is its result. Not here: building images.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import tarfile
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from gyre_core import ComponentContext, ConfigError, ExecRequest, ExecResult, InfrastructureError

from gyre_harnesses.options import DockerOptions

_CLIENT_S = 300.0
"""What the client may take to make, copy or remove."""
_FLOOD_BYTES = 1 << 28
_CHUNK = 1 << 16
_KILLED = 137
_REFUSALS = (b"Error", b"Cannot connect")
"""What the client says when a container is gone or its daemon does not answer; a command may say so too."""
_TRIES = 8
"""Of reading or writing a file: a command that ends meanwhile takes it along with what it left running."""

# The container's first process: reaps what is orphaned, and outlives `kill -9 -1`, which spares process 1.
_FIRST = "while :; do sleep 3600 & wait; done"
_END_ALL = "kill -9 -1"
_CODES = {40: FileNotFoundError, 41: PermissionError, 42: PermissionError, 43: IsADirectoryError}
_RESOLVE = """
root=$1 path=$2
case "$path" in /*) exit 41;; esac
real=$(realpath -m -- "$root/$path") || exit 40
case "$real" in "$root"|"$root"/*) ;; *) exit 41;; esac
"""
_READ = f"""{_RESOLVE}
[ -e "$real" ] || exit 40
[ -d "$real" ] && exit 43
[ -f "$real" ] || exit 42
exec head -c "$3" -- "$real"
"""
_WRITE = f"""{_RESOLVE}
[ -d "$real" ] && exit 43
[ ! -e "$real" ] || [ -f "$real" ] || exit 42
mkdir -p -- "$(dirname -- "$real")" && exec cat > "$real"
"""
_LIST = f"""{_RESOLVE}
[ -d "$real" ] || exit 40
cd "$root" && exec find "$real" -type f -print0
"""


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a client call gave."""

    code: int | None
    out: bytes
    err: bytes
    dropped: int = 0
    limit: str | None = None


async def _client(
    argv: Sequence[str],
    data: bytes,
    timeout_s: float,
    keep: int,
    after: Callable[[], Awaitable[None]] | None = None,
) -> _Ran:
    """Run the client; its code is None when it was killed. `after` ends what it left, so that its outputs close."""
    try:
        process = await asyncio.create_subprocess_exec(*argv, stdin=-1, stdout=-1, stderr=-1, start_new_session=True)
    except OSError as error:
        raise InfrastructureError(
            f"starting {argv[0]}",
            got=str(error),
            expected="a docker client",
            fix="Install one, or set the option client.",
        ) from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    kept = [bytearray(), bytearray()]
    dropped, flooded = 0, asyncio.Event()

    async def take(stream: asyncio.StreamReader, into: bytearray) -> None:
        nonlocal dropped
        while chunk := await stream.read(_CHUNK):
            room = keep - sum(map(len, kept))
            into += chunk[: max(0, room)]
            dropped += len(chunk) - min(len(chunk), max(0, room))
            if dropped > _FLOOD_BYTES:
                flooded.set()
                return

    async def give() -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.close()

    work = asyncio.ensure_future(
        asyncio.gather(give(), take(process.stdout, kept[0]), take(process.stderr, kept[1]), return_exceptions=True)
    )
    deadline = time.monotonic() + timeout_s
    try:
        # Not process.wait(): that waits for the pipes too, which background processes hold open.
        while process.returncode is None and time.monotonic() < deadline and not flooded.is_set():
            await asyncio.sleep(0.005)
        limit = "output" if flooded.is_set() else "wall" if process.returncode is None else None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if after is not None:
            await asyncio.shield(after())
        await asyncio.wait({work}, timeout=5.0)
        work.cancel()
    return _Ran(None if limit else process.returncode, bytes(kept[0]), bytes(kept[1]), dropped, limit)


class DockerWorkspace:
    """One container. Commands run one at a time."""

    def __init__(self, options: DockerOptions, container: str, closed: Callable[[DockerWorkspace], None]) -> None:
        self._options, self.container, self._tell_closed = options, container, closed
        self._lock = asyncio.Lock()
        self._closed = False

    @property
    def path(self) -> None:
        """It is not on this host."""
        return None

    def _exec(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> list[str]:
        words = [self._options.client, "exec", "-i", "-w", cwd]
        for key, text in env.items():
            words += ["-e", f"{key}={text}"]
        return [*words, self.container, *argv]

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run a command to its end or limit; see `gyre_core.Workspace.run`."""
        root = self._options.workdir
        cwd = os.path.normpath(os.path.join(root, request.cwd))
        if cwd != root and not cwd.startswith(f"{root}/"):
            raise PermissionError(errno.EPERM, "path leads out of the workspace", request.cwd)
        async with self._lock:
            began = time.monotonic()
            argv = self._exec(request.argv, request.env, cwd)
            ran = await _client(argv, request.stdin, request.timeout_s, request.output_bytes, self._end_all)
            seconds = time.monotonic() - began
            doubtful = ran.code == 125 or (ran.code == 1 and ran.err.startswith(_REFUSALS))
            if doubtful and not await self._answers():
                raise self._broken("running a command", ran)
        return ExecResult(ran.code, ran.out, ran.err, seconds, ran.limit, ran.dropped)

    async def _answers(self) -> bool:
        """The container still runs commands. A command may exit, and print, as the client does that reached none."""
        return (await _client(self._exec(["true"], {}, "/"), b"", _CLIENT_S, 1000)).code == 0

    async def _end_all(self) -> None:
        await _client(self._exec(["sh", "-c", _END_ALL], {}, "/"), b"", _CLIENT_S, 1000)

    def _broken(self, doing: str, ran: _Ran) -> InfrastructureError:
        said = (ran.err or ran.out).decode("utf-8", "replace").strip()[-500:]
        return InfrastructureError(
            f"{doing} in container {self.container}", got=said or f"code {ran.code}", expected="a container that runs"
        )

    async def _script(self, script: str, path: str, *more: str, data: bytes = b"", keep: int = 1 << 26) -> bytes:
        if "\0" in path:
            raise PermissionError(errno.EPERM, "path holds a NUL byte", path.replace("\0", "\\0"))
        argv = ["sh", "-c", script, "sh", self._options.workdir, path, *more]
        for _ in range(_TRIES):
            ran = await _client(self._exec(argv, {}, "/"), data, _CLIENT_S, keep)
            if ran.code != _KILLED:
                break
        if ran.code in _CODES:
            kind = _CODES[ran.code]
            number = {FileNotFoundError: errno.ENOENT, IsADirectoryError: errno.EISDIR}.get(kind, errno.EPERM)
            why = "path leads out of the workspace" if ran.code == 41 else os.strerror(number)
            raise kind(number, why, path)
        if ran.code != 0:
            raise self._broken(f"reaching {path!r}", ran)
        return ran.out

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """At most `limit` bytes of a regular file inside."""
        return await self._script(_READ, path, str(limit), keep=limit)

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file inside, with its parents."""
        await self._script(_WRITE, path, data=data)

    async def list(self, path: str = ".") -> Sequence[str]:
        """Relative paths of all regular files below `path`, sorted."""
        found = (await self._script(_LIST, path)).decode("utf-8", "surrogateescape").split("\0")
        return sorted(name.removeprefix(f"{self._options.workdir}/") for name in found if name)

    async def snapshot(self, location: str) -> None:
        """The folder as a tar file at `location`, atomically."""
        argv = ["tar", "-C", self._options.workdir, "-cf", "-", "."]
        async with self._lock:
            ran = await _client(self._exec(argv, {}, "/"), b"", _CLIENT_S, self._options.snapshot_bytes)
        if ran.code != 0 or ran.dropped:
            raise self._broken("saving the workspace", ran)
        await asyncio.to_thread(put_archive, location, ran.out)

    async def fill(self, archive: bytes) -> None:
        """Unpack a tar archive into the folder, as the user that commands run as."""
        argv = ["tar", "-C", self._options.workdir, "-xf", "-"]
        ran = await _client(self._exec(argv, {}, "/"), archive, _CLIENT_S, 1000)
        if ran.code != 0:
            raise self._broken("filling the workspace", ran)

    async def close(self) -> None:
        """Remove the container with all that runs in it."""
        if not self._closed:
            self._closed = True
            self._tell_closed(self)
            await _client([self._options.client, "rm", "-f", "-v", self.container], b"", _CLIENT_S, 1000)


def put_archive(location: str, data: bytes) -> None:
    """Write a snapshot, whole or not at all."""
    partial = f"{location}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, location)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise InfrastructureError(f"saving a workspace to {location}", got=str(error)) from error


class DockerSandbox:
    """Makes containers. `Class(options, context)` as registrations require."""

    def __init__(self, options: DockerOptions | None, context: ComponentContext) -> None:
        self.options = options or DockerOptions()
        self._made: set[DockerWorkspace] = set()

    def _arguments(self, name: str) -> list[str]:
        options = self.options
        words = [options.client, "run", "-d", "--name", name, "--label", "gyre=workspace", "--workdir", options.workdir]
        words += ["--network", options.network, "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        words += [
            "--memory",
            f"{options.memory_mb}m",
            "--pids-limit",
            str(options.processes),
            "--cpus",
            str(options.cpus),
        ]
        if options.user:
            words += ["--user", options.user]
        return [*words, *options.arguments, options.image, "sh", "-c", _FIRST]

    async def _start(self, name: str, archive: bytes) -> DockerWorkspace:
        container = f"gyre-{uuid.uuid4().hex[:16]}"
        workspace = DockerWorkspace(self.options, container, self._made.discard)
        self._made.add(workspace)
        try:
            await self._fill(name, workspace, archive)
        except BaseException:
            with contextlib.suppress(InfrastructureError):
                await asyncio.shield(workspace.close())
            raise
        return workspace

    async def _fill(self, name: str, workspace: DockerWorkspace, archive: bytes) -> None:
        ran = await _client(self._arguments(workspace.container), b"", _CLIENT_S, 10_000)
        if ran.code != 0:
            raise InfrastructureError(
                f"starting a container for workspace {name!r}",
                got=(ran.err or ran.out).decode("utf-8", "replace").strip()[-500:],
                expected=f"the image {self.options.image} to start",
                fix="Look at `docker info`, and at the sandbox's options image and arguments.",
            )
        await workspace.fill(archive)

    async def create(self, name: str, files: Mapping[str, bytes]) -> DockerWorkspace:
        """A fresh container with these files."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for path, data in files.items():
                if path.startswith("/") or ".." in path.split("/"):
                    raise ConfigError(f"filling workspace {name!r}", got=path, expected="paths inside it")
                member = tarfile.TarInfo(path)
                member.size, member.mode = len(data), 0o644
                tar.addfile(member, io.BytesIO(data))
        return await self._start(name, buffer.getvalue())

    async def restore(self, name: str, location: str) -> DockerWorkspace:
        """A container whose folder is as `DockerWorkspace.snapshot` left it."""
        try:
            archive = await asyncio.to_thread(get_archive, location)
        except (OSError, tarfile.TarError) as error:
            raise InfrastructureError(f"restoring a workspace from {location}", got=str(error)) from error
        return await self._start(name, archive)

    async def close(self) -> None:
        """Remove all containers."""
        await asyncio.gather(*(workspace.close() for workspace in list(self._made)))
        self._made.clear()


def get_archive(location: str) -> bytes:
    """Read a snapshot; tarfile.TarError when it is none."""
    with open(location, "rb") as file:
        data = file.read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.getmembers()
    return data
