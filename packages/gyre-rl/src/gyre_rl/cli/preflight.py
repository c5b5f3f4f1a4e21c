"""Whether this machine can carry out a run: the model is there and can chat, the tasks can be read, the port is free,
the disk takes data.

Invariant: looks and changes nothing but a folder that it makes and a file that it writes and removes in the run's
place; says everything that is wrong at once. What the configuration itself must satisfy is `gyre_rl.config`.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gyre_core import ComponentContext, GyreError, Kind, PluginManager

from gyre_rl.cli.taskcheck import task_problems
from gyre_rl.config import Problem, RunConfig, RunConfigError
from gyre_rl.procs.sockets import listening

ROOM_BYTES = 1 << 20
"""Written and removed again as a proof that the disk takes data."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def preflight(config: RunConfig, run_dir: Path) -> None:
    """Raise RunConfigError with everything that keeps this machine from running `config` in `run_dir`."""
    problems = [*model_problems(config), *task_problems(config, run_dir)]
    problems += [*port_problems(config), *disk_problems(run_dir)]
    problems += list(network_problems(config)) or list(launcher_problems(config, run_dir))
    if problems:
        raise RunConfigError(f"of {config.name!r} on this machine", problems)


def model_problems(config: RunConfig) -> Iterator[Problem]:
    """The model's folder and its tokenizer's."""
    folder = config.model_dir
    if not folder.is_dir():
        yield Problem("model.path", f"got {folder}, which is no folder; expected a model in Hugging Face form")
        return
    if not (folder / "config.json").is_file():
        yield Problem("model.path", f"got {folder} without config.json, expected a model in Hugging Face form")
    if not any(folder.glob("*.safetensors")):
        yield Problem("model.path", f"got {folder} without *.safetensors, expected the model's weights in that form")
    tokenizer = config.tokenizer_dir
    if not any((tokenizer / name).is_file() for name in TOKENIZERS):
        key = "model.tokenizer" if config.model.tokenizer else "model.path"
        yield Problem(key, f"got {tokenizer} without a tokenizer, expected one of {', '.join(TOKENIZERS)}")
        return
    yield from chat_problems(config)


def chat_problems(config: RunConfig) -> Iterator[Problem]:
    """What the proxy would find when it starts: whether there is such a family and it can speak through this tokenizer.
    Where the tokenizer is not at hand, only the family's name is looked at."""
    from gyre_tito.families import check_family, load_format  # tokenizers and templates: not for `gyre --help`
    from gyre_tito.messages import Message

    family = config.model.family
    try:
        if family is not None:
            check_family(family)
        if config.tokenizer_dir.is_dir():
            load_format(config.tokenizer_dir, family=family).render((Message("user", "Hello"),), ())
    except Exception as error:  # noqa: BLE001 - boundary: whatever foreign tokenizers and templates raise is told
        yield Problem("model.family" if family else "model.path", f"the model cannot chat: {error}")


def port_problems(config: RunConfig) -> Iterator[Problem]:
    """The proxy's address."""
    proxy = config.proxy
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(proxy.host, proxy.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        yield Problem("proxy.host", f"got {proxy.host!r} ({error.strerror}), expected an address of this machine")
        return
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                yield Problem("proxy.host", f"got {proxy.host!r}, expected an address of this machine")
                return
            yield Problem(
                "proxy.port",
                f"got {proxy.host}:{proxy.port} ({error.strerror}), expected a port that is free; "
                "stop the program that has it, or take a free one with --set proxy.port=0",
            )


def network_problems(config: RunConfig) -> Iterator[Problem]:
    """The run's own address."""
    got, expected = repr(config.network.address), "expected one address of this machine"
    try:
        with listening(config.network.address, 0) as sock:
            if ipaddress.ip_address(sock.getsockname()[0]).is_unspecified:
                yield Problem("network.address", f"got {got}, which stands for all addresses; {expected}")
    except OSError as error:
        yield Problem("network.address", f"got {got} ({error.strerror or error}), {expected}")


def launcher_problems(config: RunConfig, run_dir: Path) -> Iterator[Problem]:
    """What the launcher finds on the machines that it would use."""
    chosen, address = config.launcher, config.network.address
    context = ComponentContext(str(run_dir), "check", config.seed, base_dir=config.base_dir, address=address)
    try:
        launcher = PluginManager.installed().create(Kind.LAUNCHER, chosen.name, chosen.options, context)
    except GyreError as error:
        yield Problem("launcher", str(error))
        return
    probe = getattr(launcher, "probe", None)
    if probe is not None:
        for problem in asyncio.run(probe(config.cells.count, str(run_dir))):
            yield Problem("launcher", problem)


def disk_problems(run_dir: Path) -> Iterator[Problem]:
    """The run directory, or the nearest folder above it that exists."""
    folder = run_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(os.urandom(ROOM_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        yield Problem(
            "dir",
            f"got {error.strerror} in {folder}, expected a folder that takes data; free some space or choose "
            "another place with --set dir=...",
        )
