"""Cells on other machines: where each lives, how it is started there, and that nothing is left there. Real processes;
the command to another host does what ssh does with its words."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from gyre_core import ComponentContext, ConfigError, InfrastructureError, ProcessSpec
from gyre_rl.procs import sockets
from gyre_rl.procs.address import in_url, is_loopback, own_address
from gyre_rl.procs.launcher import LocalLauncher
from gyre_rl.procs.machines import HERE, MachinesLauncher, MachinesOptions, _judge
from gyre_rl.procs.tether import own_devices
from gyre_rl.procs.wire import serve

REACHABLE = ComponentContext("/run", "run", address="10.1.2.3")
PATIENCE_S = 60.0


@pytest.fixture
def ssh(tmp_path: Path) -> tuple[str, ...]:
    """Puts its words together with spaces, as ssh does, and gives them to a shell of an empty environment elsewhere."""
    script, elsewhere = tmp_path / "ssh", tmp_path / "elsewhere"
    elsewhere.mkdir()
    script.write_text(
        f'#!/bin/sh\nhost="$1"\nshift\ncd {elsewhere}\nexec env -i PATH="$PATH" HOST="$host" /bin/sh -c "$*"\n'
    )
    script.chmod(0o700)
    return (str(script), "{host}")


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


async def until(condition) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.02)


def test_cells_are_dealt_in_order_and_one_without_a_place_is_refused():
    options = MachinesOptions(hosts=("a", "b", HERE), cells_per_host=2)
    assert [options.host_of(cell) for cell in range(6)] == ["a", "a", "b", "b", HERE, HERE]
    with pytest.raises(ConfigError, match=r"placing cell 6.*3 hosts with 2 cells each.*Name more hosts"):
        options.host_of(6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hosts": ()}, "hosts: got"),
        ({"hosts": ("a", "")}, "hosts: got"),
        ({"hosts": ("a",), "cells_per_host": 0}, "cells_per_host: got 0"),
        ({"hosts": ("a",), "command": ("ssh", "a")}, "command: got .*{host}"),
    ],
)
def test_options_that_cannot_work_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        MachinesOptions(**given)


def test_an_address_that_only_this_machine_reaches_is_refused():
    options = MachinesOptions(hosts=("a",))
    for address in ("127.0.0.1", "localhost", "::1"):
        with pytest.raises(ConfigError, match=r"Set \[network\] address"):
            MachinesLauncher(options, ComponentContext("/run", "run", address=address))
    MachinesLauncher(MachinesOptions(hosts=(HERE,)), ComponentContext("/run", "run"))


async def test_a_cell_starts_on_its_host_with_its_variables_and_nothing_of_ours(ssh, tmp_path, monkeypatch):
    monkeypatch.setenv("OURS", "1")
    told = tmp_path / "it's told"
    program = "import json, os, sys; json.dump([dict(os.environ), os.getcwd(), sys.argv], open(sys.argv[1], 'w'))"
    options = MachinesOptions(hosts=("far away",), command=ssh, environment={"MORE": "a b'c"})
    launcher = MachinesLauncher(options, REACHABLE)
    spec = ProcessSpec(
        "cell-0",
        [sys.executable, "-c", program, str(told)],
        {"X": "$HOME"},
        str(tmp_path / "log"),
        accelerators=2,
        cell=0,
    )
    process = await launcher.start(spec)
    assert await process.wait() == 0, (tmp_path / "log").read_text()
    env, folder, words = json.loads(told.read_text())
    assert (env["HOST"], env["MORE"], env["X"], env["CUDA_VISIBLE_DEVICES"]) == ("far away", "a b'c", "$HOME", "0,1")
    assert "OURS" not in env
    assert (folder, words) == (str(Path.cwd()), ["-c", str(told)])
    await launcher.close()


def test_devices_that_a_scheduler_gave_are_the_ones_that_are_counted():
    assert own_devices("0,1", None) == own_devices("0,1", "") == "0,1"
    assert own_devices("2,3", "4,5,6,7") == "6,7"
    assert own_devices("0", "GPU-8f3a,GPU-91c0") == "GPU-8f3a"
    with pytest.raises(IndexError):
        own_devices("2,3", "4,5,6")


async def test_this_machines_own_devices_are_counted_too(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    launcher, log = LocalLauncher(None, ComponentContext("/run", "run")), tmp_path / "log"
    words = ["/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    process = await launcher.start(ProcessSpec("cell-0", words, {}, str(log), accelerators=2, cell=0))
    assert await process.wait() == 0
    assert log.read_text() == "4,5\n"
    with pytest.raises(ConfigError, match=r"'cell-1'.*CUDA_VISIBLE_DEVICES=4,5,6"):
        await launcher.start(ProcessSpec("cell-1", words, {}, str(log), accelerators=2, cell=1))
    await launcher.close()


async def test_what_a_host_gave_and_no_secret_in_the_arguments(ssh, tmp_path):
    """Variables come by standard input; devices are counted from those that the host's scheduler gave."""
    script = Path(ssh[0])
    script.write_text(script.read_text().replace("env -i", "env -i CUDA_VISIBLE_DEVICES=6,7"))
    options = MachinesOptions(hosts=("a",), command=ssh, environment={"HF_TOKEN": "very secret"})
    launcher, log = MachinesLauncher(options, REACHABLE), tmp_path / "log"
    tell = 'echo $CUDA_VISIBLE_DEVICES "$HF_TOKEN"'
    look = f'{tell}; cat /proc/[0-9]*/cmdline 2>/dev/null | tr -d "\\0" | grep -c "[v]ery secret"'
    process = await launcher.start(ProcessSpec("cell-0", ["/bin/sh", "-c", look], {}, str(log), accelerators=2, cell=0))
    await process.wait()
    assert log.read_text() == "6,7 very secret\n0\n"
    await launcher.close()


async def test_devices_are_counted_on_each_host_and_kept(ssh, tmp_path):
    options = MachinesOptions(hosts=("a", "b"), cells_per_host=2, command=ssh)
    launcher = MachinesLauncher(options, REACHABLE)
    told = []
    for cell in (0, 1, 2, 3, 1):
        log = tmp_path / f"{cell}"
        words = ["/bin/sh", "-c", "echo $HOST $CUDA_VISIBLE_DEVICES"]
        log.unlink(missing_ok=True)
        process = await launcher.start(ProcessSpec(f"cell-{cell}", words, {}, str(log), accelerators=4, cell=cell))
        assert await process.wait() == 0
        told.append(log.read_text().strip())
    assert told == ["a 0,1,2,3", "a 4,5,6,7", "b 0,1,2,3", "b 4,5,6,7", "a 4,5,6,7"]
    await launcher.close()


async def test_what_is_no_cell_stays_beside_the_run(ssh, tmp_path):
    launcher = MachinesLauncher(MachinesOptions(hosts=("a",), command=ssh), REACHABLE)
    process = await launcher.start(ProcessSpec("proxy", ["/bin/sh", "-c", "exit 7"], {}, str(tmp_path / "log")))
    assert process.pid is not None
    assert await process.wait() == 7
    await launcher.close()


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1] + ".asked", "w").close())
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
while True:
    time.sleep(600)
"""


async def stubborn(launcher, tmp_path: Path) -> tuple:
    mark = tmp_path / "pids"
    spec = ProcessSpec("cell-0", [sys.executable, "-c", STUBBORN, str(mark)], {}, str(tmp_path / "log"), cell=0)
    process = await launcher.start(spec)
    await until(lambda: mark.exists() and len(mark.read_text().split()) == 2)
    return process, [int(pid) for pid in mark.read_text().split()], mark


async def test_one_that_will_not_end_is_asked_then_killed_with_its_children(ssh, tmp_path, monkeypatch):
    monkeypatch.setattr("gyre_rl.procs.machines.KILL_S", 120.0)
    launcher = MachinesLauncher(MachinesOptions(hosts=("a",), command=ssh), REACHABLE)
    process, pids, mark = await stubborn(launcher, tmp_path)
    assert await process.terminate(grace_s=1.0) == 128 + signal.SIGKILL
    assert Path(f"{mark}.asked").exists()
    await until(lambda: all(gone(pid) for pid in pids))
    await launcher.close()


async def test_closing_ends_all(ssh, tmp_path):
    launcher = MachinesLauncher(MachinesOptions(hosts=("a",), command=ssh), REACHABLE)
    _, pids, _ = await stubborn(launcher, tmp_path)
    await launcher.close()
    await until(lambda: all(gone(pid) for pid in pids))


async def test_nothing_is_left_there_when_the_run_is_killed(ssh, tmp_path):
    """kill -9 of the process that holds it, as of a whole run."""
    mark = tmp_path / "pids"
    holder = (
        "import asyncio, sys\n"
        "from gyre_core import ComponentContext, ProcessSpec\n"
        "from gyre_rl.procs.machines import MachinesLauncher, MachinesOptions\n"
        "async def main():\n"
        f"    options = MachinesOptions(hosts=('a',), command={ssh!r})\n"
        "    launcher = MachinesLauncher(options, ComponentContext('/run', 'run', address='10.1.2.3'))\n"
        f"    spec = ProcessSpec('cell-0', [sys.executable, '-c', {STUBBORN!r}, {str(mark)!r}], cell=0)\n"
        "    await (await launcher.start(spec)).wait()\n"
        "asyncio.run(main())\n"
    )
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", holder)
    try:
        await until(lambda: mark.exists() and len(mark.read_text().split()) == 2)
        pids = [int(pid) for pid in mark.read_text().split()]
        assert not any(gone(pid) for pid in pids)
    finally:
        run.kill()
        await run.wait()
    await until(lambda: all(gone(pid) for pid in pids))


async def test_a_connection_that_hangs_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre_rl.procs.machines.KILL_S", 0.5)
    words = ("/bin/sh", "-c", "trap '' TERM; while :; do sleep 600; done", "{host}")
    launcher = MachinesLauncher(MachinesOptions(hosts=("a",), command=words), REACHABLE)
    process = await launcher.start(ProcessSpec("cell-0", [sys.executable, "-c", ""], cell=0))
    assert await process.terminate(grace_s=0.1) == -signal.SIGKILL


async def test_a_command_that_is_not_there_is_told(tmp_path):
    options = MachinesOptions(hosts=("a",), command=("no-such-command", "{host}"))
    launcher = MachinesLauncher(options, REACHABLE)
    with pytest.raises(InfrastructureError, match="'cell-0' on a with 'no-such-command'"):
        await launcher.start(ProcessSpec("cell-0", [sys.executable, "-c", ""], cell=0))


def told(**changes) -> dict:
    return {"version": version("gyre-rl"), "address": "127.0.0.1", "port": 1, "reaches": "", "sees": True} | changes


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (told(version="0.0.7"), "it has gyre-rl 0.0.7, and this machine"),
        (told(reaches="No route to host"), r"does not reach this machine \(No route to host\).*\[network\] address"),
        (told(sees=False), "put `dir` on a file system that all machines share"),
        (told(), r"it is not reached at 127\.0\.0\.1 \(.*111"),
    ],
)
async def test_what_a_machine_lacks_is_told(found, says):
    assert re.search(says, await _judge(found))


async def test_a_good_machine_and_a_way_to_it_that_is_broken(ssh, tmp_path):
    """The ways there and back, over this machine's own network; both directories are the same here."""
    run_dir = tmp_path / "runs" / "first"
    here = ComponentContext("/run", "run", address="127.0.0.1")
    launcher = MachinesLauncher(MachinesOptions(hosts=(HERE,)), here)
    launcher._options = MachinesOptions(hosts=("a", HERE, "b"), command=ssh)
    assert await launcher.probe(3, str(run_dir)) == []
    assert not run_dir.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "ssh"]
    assert "placing cell 3" in (await launcher.probe(4, str(run_dir)))[0]
    launcher._options = MachinesOptions(hosts=("a",), command=("sh", "-c", "echo no such host >&2; exit 255", "{host}"))
    assert await launcher.probe(1, str(run_dir)) == ["a: no Gyre there: no such host (status 255)"]
    launcher._options = MachinesOptions(hosts=("a",), command=("echo", "welcome to", "{host}"))
    assert "a: no Gyre there: welcome to a " in (await launcher.probe(1, str(run_dir)))[0]
    greets = (*ssh[:1], "a", "echo welcome;", "{host}")
    launcher._options = MachinesOptions(hosts=("true;",), command=greets)
    assert await launcher.probe(1, str(run_dir)) == []
    launcher._options = MachinesOptions(hosts=("a",), command=("no-such-command", "{host}"))
    assert "'no-such-command' cannot be started" in (await launcher.probe(1, str(run_dir)))[0]


def test_the_kernel_watches_connections_of_both_sides():
    with sockets.listening("127.0.0.1", 0) as server, socket.create_connection(_listen(server)) as client:
        accepted, _ = server.accept()
        sockets.watch(client)
        with accepted:
            for end in (client, accepted):
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == sockets.IDLE_S
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * sockets.SILENCE_S <= 60_000


def _listen(server: socket.socket) -> tuple[str, int]:
    server.listen()
    return server.getsockname()


async def test_a_process_finds_the_address_on_its_way_to_the_run():
    from aiohttp import web

    runner, port = await serve(web.Application(), "127.0.0.1", 0)
    assert own_address(f"http://127.0.0.1:{port}") == "127.0.0.1"
    await runner.cleanup()
    with pytest.raises(InfrastructureError, match=r"no\.such\.host\.invalid.*\[network\] address"):
        own_address("http://no.such.host.invalid:80")


def test_addresses_in_urls_and_of_this_machine_alone():
    assert (in_url("10.0.0.1"), in_url("fd00::1")) == ("10.0.0.1", "[fd00::1]")
    assert all(map(is_loopback, ("127.0.0.1", "127.3.4.5", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "fd00::1", "node-1")))
