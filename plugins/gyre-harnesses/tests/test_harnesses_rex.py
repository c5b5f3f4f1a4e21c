"""The sandbox `swe-rex`: against a server that keeps the interface's contract, and a real one where there is one."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import gyre_harnesses
import pytest
from gyre_core import ComponentContext, ConfigError, ExecRequest, InfrastructureError
from gyre_core.testing.sandboxes import SandboxConformance
from gyre_core.testing.support import environment_python
from gyre_harnesses.options import SweRexOptions
from gyre_harnesses.sandbox.rex import PORT_TRIES, SweRexSandbox

ENVIRONMENT = Path(gyre_harnesses.__file__).with_name("environment.toml")

# As swe-rex 1.x serves: one request at a time, blocking; errors as status 511; texts, not bytes.
SERVER = """
import http.server, json, pathlib, subprocess, sys
token, port = sys.argv[1], int(sys.argv[2])

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.work({})
    def do_POST(self):
        self.work(json.loads(self.rfile.read(int(self.headers["content-length"]))))
    def work(self, body):
        if self.headers.get("X-API-Key") != token:
            return self.answer(401, {"detail": "Invalid API Key"})
        try:
            routes = {"/is_alive": self.alive, "/execute": self.execute, "/write_file": self.write}
            self.answer(200, routes[self.path](**body))
        except Exception as error:
            self.answer(511, {"swerexception": {"message": str(error), "class_path": type(error).__name__}})
    def alive(self):
        return {"is_alive": True, "message": ""}
    def execute(self, command, env=None, timeout=None, cwd=None):
        done = subprocess.run(command, env=env, timeout=timeout, cwd=cwd, capture_output=True)
        texts = (each.decode(errors="backslashreplace") for each in (done.stdout, done.stderr))
        return {**dict(zip(("stdout", "stderr"), texts)), "exit_code": done.returncode}
    def write(self, path, content):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).write_text(content)
        return {}

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def standing_in(tmp_path):
    program = tmp_path / "server.py"
    program.write_text(textwrap.dedent(SERVER))
    return (sys.executable, str(program), "{token}", "{port}")


def sandbox(tmp_path: Path, start: tuple[str, ...], **more) -> SweRexSandbox:
    options = SweRexOptions(start=start, workdir=str(tmp_path / "far"), **more)
    return SweRexSandbox(options, ComponentContext(str(tmp_path), "test"))


class TestRexConformance(SandboxConformance):
    @pytest.fixture
    def make_sandbox(self, tmp_path, standing_in):
        return lambda: sandbox(tmp_path, standing_in)


@pytest.mark.engine
class TestRealRexConformance(SandboxConformance):
    @pytest.fixture
    def make_sandbox(self, tmp_path):
        program = Path(environment_python(ENVIRONMENT)).with_name("swerex-remote")
        return lambda: sandbox(tmp_path, (str(program), "--auth-token", "{token}", "--port", "{port}"))


async def test_a_daemon_that_left_its_session_ends_with_its_command(tmp_path, standing_in):
    made = sandbox(tmp_path, standing_in)
    try:
        workspace = await made.create("w", {})
        line = (
            "setsid sh -c 'while :; do date +%N > beat; sleep 0.05; done' & while ! test -s beat; do sleep 0.05; done"
        )
        assert (await workspace.run(ExecRequest(["sh", "-c", line], 60, 100))).exit_code == 0
        before = await workspace.read("beat")
        assert (await workspace.run(ExecRequest(["sleep", "0.3"], 60, 100))).exit_code == 0
        assert await workspace.read("beat") == before
    finally:
        await made.close()


async def test_bytes_go_there_and_back(tmp_path, standing_in):
    made = sandbox(tmp_path, standing_in)
    data = bytes(range(256)) * 9
    try:
        workspace = await made.create("w", {"in": data})
        assert await workspace.read("in") == data
        result = await workspace.run(ExecRequest(["sh", "-c", "cat; cat in >&2"], 60, 10_000, stdin=data))
        assert (result.stdout, result.stderr) == (data, data)
        await made.close()
        assert not any((tmp_path / "far").iterdir())
    finally:
        await made.close()


async def test_servers_that_run_already_are_used_and_left_running(tmp_path, standing_in):
    first = sandbox(tmp_path, standing_in)
    try:
        home = await first.create("home", {})
        second = sandbox(tmp_path, (), urls=(home.server.url,), token=home.server.token)
        guest = await second.create("guest", {"a": b"1"})
        assert await guest.read("a") == b"1"
        await second.close()
        await home.write("still", b"there")
        wrong = sandbox(tmp_path, (), urls=(home.server.url,), token="wrong", start_s=3.0)
        with pytest.raises(InfrastructureError, match="401"):
            await wrong.create("w", {})
        await wrong.close()
    finally:
        await first.close()


@pytest.mark.parametrize("failures", [PORT_TRIES - 1, PORT_TRIES])
async def test_a_port_that_was_taken_meanwhile_is_not_the_end(tmp_path, standing_in, failures):
    """A server that ends at once, as one does whose port another process has; each start has a port of its own."""
    ports = tmp_path / "ports"
    unlucky = f'echo $0 >> {ports}; test $(wc -l < {ports}) -gt {failures} || exit 1; exec "$@"'
    made = sandbox(tmp_path, ("sh", "-c", unlucky, "{port}", *standing_in))
    try:
        if failures < PORT_TRIES:
            workspace = await made.create("w", {"a": b"1"})
            assert await workspace.read("a") == b"1"
        else:
            with pytest.raises(InfrastructureError, match="swe-rex server"):
                await made.create("w", {})
    finally:
        await made.close()
    assert len(set(ports.read_text().split())) == PORT_TRIES


async def test_a_server_that_is_gone_is_our_fault(tmp_path, standing_in):
    made = sandbox(tmp_path, standing_in)
    try:
        workspace = await made.create("w", {})
        workspace.process.kill()
        await workspace.process.wait()
        with pytest.raises(InfrastructureError, match="swe-rex server"):
            await workspace.run(ExecRequest(["true"], 5, 100))
        with pytest.raises(InfrastructureError, match="starting a swe-rex server"):
            await sandbox(tmp_path, ("no-such-program",)).create("w", {})
    finally:
        await made.close()
    with pytest.raises(ConfigError, match="neither urls nor start"):
        SweRexOptions(start=())
