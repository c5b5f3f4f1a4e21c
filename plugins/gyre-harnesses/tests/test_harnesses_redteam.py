"""Agents that try to break out, to outlive their execution or to harm the host: none does, and the sandbox goes on."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from gyre_core import ComponentContext, ExecRequest, InfrastructureError
from gyre_core.testing.support import load_module
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox.local import LocalSandbox

PROGRAMS = load_module(Path(__file__).with_name("attacks.py"))
ATTACKS, LIMITS = PROGRAMS.ATTACKS, PROGRAMS.LIMITS
CROWDS = ("memory in many processes", "memory in one process", "fork bomb", "zombie farm", "threads")
"""Attacks that a control group stops where there is one."""


def processes_of(folder: str) -> list[int]:
    """Processes of this host whose working folder or arguments are of the workspace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                cwd, line = os.readlink(f"/proc/{name}/cwd"), Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if cwd.startswith(folder) or b"sleep\x00300" in line:
                found.append(int(name))
    return found


@pytest.fixture
async def host(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("the secret\n")
    abstract = f"gyre-test-{os.getpid()}"
    heard: list[bytes] = []

    async def listen(reader, writer):
        heard.append(await reader.read(100))
        writer.close()

    class Datagrams(asyncio.DatagramProtocol):
        def datagram_received(self, data, addr):
            heard.append(data)

    server = await asyncio.start_server(listen, "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Datagrams, ("0.0.0.0", port))
    unix = await asyncio.start_unix_server(listen, f"\0{abstract}")
    address = socket.gethostbyname(socket.gethostname())
    words = {
        "secret": outside / "secret",
        "outside": outside,
        "port": port,
        "abstract": abstract,
        "pid": os.getpid(),
        "address": address,
    }
    yield words, heard
    transport.close()
    server.close()
    unix.close()


@pytest.fixture
async def workspace(request, tmp_path):
    options = LocalOptions(**LIMITS, cgroup=getattr(request, "param", "auto"))
    sandbox = LocalSandbox(options, ComponentContext(str(tmp_path / "run"), "test"))
    if (await sandbox.isolation()).level != "namespaces":
        await sandbox.close()
        pytest.skip("this kernel grants no user namespaces here")
    yield await sandbox.create("w", {"kept": b"1"})
    await sandbox.close()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
async def test_attacks_fail(workspace, host, attack):
    await attack_fails(workspace, host, attack)


@pytest.mark.parametrize("workspace", ["none"], indirect=True)
@pytest.mark.parametrize("name", CROWDS)
async def test_crowds_fail_without_control_groups_too(workspace, host, name):
    await attack_fails(workspace, host, ATTACKS[name])


async def attack_fails(workspace, host, attack):
    """The sandbox goes on, the host is as it was, and nothing of the attack is left."""
    words, heard = host
    command = attack.format(**words)
    result = await workspace.run(ExecRequest(["bash", "-c", command], 1.5, 20_000))
    after = await workspace.run(ExecRequest(["sh", "-c", "echo on; ls /proc | grep -c '^[0-9]*$'"], 60.0, 1000))
    assert after.stdout.startswith(b"on\n"), (after, result)
    assert int(after.stdout.split()[1]) <= 4, "something of the attack is still running"
    assert b"the secret" not in result.stdout + result.stderr
    assert (words["outside"] / "secret").read_text() == "the secret\n"
    assert sorted(p.name for p in words["outside"].iterdir()) == ["secret"]
    assert heard == []
    assert Path("/etc/passwd").read_text().count("\nx\n") == 0
    folder = Path(workspace.path).parent
    await workspace.close()
    assert not folder.exists()
    assert processes_of(str(folder)) == []


async def test_a_daemon_does_not_write_after_its_command(workspace):
    await workspace.run(
        ExecRequest(["bash", "-c", "(setsid sh -c 'sleep 0.5; echo late > late' &) & sleep 0.1"], 5, 1000)
    )
    await asyncio.sleep(1.0)
    assert await workspace.list() == ["kept"]


async def test_the_folder_stays_small_whatever_is_written(workspace):
    for name in ("one huge file", "many files", "fill tmp and home"):
        await workspace.run(ExecRequest(["bash", "-c", ATTACKS[name].format(secret="/x", outside="/x")], 8.0, 1000))
    folder = Path(workspace.path).parent
    used = sum(p.lstat().st_blocks * 512 for p in folder.rglob("*"))
    assert used < 3 * LIMITS["disk_mb"] << 20


async def test_holes_of_sparse_files_do_not_fill_the_hosts_disk_through_a_snapshot(workspace, tmp_path):
    """In the workspace they take no room; read back they would be gigabytes, at every rest."""
    made = await workspace.run(
        ExecRequest(["bash", "-c", "for i in $(seq 40); do truncate -s 15M f$i; done; du -s ."], 60.0, 1000)
    )
    assert int(made.stdout.split()[0]) < 1000
    with pytest.raises(InfrastructureError, match="holes of sparse files"):
        await workspace.snapshot(str(tmp_path / "rest"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("rest")] == []
    await workspace.run(ExecRequest(["bash", "-c", "rm f*; head -c 1M /dev/zero > f"], 60.0, 1000))
    await workspace.snapshot(str(tmp_path / "rest"))
    assert (tmp_path / "rest").stat().st_size < 3 << 20


async def test_empty_files_do_not_use_up_the_hosts_inodes(workspace):
    flood = "import itertools\nfor i in itertools.count(): open(f'e{i}', 'w').close()"
    made = await workspace.run(ExecRequest(["python3", "-c", flood], 60.0, 1000))
    assert made.limit == "disk"
