"""The local launcher: the processes of a run on this machine.

Invariant: each process leads a session of its own, so that ending it ends its children, and none outlives `close`.
What a child must do when the run vanishes without a word is in `gyre_rl.procs.child`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from gyre_core import ComponentContext, ConfigError, InfrastructureError, ProcessHandle, ProcessSpec

from gyre_rl.procs.tether import DEVICES, own_devices


class LocalProcess:
    """A child of this process and its session."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process, self.name = process, name
        self._exit = asyncio.ensure_future(process.wait())

    @property
    def pid(self) -> int | None:
        """Process id, also after its end."""
        return self._process.pid

    async def wait(self) -> int:
        """Exit status; negative for a signal."""
        return await asyncio.shield(self._exit)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def terminate(self, grace_s: float = 5.0) -> int:
        """SIGTERM to the session, then SIGKILL after `grace_s` seconds."""
        if not self._exit.done():
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._exit), grace_s)
        self._signal(signal.SIGKILL)
        return await self.wait()


class Devices:
    """Which of a machine's accelerators belong to which process, counted from 0. One that comes back gets the ones it
    had."""

    def __init__(self) -> None:
        self._taken: dict[str, range] = {}

    def env(self, spec: ProcessSpec) -> dict[str, str]:
        """The variable that leaves a process its own; none for a process without."""
        if not spec.accelerators:
            return {}
        if spec.name not in self._taken:
            first = sum(len(taken) for taken in self._taken.values())
            self._taken[spec.name] = range(first, first + spec.accelerators)
        return {DEVICES: ",".join(map(str, self._taken[spec.name]))}


class LocalLauncher:
    """Starts processes with the given environment on top of this process's own."""

    def __init__(self, options: None, context: ComponentContext) -> None:
        self._started: list[LocalProcess] = []
        self._devices = Devices()

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start it with output to `spec.log_path`; raises InfrastructureError if the program cannot be started."""
        log = Path(spec.log_path or os.devnull)
        devices = self._devices.env(spec)
        if devices:
            try:
                devices[DEVICES] = own_devices(devices[DEVICES], os.environ.get(DEVICES))
            except IndexError as error:
                raise ConfigError(
                    f"starting the process {spec.name!r}", got=f"{DEVICES}={os.environ[DEVICES]}",
                    expected=f"{spec.accelerators} more accelerators for it",
                    fix="Lower cells.count or cells.accelerators, or give the run more of them.",
                ) from error  # fmt: skip
        env = {**os.environ, **devices, **spec.env}
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    env=env,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise InfrastructureError(f"starting the process {spec.name!r}", got=str(error)) from error
        handle = LocalProcess(process, spec.name)
        self._started.append(handle)
        return handle

    async def probe(self, cells: int, run_dir: str) -> Sequence[str]:
        """Nothing: this machine is there."""
        return ()

    async def close(self) -> None:
        """End all, at once."""
        await asyncio.gather(*(process.terminate() for process in self._started))
        self._started.clear()
