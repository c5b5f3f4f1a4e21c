"""The sandbox `docker`: against a client that keeps the command line's contract with namespaces of this host, and
against a real one where a daemon answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from gyre_core import ComponentContext, ConfigError, ExecRequest, InfrastructureError
from gyre_core.testing.sandboxes import IsolationConformance, SandboxConformance
from gyre_harnesses.options import DockerOptions
from gyre_harnesses.sandbox.docker import DockerSandbox

# `run` starts the given command as process 1 of a namespace; `exec` enters it; `rm` kills it. Everything in its own
# process namespace, checked before each exec, for the adapter says `kill -9 -1`.
CLIENT = """
    #!{python}
    import os, pathlib, shutil, signal, subprocess, sys
    home, words = pathlib.Path({home!r}), sys.argv[1:]
    if (home / "daemon is down").exists():
        sys.exit("Cannot connect to the Docker daemon") if words[0] != "exec" else os._exit(125)

    def option(*names):
        for name in names:
            if name in words:
                return words[words.index(name) + 1]

    if words[0] == "run":
        name, image = option("--name"), words.index("image")
        assert option("--network") == "none" and "ALL" in words and "no-new-privileges" in words, words
        folder = home / name
        folder.mkdir()
        first = subprocess.Popen(["unshare", "-mpnf", "--kill-child", "--mount-proc", "sh", "-c",
            f"mount --bind {{folder}} {work} && cd {work} && exec \\"$@\\"", "sh", *words[image + 1:]],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        import time
        while True:
            children = pathlib.Path(f"/proc/{{first.pid}}/task/{{first.pid}}/children").read_text().split()
            if children and pathlib.Path(f"/proc/{{children[0]}}/cmdline").read_bytes().startswith(b"sh\\0-c\\0while"):
                break
            time.sleep(0.005)
        (home / f"{{name}}.pid").write_text(children[0] + " " + str(first.pid))
        print(name)
    elif words[0] == "exec":
        cwd, env, rest = option("-w"), dict(PATH=os.environ["PATH"]), words[1:]
        while rest[0].startswith("-"):
            flag = rest.pop(0)
            if flag in ("-w", "-e"):
                text = rest.pop(0)
                if flag == "-e":
                    env.update([text.split("=", 1)])
        pid = (home / f"{{rest[0]}}.pid").read_text().split()[0]
        assert os.readlink(f"/proc/{{pid}}/ns/pid") != os.readlink("/proc/self/ns/pid")
        inside = 'test "$(readlink /proc/self/ns/pid)" != "$1" && shift && cd "$1" && shift && exec "$@"'
        os.execvpe("nsenter", ["nsenter", "-t", pid, "-m", "-p", "-n", "sh", "-c", inside, "sh",
            os.readlink("/proc/self/ns/pid"), cwd, *rest[1:]], env)
    elif words[0] == "rm":
        file = home / f"{{words[-1]}}.pid"
        if file.exists():
            os.kill(int(file.read_text().split()[1]), signal.SIGKILL)
            file.unlink()
            shutil.rmtree(home / words[-1])
"""


@pytest.fixture
def client(tmp_path):
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter"))):
        pytest.skip("the stand-in for a container runtime needs root")
    home, work = tmp_path / "engine", tmp_path / "mnt"
    home.mkdir()
    work.mkdir()
    script = tmp_path / "docker"
    script.write_text(textwrap.dedent(CLIENT).lstrip().format(python=sys.executable, home=str(home), work=work))
    script.chmod(0o755)
    yield DockerOptions(client=str(script), image="image", workdir=str(work))
    assert list(home.glob("*.pid")) == [], "a container was left"


def make(options):
    return lambda: DockerSandbox(options, ComponentContext(".", "test"))


class TestDockerContract(SandboxConformance):
    @pytest.fixture
    def make_sandbox(self, client):
        return make(client)


def daemon():
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info", "--format", "{{.ServerVersion}}"], capture_output=True).returncode == 0


@pytest.mark.engine
class TestDocker(SandboxConformance, IsolationConformance):
    @pytest.fixture
    def make_sandbox(self):
        if not daemon():
            pytest.skip("no docker daemon answers")
        return make(DockerOptions())


async def test_a_daemon_that_is_down_is_our_fault(client, tmp_path):
    sandbox = DockerSandbox(client, ComponentContext(".", "test"))
    workspace = await sandbox.create("w", {})
    flag = tmp_path / "engine" / "daemon is down"
    flag.touch()
    with pytest.raises(InfrastructureError, match="Cannot connect"):
        await sandbox.create("x", {})
    with pytest.raises(InfrastructureError):
        await workspace.read("f")
    flag.unlink()
    await sandbox.close()


@pytest.mark.parametrize(
    ("line", "code"),
    [("exit 125", 125), ("echo 'Error response from daemon: no' >&2; exit 1", 1), ("echo 'Error: no' >&2; exit 1", 1)],
)
async def test_a_command_that_ends_as_the_client_does_is_not_our_fault(client, tmp_path, line, code):
    sandbox = DockerSandbox(client, ComponentContext(".", "test"))
    workspace = await sandbox.create("w", {})
    assert (await workspace.run(ExecRequest(["sh", "-c", line], 60.0, 1000))).exit_code == code
    flag = tmp_path / "engine" / "daemon is down"
    flag.touch()
    with pytest.raises(InfrastructureError):
        await workspace.run(ExecRequest(["sh", "-c", line], 60.0, 1000))
    flag.unlink()
    await sandbox.close()


async def test_a_container_that_cannot_be_filled_does_not_stay(client, tmp_path):
    sandbox = DockerSandbox(client, ComponentContext(".", "test"))
    with pytest.raises(InfrastructureError, match="filling"):
        await sandbox._start("w", b"no archive")
    assert list((tmp_path / "engine").glob("*.pid")) == []
    await sandbox.close()


async def test_a_client_that_is_not_there_is_our_fault():
    with pytest.raises(InfrastructureError, match="no-such-client"):
        await DockerSandbox(DockerOptions(client="no-such-client"), ComponentContext(".", "test")).create("w", {})


@pytest.mark.parametrize("options", [{"memory_mb": 0}, {"workdir": "work"}, {"workdir": "/w/"}], ids=str)
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        DockerOptions(**options)
