"""The sandbox `local` at work: what commands can do, where they are stopped, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from gyre_core import ComponentContext, ConfigError, ExecRequest, ExecResult, InfrastructureError
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox.local import LocalSandbox, LocalWorkspace


def context(path: Path) -> ComponentContext:
    return ComponentContext(str(path), "test")


async def sh(workspace: LocalWorkspace, command: str, timeout_s: float = 60.0, output: int = 10_000) -> ExecResult:
    return await workspace.run(ExecRequest(["bash", "-c", command], timeout_s, output))


@pytest.fixture(params=["auto", "landlock", "none"])
async def sandbox(request, tmp_path):
    made = LocalSandbox(LocalOptions(isolation=request.param), context(tmp_path))
    try:
        await made.isolation()
    except ConfigError as error:
        pytest.skip(str(error))
    yield made
    await made.close()


@pytest.fixture
async def workspace(sandbox):
    return await sandbox.create("w", {"a/b.txt": b"hello\n"})


async def test_a_command_sees_the_files_and_leaves_files(workspace):
    result = await sh(workspace, "cat a/b.txt; echo two > out/x || mkdir out; echo two > out/x; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.limit) == (7, b"hello\n", None)
    assert result.stderr.endswith(b"err\n")
    assert await workspace.read("out/x") == b"two\n"
    assert await workspace.list() == ["a/b.txt", "out/x"]
    assert await workspace.list("out") == ["out/x"]


async def test_what_we_write_belongs_to_the_agent(workspace):
    await workspace.write("new/dir/f", b"x")
    assert (await sh(workspace, "echo y >> new/dir/f && rm a/b.txt && touch new/g && cat new/dir/f")).stdout == b"xy\n"


async def test_stdin_env_and_cwd(workspace):
    request = ExecRequest(["sh", "-c", "cat; pwd; echo $K"], 60, 1000, env={"K": "v"}, stdin=b"in\n", cwd="a")
    result = await workspace.run(request)
    lines = result.stdout.decode().split("\n")
    assert lines[0] == "in"
    assert lines[1].endswith("/a")
    assert lines[2] == "v"


async def test_the_environment_is_clean(workspace, monkeypatch):
    monkeypatch.setenv("GYRE_SECRET_FOR_TEST", "1")
    out = (await sh(workspace, "env")).stdout
    assert b"GYRE_SECRET" not in out
    assert b"HOME=" in out


async def test_wall_limit_and_nothing_survives(workspace):
    await sh(workspace, "(setsid sleep 300 &) ; sleep 0.1")
    result = await sh(workspace, "setsid sleep 300 & trap '' TERM INT; while :; do sleep 1; done", 0.4)
    assert (result.exit_code, result.limit) == (None, "wall")
    assert b"sleep" not in (await sh(workspace, "grep -al 'sleep.300' /proc/[0-9]*/cmdline | wc -l")).stderr
    assert (await sh(workspace, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep [3]00'")).stdout == b"0\n"


async def test_output_is_cut_and_counted(workspace):
    result = await sh(workspace, "head -c 1000000 /dev/zero; echo late >&2", output=1000)
    assert result.exit_code == 0
    assert len(result.stdout) + len(result.stderr) == 1000
    assert result.dropped_bytes == 1_000_000 + 5 - 1000


async def test_a_flood_of_output_is_ended(workspace):
    result = await sh(workspace, "yes", 120, output=10)
    assert result.limit == "output"


async def test_a_program_that_is_not_there(workspace):
    result = await workspace.run(ExecRequest(["no-such-program"], 60, 100))
    assert result.exit_code == 127
    assert b"no-such-program" in result.stderr
    await workspace.write("plain", b"")
    assert (await workspace.run(ExecRequest(["./plain"], 60, 100))).exit_code == 126


async def test_a_signal_is_told_as_a_shell_tells_it(workspace):
    result = await sh(workspace, "kill -SEGV $$; sleep 5")
    assert result.exit_code == 139


async def test_cancelling_ends_the_command_and_the_workspace_goes_on(workspace):
    running = asyncio.ensure_future(sh(workspace, "touch started; sleep 600", 600))
    while "started" not in await workspace.list():
        await asyncio.sleep(0.01)
    running.cancel()
    async with asyncio.timeout(120):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (await sh(workspace, "echo on")).stdout == b"on\n"


async def test_two_commands_at_once_take_turns(workspace):
    results = await asyncio.gather(*(sh(workspace, f"sleep 0.05; echo {n}") for n in range(4)))
    assert [r.stdout for r in results] == [b"0\n", b"1\n", b"2\n", b"3\n"]


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "out/secret", "abs", "a/\0b"])
async def test_paths_that_lead_out_are_refused(workspace, path, tmp_path):
    (tmp_path / "secret").write_text("s")
    await sh(workspace, "ln -s ../.. out; ln -s /etc/passwd abs")
    with pytest.raises(PermissionError):
        await workspace.read(path)
    with pytest.raises(PermissionError):
        await workspace.write(path, b"gotcha")
    assert (tmp_path / "secret").read_text() == "s"


async def test_links_inside_are_followed_and_loops_are_not(workspace):
    await sh(workspace, "ln -s ../a/b.txt a/link; ln -s loop loop; mkfifo pipe")
    assert await workspace.read("a/link") == b"hello\n"
    for path in ("loop", "pipe", "a"):
        with pytest.raises(OSError):
            await workspace.read(path)
    with pytest.raises(FileNotFoundError):
        await workspace.read("none")
    assert await workspace.list() == ["a/b.txt"]


async def test_snapshot_and_restore(workspace, sandbox, tmp_path):
    await sh(workspace, "ln -s /etc l; ln -s a/b.txt m; chmod 755 a; echo '#!/bin/sh' > run; chmod +x run; mkdir empty")
    saved = tmp_path / "s.tar"
    await workspace.snapshot(str(saved))
    await workspace.close()
    again = await sandbox.restore("again", str(saved))
    out = (
        await sh(again, "readlink l m; test -x run && test -d empty && echo ok; echo more >> a/b.txt; cat a/b.txt")
    ).stdout
    assert out == b"/etc\na/b.txt\nok\nhello\nmore\n"
    saved.write_bytes(saved.read_bytes()[:700])
    with pytest.raises(InfrastructureError, match="restoring"):
        await sandbox.restore("cut", str(saved))
    with pytest.raises(InfrastructureError, match="saving"):
        await again.snapshot(str(tmp_path / "no" / "such" / "folder"))


async def test_closing_removes_the_folder_whatever_its_modes(workspace, sandbox):
    await sh(workspace, "mkdir -p locked/in; touch locked/in/f; chmod 000 locked/in locked")
    folder = Path(workspace.path).parent
    assert folder.exists()
    await workspace.close()
    await workspace.close()
    assert not folder.exists()
    assert workspace not in sandbox._workspaces


async def test_a_lost_keeper_is_our_fault(workspace):
    workspace._channel._sock.shutdown(2)
    with pytest.raises(InfrastructureError):
        await sh(workspace, "true")


async def test_a_fork_bomb_is_contained(tmp_path):
    sandbox = LocalSandbox(LocalOptions(processes=40), context(tmp_path))
    workspace = await sandbox.create("w", {})
    result = await sh(workspace, "b() { b | b & }; b; sleep 1; echo done", 5)
    assert result.limit in (None, "wall")
    assert (await sh(workspace, "set -- /proc/[0-9]*; echo $#")).stdout == b"2\n"
    await sandbox.close()


async def test_too_much_disk_memory_and_cpu(tmp_path):
    options = LocalOptions(disk_mb=8, file_mb=4, memory_mb=256, cpu_s=1)
    sandbox = LocalSandbox(options, context(tmp_path))
    workspace = await sandbox.create("w", {})
    assert (await sh(workspace, "head -c 6000000 /dev/zero > big; stat -c %s big")).stdout == b"4194304\n"
    filling = "for i in $(seq 1000); do head -c 1000000 /dev/zero > f$i; sleep 0.02; done"
    assert (await sh(workspace, filling, 120)).limit == "disk"
    await sh(workspace, "rm -f f* big")
    assert (await sh(workspace, "x=$(head -c 400000000 /dev/zero | tr '\\0' a); echo ${#x}")).exit_code != 0
    assert (await workspace.run(ExecRequest(["sh", "-c", "while :; do :; done"], 120, 100))).limit == "cpu"
    await sandbox.close()


async def test_namespaces_hide_the_host(tmp_path):
    sandbox = LocalSandbox(LocalOptions(), context(tmp_path))
    if (await sandbox.isolation()).level != "namespaces":
        pytest.skip("this kernel grants no user namespaces here")
    workspace = await sandbox.create("w", {})
    other = await sandbox.create("other", {"secret": b"1"})
    assert (await sh(workspace, "set -- /proc/[0-9]*; echo $#")).stdout == b"2\n"
    assert (await sh(workspace, f"cat {other.path}/secret")).exit_code == 1
    assert (await sh(workspace, f"ls {tmp_path}")).exit_code == 2
    assert (await sh(workspace, f"kill -0 {os.getpid()}")).exit_code == 1
    assert (await sh(workspace, "kill -9 1; kill -9 -1; true")).limit is None
    assert (await sh(workspace, "echo x > /etc/x; echo x > /usr/x; touch /x; true; ls /x /etc/x /usr/x")).exit_code == 2
    assert (await sh(workspace, "unshare -Ur id")).exit_code != 0
    assert (await sh(workspace, "grep CapEff /proc/self/status")).stdout.split()[1].strip(b"0") == b""
    assert b"lo" in (await sh(workspace, "cat /proc/net/dev")).stdout
    assert (await sh(workspace, "tail -n +3 /proc/net/dev | wc -l")).stdout == b"1\n"
    await sandbox.close()


async def test_an_isolation_asked_for_is_granted_or_refused(tmp_path, monkeypatch):
    sandbox = LocalSandbox(LocalOptions(isolation="namespaces"), context(tmp_path))

    async def refused(name, setup):
        class Gone:
            def close(self):
                return None

        return Gone(), {"error": "unshare: Operation not permitted"}

    monkeypatch.setattr(sandbox._spawner, "keeper", refused)
    with pytest.raises(ConfigError, match="Operation not permitted"):
        await sandbox.create("w", {})


async def test_files_that_lead_out_are_a_fault_of_the_task(tmp_path):
    sandbox = LocalSandbox(None, context(tmp_path))
    with pytest.raises(ConfigError, match="filling"):
        await sandbox.create("w", {"../x": b""})
    await sandbox.close()


@pytest.mark.parametrize(
    "options", [{"isolation": "jail"}, {"network": "all"}, {"processes": 0}, {"disk_mb": -1}], ids=str
)
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        LocalOptions(**options)
