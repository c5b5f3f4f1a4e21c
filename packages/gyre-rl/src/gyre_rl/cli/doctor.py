"""`gyre doctor`: does this machine have what runs need, and what to do where it has not.

Invariant: looks and changes nothing; each finding says what was looked at, what is there and what to do. Heavy
libraries are looked at in a process of their own, so that a broken one cannot take the command with it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gyre_core.environments import find, read_spec
from gyre_core.errors import GyreError
from gyre_core.plugins import PluginManager
from gyre_core.registration import ComponentContext, Kind

from gyre_rl.cli.console import FAILED, Console

OK, WARN, BAD = "ok", "warn", "bad"
GIB = 1 << 30
LOW_FILES, LOW_DISK, LOW_MEMORY = 4096, 5 * GIB, 4 * GIB
_TORCH = "import torch; print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 0)"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `level` is "ok", "warn" (some runs will suffer) or "bad" (runs will fail)."""

    what: str
    level: str
    found: str
    fix: str = ""


def examine(console: Console) -> None:
    """Print every finding; exit status 1 when one is bad."""
    findings = [finding for look in LOOKS for finding in look()]
    ok = all(f.level != BAD for f in findings)
    lines = [
        f"{f.level:>4}  {f.what}: {f.found}" + (f"\n      {f.fix}" if f.fix and f.level != OK else "") for f in findings
    ]
    console.result({"ok": ok, "findings": [asdict(f) for f in findings]}, "\n".join(lines))
    if not ok:
        sys.exit(FAILED)


def interpreter() -> Iterator[Finding]:
    """Python, the system and SQLite."""
    yield Finding("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    level = OK if sqlite3.sqlite_version_info >= (3, 35) else BAD
    yield Finding("sqlite", level, sqlite3.sqlite_version, "The trajectory store needs 3.35 or newer.")


def machine() -> Iterator[Finding]:
    """Cores, memory, disk, shared memory, open files."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", OK if cores >= 2 else WARN, str(cores), "Cells, proxy and agents will share one core.")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    advice = "The quickstart takes about 3 GiB; larger models take more."
    yield Finding("memory", OK if pages >= LOW_MEMORY else WARN, f"{pages / GIB:.1f} GiB", advice)
    free = shutil.disk_usage(Path.cwd()).free
    advice = "Checkpoints and trajectories of a long run need room; set `dir` to a larger disk."
    yield Finding("disk here", OK if free >= LOW_DISK else WARN, f"{free / GIB:.1f} GiB free", advice)
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        advice = "Gradients and KV between cells go through shared memory where there is room; else through files."
        yield Finding("shared memory", OK if free >= GIB // 4 else WARN, f"{free / GIB:.1f} GiB free", advice)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = soft == resource.RLIM_INFINITY or soft >= LOW_FILES
    fix = "Raise it with `ulimit -n 65536` before runs with hundreds of agents."
    yield Finding("open files", OK if many else WARN, "no limit" if soft == resource.RLIM_INFINITY else str(soft), fix)


def network() -> Iterator[Finding]:
    """The loopback interface, which agents reach the proxy through."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            yield Finding("loopback", OK, "connects")
    except OSError as error:
        yield Finding("loopback", BAD, str(error), "Agents reach the proxy at 127.0.0.1: allow connections to it.")


def accelerators() -> Iterator[Finding]:
    """torch and what it sees, without importing it here."""
    if importlib.util.find_spec("torch") is None:
        yield Finding(
            "torch", WARN, "not installed", "The embedded engine and trainer need it: pip install gyre-local."
        )
        return
    try:
        done = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("torch", BAD, "did not import in 120 s", "Import it by hand and see what it waits for.")
        return
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        yield Finding("torch", BAD, f"does not import: {last[0]}", "Install a build that fits this machine.")
        return
    version, count = done.stdout.split()
    yield Finding("torch", OK, f"{version}, {count} CUDA devices" if count != "0" else f"{version}, CPU")


def transports() -> Iterator[Finding]:
    """How KV can travel between cells; the first usable one of this order is taken unless the move names another."""
    from gyre_kvxfer.doctor import examine as examine_transports  # numpy: not for `gyre --help`

    for found in examine_transports():
        advice = "KV takes the next way that works; without any, sessions prefill again at their new cell."
        yield Finding(f"kv by {found.name}", OK if found.usable else WARN, found.reason, advice)


def environments() -> Iterator[Finding]:
    """The environments of their own that plugins have."""
    components = PluginManager.installed().components()
    for module in sorted({c.registration.target.partition(":")[0].partition(".")[0] for c in components}):
        origin = importlib.util.find_spec(module)
        spec_file = Path(origin.origin).with_name("environment.toml") if origin and origin.origin else None
        if spec_file is None or not spec_file.is_file():
            continue
        spec = read_spec(spec_file)
        python = find(spec.name, spec=spec)
        absent = f"not built; a run that uses it needs `python tools/engine_env.py {spec.name}`, or its option `python`"
        yield Finding(f"environment {spec.name}", OK, str(python or absent))


def sandboxes() -> Iterator[Finding]:
    """What workspaces get on this machine, of every sandbox that can tell (`examine`)."""
    manager = PluginManager.installed()
    for component in manager.components(Kind.SANDBOX):
        name = component.registration.name
        if not component.missing:
            with tempfile.TemporaryDirectory(prefix="gyre-doctor-") as folder:
                try:
                    sandbox = manager.create(Kind.SANDBOX, name, {}, ComponentContext(folder, "doctor"))
                except (GyreError, TypeError, ValueError, OSError) as error:
                    yield Finding(
                        f"sandbox {name}", WARN, f"not looked at: {error}", "It needs options of a run's file."
                    )
                    continue
                yield from asyncio.run(told_of(name, sandbox))


async def told_of(name: str, sandbox: Any) -> list[Finding]:
    """What one sandbox says of itself, and close it."""
    try:
        examine = getattr(sandbox, "examine", None)
        told = [] if examine is None else await examine()
    except GyreError as error:
        return [Finding(f"sandbox {name}", BAD, str(error))]
    finally:
        await sandbox.close()
    return [Finding(f"sandbox {name}: {what}", WARN if lack else OK, found, lack) for what, found, lack in told]


def plugins() -> Iterator[Finding]:
    """What entry points bring, and what is broken."""
    manager = PluginManager.installed()
    usable = [c for c in manager.components() if not c.missing]
    yield Finding("plugins", OK if usable else BAD, f"{len(usable)} usable components", "pip install gyre-local")
    for component in manager.components():
        if component.missing:
            what = f"{component.registration.kind} {component.registration.name}"
            fix = f"See the README of {component.distribution}."
            yield Finding(what, WARN, f"needs {', '.join(component.missing)}", fix)
    for broken in manager.broken:
        fix = f"Reinstall or remove {broken.distribution}."
        yield Finding(f"plugin {broken.name}", WARN, broken.reason, fix)


LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    interpreter,
    machine,
    network,
    accelerators,
    transports,
    plugins,
    sandboxes,
    environments,
)
