"""Conformance suite for sandboxes: subclass `SandboxConformance` in a test file and give the fixture `make_sandbox`.

    class TestMine(SandboxConformance):
        @pytest.fixture
        def make_sandbox(self, tmp_path):
            return lambda: MySandbox(MyOptions(), ComponentContext(str(tmp_path), "test"))

Invariant: every check holds for any sandbox whose commands are run by a POSIX shell with the usual small programs; none
depends on timing beyond limits far apart. Not here: how strong an isolation is (`IsolationConformance` asks for that).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gyre_core.agents import ExecRequest, ExecResult, Sandbox, Workspace
from gyre_core.errors import GyreError

MakeSandbox = Callable[[], Sandbox]
_FILES = {"in.txt": b"3\n1\n2\n", "deep/er/f": b"x"}


async def shell(
    workspace: Workspace, command: str, *, timeout_s: float = 60.0, output_bytes: int = 65_536
) -> ExecResult:
    """Run a line of shell."""
    return await workspace.run(ExecRequest(["sh", "-c", command], timeout_s, output_bytes))


def with_workspace(make: MakeSandbox, check: Callable[[Sandbox, Workspace], Awaitable[None]]) -> None:
    """Run `check` on a fresh workspace in an event loop of its own."""

    async def body() -> None:
        sandbox = make()
        try:
            await check(sandbox, await sandbox.create("w", _FILES))
        finally:
            await sandbox.close()

    asyncio.run(body())


class SandboxConformance:
    """What every sandbox must do."""

    @pytest.fixture
    def make_sandbox(self) -> MakeSandbox:
        """A function that makes the sandbox; give it in the subclass."""
        raise NotImplementedError("give the fixture make_sandbox")

    def test_commands_see_and_leave_files(self, make_sandbox: MakeSandbox) -> None:
        """Files given at creation are there; files that commands write can be read and listed."""

        async def check(_: Sandbox, workspace: Workspace) -> None:
            result = await shell(workspace, "sort in.txt > out; cat deep/er/f; echo e >&2; exit 3")
            assert (result.exit_code, result.stdout, result.stderr, result.limit) == (3, b"x", b"e\n", None)
            assert await workspace.read("out") == b"1\n2\n3\n"
            assert await workspace.read("out", limit=2) == b"1\n"
            assert list(await workspace.list()) == ["deep/er/f", "in.txt", "out"]
            assert list(await workspace.list("deep")) == ["deep/er/f"]

        with_workspace(make_sandbox, check)

    def test_files_we_write_are_the_agents(self, make_sandbox: MakeSandbox) -> None:
        """Commands can change, and remove, what was written from outside."""

        async def check(_: Sandbox, workspace: Workspace) -> None:
            await workspace.write("new/f", b"long content")
            await workspace.write("new/f", b"a")
            result = await shell(workspace, "echo b >> new/f && touch new/g && rm in.txt && cat new/f")
            assert result.stdout == b"ab\n"

        with_workspace(make_sandbox, check)

    def test_arguments_are_not_a_shell_line(self, make_sandbox: MakeSandbox) -> None:
        """`argv` reaches the program as it is; environment, stdin and cwd too."""

        async def check(_: Sandbox, workspace: Workspace) -> None:
            assert (
                await workspace.run(ExecRequest(["echo", "$HOME; ls", "ü"], 60, 100))
            ).stdout == "$HOME; ls ü\n".encode()
            request = ExecRequest(["sh", "-c", "cat; echo $K; ls"], 60, 100, {"K": "v w"}, b"in\n", "deep")
            assert (await workspace.run(request)).stdout == b"in\nv w\ner\n"
            assert (await workspace.run(ExecRequest(["no-such-program"], 60, 1000))).exit_code in (126, 127)

        with_workspace(make_sandbox, check)

    def test_limits_of_time_and_output(self, make_sandbox: MakeSandbox) -> None:
        """A command over its time is killed and says so; output beyond the limit is dropped and counted."""

        async def check(_: Sandbox, workspace: Workspace) -> None:
            result = await shell(workspace, "echo early; sleep 600", timeout_s=5.0)
            assert (result.exit_code, result.limit, result.stdout) == (None, "wall", b"early\n")
            result = await shell(workspace, "head -c 100000 /dev/zero", output_bytes=1000)
            assert (result.exit_code, len(result.stdout), result.dropped_bytes) == (0, 1000, 99_000)

        with_workspace(make_sandbox, check)

    def test_nothing_outlives_a_command(self, make_sandbox: MakeSandbox) -> None:
        """Background processes end with the command that started them, and do not delay its answer."""

        async def check(_: Sandbox, workspace: Workspace) -> None:
            loop = "while :; do date +%N > beat; sleep 0.05; done"
            result = await shell(workspace, f"({loop}) & while ! test -s beat; do sleep 0.05; done; echo started")
            assert result.stdout == b"started\n"
            before = await workspace.read("beat")
            await asyncio.sleep(0.5)
            assert await workspace.read("beat") == before

        with_workspace(make_sandbox, check)

    def test_paths_that_lead_out_are_refused(self, make_sandbox: MakeSandbox) -> None:
        """For reading and writing, by `..`, absolute paths and links."""

        async def check(_: Sandbox, workspace: Workspace) -> None:
            await shell(workspace, "ln -s ../.. up; ln -s /etc/passwd pw; ln -s in.txt ok; ln -s deep d")
            for path in ("../x", "/etc/passwd", "deep/../../x", "up/x", "pw"):
                with pytest.raises(PermissionError):
                    await workspace.read(path)
                with pytest.raises(PermissionError):
                    await workspace.write(path, b"")
            assert await workspace.read("ok") == _FILES["in.txt"]
            assert list(await workspace.list()) == ["deep/er/f", "in.txt"]
            with pytest.raises(FileNotFoundError):
                await workspace.read("none")

        with_workspace(make_sandbox, check)

    def test_cancelling_a_command_ends_it(self, make_sandbox: MakeSandbox) -> None:
        """And the workspace can be used on."""

        async def check(_: Sandbox, workspace: Workspace) -> None:
            task = asyncio.ensure_future(shell(workspace, "touch started; sleep 600; touch late", timeout_s=600))
            while "started" not in await workspace.list():
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await shell(workspace, "ls started")).stdout == b"started\n"

        with_workspace(make_sandbox, check)

    def test_a_snapshot_restores(self, make_sandbox: MakeSandbox, tmp_path: Path) -> None:
        """Contents, modes and links; a missing snapshot is an error of ours."""

        async def check(sandbox: Sandbox, workspace: Workspace) -> None:
            await shell(workspace, "echo y > deep/y; chmod 755 deep/y; ln -s y deep/l; mkdir void")
            where = str(tmp_path / "snapshot")
            await workspace.snapshot(where)
            await workspace.close()
            again = await sandbox.restore("again", where)
            result = await shell(again, "cat deep/l; test -x deep/y && test -d void && echo ok > mine; cat mine")
            assert result.stdout == b"y\nok\n"
            with pytest.raises((GyreError, OSError)):
                await sandbox.restore("none", str(tmp_path / "missing"))

        with_workspace(make_sandbox, check)

    def test_workspaces_are_apart_and_close_twice(self, make_sandbox: MakeSandbox) -> None:
        """Two workspaces of one name share nothing."""

        async def check(sandbox: Sandbox, workspace: Workspace) -> None:
            other = await sandbox.create("w", {"theirs": b"1"})
            assert "theirs" not in await workspace.list()
            await asyncio.gather(*(shell(each, "echo mine > f") for each in (workspace, other)))
            assert await other.read("f") == b"mine\n"
            await other.close()
            await other.close()
            assert await workspace.read("f") == b"mine\n"

        with_workspace(make_sandbox, check)


class IsolationConformance:
    """What a sandbox that claims isolation must do besides."""

    @pytest.fixture
    def make_sandbox(self) -> MakeSandbox:
        """A function that makes the sandbox; give it in the subclass."""
        raise NotImplementedError("give the fixture make_sandbox")

    def test_other_workspaces_and_the_host_are_out_of_reach(self, make_sandbox: MakeSandbox, tmp_path: Path) -> None:
        """Neither read nor written, by their true paths."""
        secret = tmp_path / "secret"
        secret.write_text("the secret")

        async def check(sandbox: Sandbox, workspace: Workspace) -> None:
            other = await sandbox.create("o", {"theirs": b"1"})
            places = [str(secret), *([f"{other.path}/theirs"] if other.path else [])]
            for place in places:
                result = await shell(workspace, f"cat {place}; echo gotcha > {place}")
                assert result.stdout == b""
            assert secret.read_text() == "the secret"
            assert await other.read("theirs") == b"1"

        with_workspace(make_sandbox, check)

    def test_the_host_s_processes_are_safe(self, make_sandbox: MakeSandbox) -> None:
        """A command that kills all it can kills nobody outside."""

        async def check(sandbox: Sandbox, workspace: Workspace) -> None:
            other = await sandbox.create("o", {})
            running = asyncio.ensure_future(shell(other, "touch on; sleep 3; echo lived"))
            while "on" not in await other.list():
                await asyncio.sleep(0.02)
            await shell(workspace, "kill -9 -1; true")
            assert (await running).stdout == b"lived\n"
            assert (await shell(workspace, "echo on")).stdout == b"on\n"

        with_workspace(make_sandbox, check)

    def test_there_is_no_network(self, make_sandbox: MakeSandbox) -> None:
        """A server of this host cannot be reached."""

        async def check(_: Sandbox, workspace: Workspace) -> None:
            reached = asyncio.Event()

            def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                reached.set()
                writer.close()

            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            line = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
            result = await workspace.run(ExecRequest(["bash", "-c", line], 30, 1000))
            server.close()
            assert result.exit_code != 0
            assert not reached.is_set()

        with_workspace(make_sandbox, check)
