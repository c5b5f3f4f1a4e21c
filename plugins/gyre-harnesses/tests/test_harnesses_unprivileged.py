"""The sandbox as a user without privileges, at each isolation: what the other tests see as root holds there too."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import gyre_core
import gyre_harnesses
import pluggy
import pytest

PYTHON = "/usr/bin/python3"
USER = str(20_000 + os.getpid() % 40_000)
"""Nobody else's: other runs of these tests may be under way here."""
BECOME = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"]
PROGRAM = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from gyre_core import ComponentContext, ConfigError, ExecRequest
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox.local import LocalSandbox

async def check(level, run):
    sandbox = LocalSandbox(LocalOptions(isolation=level, processes=40), ComponentContext(run, "test"))
    try:
        got = await sandbox.isolation()
    except ConfigError as error:
        print(level, "is not to be had here:", error)
        return
    workspace = await sandbox.create("w", {"x": b"1"})
    async def sh(line, seconds=60.0):
        return await workspace.run(ExecRequest(["bash", "-c", line], seconds, 1000))
    result = await sh("cat x; echo 2 > y; mkdir z; echo 3 > z/f; chmod 0 z; (setsid sleep 300 &) ; exit 3")
    assert (result.exit_code, result.stdout) == (3, b"1"), result
    assert await workspace.read("y") == b"2\\n"
    if level != "none":
        assert (await sh(f"kill -0 {os.getpid()}")).exit_code != 0
        assert (await sh(f"echo gotcha > {run}/outside")).exit_code != 0
    result = await sh("b() { b | b & }; b; sleep 0.3")
    assert (await sh("echo on")).stdout == b"on\\n"
    saved = os.path.join(run, level + ".tar")
    await workspace.snapshot(saved)
    again = await sandbox.restore("again", saved)
    assert await again.list() == ["x", "y", "z/f"], await again.list()
    await sandbox.close()
    assert os.listdir(os.path.join(run, "workspaces")) == []
    print(level, "holds", got.problems)

asyncio.run(check(sys.argv[2], sys.argv[3]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.skipif(
    not (shutil.which("setpriv") and os.path.exists(PYTHON)), reason="needs setpriv and a system Python"
)
@pytest.mark.parametrize("level", ["namespaces", "landlock", "none"])
def test_without_privileges(level):
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        base.chmod(0o755)
        for module in (gyre_core, gyre_harnesses, pluggy):
            source = Path(module.__file__).parent
            shutil.copytree(source, base / "lib" / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        (base / "run").mkdir()
        os.chown(base / "run", int(USER), int(USER))
        done = subprocess.run(
            [*BECOME, PYTHON, "-c", PROGRAM, str(base / "lib"), level, str(base / "run")],
            capture_output=True,
            text=True,
            timeout=120,
            cwd="/",
        )
        if "requires" in done.stderr and "Python" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stderr
        assert "holds" in done.stdout or "not to be had" in done.stdout
    end = time.monotonic() + 60
    while left := subprocess.run(["ps", "-u", USER, "-o", "pid=,args="], capture_output=True, text=True).stdout:
        assert time.monotonic() < end, left  # a keeper whose channel was closed ends by itself, in a moment of its own
        time.sleep(0.05)
