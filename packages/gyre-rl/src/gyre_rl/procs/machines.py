"""The launcher for several machines: cells on the hosts of a list, everything else beside the run.

A cell is started by a command that runs a program on another host (ssh, srun, a container's exec) with the tether
there, whose standard input stays here. Invariants: a cell is on the same host in each of its lives; nothing outlives
`close`, nor this process by more than the connection's end. What the hosts must have in common: the run's directory
and the files that the configuration names, under the same paths, and Gyre.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from gyre_core import ComponentContext, ConfigError, InfrastructureError, ProcessHandle, ProcessSpec

from gyre_rl.procs.address import in_url, is_loopback
from gyre_rl.procs.launcher import Devices, LocalLauncher
from gyre_rl.procs.probe import PATIENCE_S, Found
from gyre_rl.procs.sockets import listening
from gyre_rl.procs.tether import END

HERE = "localhost"
"""In `hosts`: the run's own machine, without a command."""
PLACE = "{host}"
KILL_S = 10.0
"""How long a connection may take to end once what it held was killed; then its own process is."""


PROBE_S = 60.0
"""How long a host may take to tell of itself."""
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class MachinesOptions:
    """Where the cells of a run live. They are dealt in order: the first `cells_per_host` on the first host."""

    hosts: tuple[str, ...]
    """Machines, by the names that `command` knows; "localhost" is the run's own."""
    cells_per_host: int = 1
    command: tuple[str, ...] = (
        "ssh",
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=10",
        "-o",
        "ServerAliveInterval=10",
        PLACE,
    )
    """Words that run a program on a host, its words following; "{host}" is the host's name. It must hand its standard
    input on, as ssh and srun do."""
    shell: bool = True
    """The program's words pass through a shell there, as with ssh, and are quoted for it."""
    python: str = ""
    """Interpreter that has Gyre, on every other host; empty: the path of this one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the cells there, beside those that the run sets. This process's own stay here. They travel by
    standard input, so that nobody reads them from a process's arguments."""

    def __post_init__(self) -> None:
        wrong = ""
        if not self.hosts or not all(self.hosts):
            wrong = f"hosts: got {list(self.hosts)}, expected at least one name and no empty one"
        elif self.cells_per_host < 1:
            wrong = f"cells_per_host: got {self.cells_per_host}, expected 1 or more"
        elif not any(PLACE in word for word in self.command):
            wrong = f"command: got {list(self.command)}, expected words with {PLACE} in one of them"
        if wrong:
            raise ValueError(f"options of MachinesOptions: {wrong}")

    def host_of(self, cell: int) -> str:
        """Where a cell lives; ConfigError when there are more cells than places."""
        if cell >= len(self.hosts) * self.cells_per_host:
            raise ConfigError(
                f"placing cell {cell}", got=f"{len(self.hosts)} hosts with {self.cells_per_host} cells each",
                expected="a place for every cell", fix="Name more hosts, raise cells_per_host, or lower cells.count.",
            )  # fmt: skip
        return self.hosts[cell // self.cells_per_host]

    def words(self, host: str, spec: ProcessSpec, folder: str) -> list[str]:
        """The whole command that starts `spec` on `host`, held by a tether."""
        python = self.python or sys.executable
        program = [python, *spec.argv[1:]] if spec.argv[0] == sys.executable else list(spec.argv)
        return self.there(host, "gyre_rl.procs.tether", "--folder", folder, "--", *program)

    def there(self, host: str, *module: str) -> list[str]:
        """The whole command that runs a Python module with its arguments on `host`."""
        inner = [self.python or sys.executable, "-m", *module]
        outer = [word.replace(PLACE, host) for word in self.command]
        return [*outer, *(map(shlex.quote, inner) if self.shell else inner)]


class TetheredProcess:
    """A program on another host, held by the standard input of the command that started it."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process, self.name = process, name
        self._exit = asyncio.ensure_future(process.wait())

    @property
    def pid(self) -> int | None:
        """None: it has one on its own host."""
        return None

    async def wait(self) -> int:
        """Exit status; 128 plus the number for a signal, and what the command itself ends with when it fails."""
        return await asyncio.shield(self._exit)

    async def _ends_in(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exit), seconds)
        return self._exit.done()

    async def terminate(self, grace_s: float = 5.0) -> int:
        """Ask it to end; after `grace_s` seconds let go of it, which kills its process group."""
        stdin = self._process.stdin
        assert stdin is not None
        if not self._exit.done():
            with contextlib.suppress(ConnectionError):
                stdin.write(END)
                await asyncio.wait_for(stdin.drain(), grace_s or 1.0)
            await self._ends_in(grace_s)
        stdin.close()
        if not await self._ends_in(KILL_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return await self.wait()


def _answer_in(file: IO[bytes]) -> Mapping[str, Any] | None:
    """What a probe told, among whatever else a host says to who comes in."""
    file.seek(0)
    for line in file.read().splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            found = json.loads(line) if line.endswith(b"\n") else None
            if isinstance(found, dict) and "version" in found:
                return found
    return None


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    return (file.read().decode(errors="replace").strip().splitlines() or [""])[-1]


async def _judge(told: Mapping[str, Any]) -> str:
    """What is wrong with a machine that told this of itself."""
    if told["version"] != version("gyre-rl"):
        return f"it has gyre-rl {told['version']}, and this machine {version('gyre-rl')}"
    found = Found(**told)
    if found.reaches:
        return f"it does not reach this machine ({found.reaches}): see [network] address"
    if not found.sees:
        return "the run's directory is not there: put `dir` on a file system that all machines share"
    try:
        async with asyncio.timeout(PATIENCE_S / 2):
            _, writer = await asyncio.open_connection(found.address, found.port)
        writer.close()
    except (OSError, TimeoutError) as error:
        return f"it is not reached at {found.address} ({error or 'no answer'})"
    return ""


class MachinesLauncher:
    """Starts cells on the hosts of its options, and the run's other processes here."""

    def __init__(self, options: MachinesOptions, context: ComponentContext) -> None:
        if is_loopback(context.address) and any(host != HERE for host in options.hosts):
            raise ConfigError(
                "making the launcher of several machines", got=f"the run's address {context.address}",
                expected="one that the other machines reach",
                fix="Set [network] address to this machine's address on their network.",
            )  # fmt: skip
        self._options, self._address = options, context.address
        self._here = LocalLauncher(None, context)
        self._started: list[TetheredProcess] = []
        self._devices: dict[str, Devices] = {}

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start it in its place; ConfigError for a cell without one, InfrastructureError when the command cannot be
        started. A host that cannot be reached shows as an early end, with the command's words in the log."""
        host = HERE if spec.cell is None else self._options.host_of(spec.cell)
        if host == HERE:
            return await self._here.start(spec)
        devices = self._devices.setdefault(host, Devices())
        env = {**devices.env(spec), **spec.env, **self._options.environment}
        words = self._options.words(host, spec, os.getcwd())
        try:
            with Path(spec.log_path or os.devnull).open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *words, stdin=PIPE, stdout=output, stderr=output, start_new_session=True
                )
        except OSError as error:
            raise InfrastructureError(
                f"starting the process {spec.name!r} on {host} with {words[0]!r}", got=str(error)
            ) from error
        assert process.stdin is not None
        process.stdin.write(json.dumps(env).encode() + b"\n")
        handle = TetheredProcess(process, spec.name)
        self._started.append(handle)
        return handle

    async def probe(self, cells: int, run_dir: str) -> Sequence[str]:
        """Places for all cells, and on each host: Gyre of this version, the run's directory (the nearest folder above
        it that exists), and a way there and back."""
        try:
            hosts = {self._options.host_of(cell) for cell in range(cells)} - {HERE}
        except ConfigError as error:
            return [str(error)]
        if not hosts:
            return ()
        folder = next(path for path in (Path(run_dir), *Path(run_dir).parents) if path.is_dir())
        try:
            with (
                tempfile.NamedTemporaryFile(dir=folder, prefix=".gyre-seen-") as mark,
                listening(self._address, 0) as server,
            ):
                server.listen(len(hosts))
                url = f"http://{in_url(self._address)}:{server.getsockname()[1]}"
                told = await asyncio.gather(*(self._probe(host, url, mark.name) for host in sorted(hosts)))
        except OSError as error:
            return [f"got {error.strerror or error} for a file in {folder} or a port of {self._address}"]
        return [f"{host}: {problem}" for host, problem in zip(sorted(hosts), told, strict=True) if problem]

    async def _probe(self, host: str, url: str, mark: str) -> str:
        """What is wrong with a host; empty when nothing is. Its words go to files: whatever the command leaves behind
        may keep a pipe open for ever."""
        spec = ProcessSpec("probe", [sys.executable, "-m", "gyre_rl.procs.probe", url, mark])
        words = self._options.words(host, spec, os.getcwd())
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said:
            try:
                process = await asyncio.create_subprocess_exec(
                    *words, stdin=PIPE, stdout=told, stderr=said, start_new_session=True
                )
            except OSError as error:
                return f"{words[0]!r} cannot be started ({error})"
            assert process.stdin is not None
            process.stdin.write(json.dumps(dict(self._options.environment)).encode() + b"\n")
            tethered = TetheredProcess(process, "probe")
            try:
                async with asyncio.timeout(PROBE_S):
                    while (found := _answer_in(told)) is None and process.returncode is None:
                        await asyncio.sleep(LOOK_S)
                    if found := found or _answer_in(told):
                        return await _judge(found)
            except TimeoutError:
                return f"no answer in {PROBE_S:.0f} s; it said {_last_line(said) or 'nothing'}"
            finally:
                await tethered.terminate(0.0)
            return f"no Gyre there: {_last_line(said) or _last_line(told) or 'no word'} (status {process.returncode})"

    async def close(self) -> None:
        """End all, at once."""
        await asyncio.gather(self._here.close(), *(process.terminate() for process in self._started))
        self._started.clear()
