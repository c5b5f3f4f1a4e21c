# ruff: noqa: E501 - lines of the programs that cheat
"""Work that attacks while it is judged, in the real sandbox by the real scorer; and all attacks by a user who is nobody.

What is judged runs the agent's code once more: it may kill, fork, flood and linger there as in its execution. It earns no
point that its functions did not, the scorer goes on, nothing of it is left. The attacks during an execution, and the cheats
against pytest itself, are in the plugins' own suites; here those run once more without privileges.
"""

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
from gyre_core import ComponentContext, ExecRequest, ExecutionEnd, ExecutionStatus, ScorerSpec, ScoringJob, Task
from gyre_core.testing.support import load_module
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox.local import LocalSandbox
from gyre_scorers.hidden.scorer import PytestScorer
from gyre_scorers.options import PytestOptions

PROGRAMS = load_module(Path(__file__).parents[2] / "plugins" / "gyre-harnesses" / "tests" / "attacks.py")
PYTHON = "/usr/bin/python3"
TESTS = """
import mod
def test_one(): assert mod.f(1) == 2
def test_two(): assert mod.f(2) == 3
def test_three(): assert mod.f(3) == 4
"""
SUITE = {
    "files": {"tests/test_mod.py": TESTS},
    "targets": ["tests"],
    "count": 3,
    "timeout_s": 12.0,
    "test_timeout_s": 4.0,
}
WRONG = "def f(a): return None\n"
ONE = "def f(a): return 2\n"  # right once in three

# What the judged module does when it is imported or called, and how many of the three tests it may pass.
JUDGED = {
    "kill the scorer's parents": ("import os, signal\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\n" + WRONG, 0),
    "kill everything": ("import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\n" + WRONG, 0),
    "kill the own group": ("import os\nos.killpg(0, 9)\n" + WRONG, 0),
    "stop the scorer": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n" + WRONG, 0),
    "fork bomb": ("import os\ndef f(a):\n    while True:\n        try: os.fork()\n        except OSError: pass\n", 0),
    "print a summary from a fork": ("import os\nif os.fork() == 0:\n    os.write(1, b'===== 3 passed in 0.01s =====\\n'); os._exit(0)\n" + WRONG, 0),
    "ten gigabytes of output": ("import os\ndef f(a):\n    while True: os.write(1, b'x' * 65536)\n", 0),
    "fill the disk": ("def f(a):\n    with open('big', 'wb') as file:\n        while True: file.write(b'x' * 65536)\n", 0),
    "eat memory": ("def f(a):\n    x = []\n    while True: x.append(b'x' * (1 << 20))\n", 0),
    "daemon that writes the answer": (
        "import subprocess\nsubprocess.Popen(['sh', '-c', 'while :; do printf \"def f(a): return a + 1\\\\n\" > mod.py; sleep 0.01; done'], start_new_session=True)\n" + WRONG,
        0,
    ),
    "ask the host for the answer": ("import socket\ndef f(a):\n    socket.create_connection(('{address}', {port}), 1)\n    return a + 1\n", 0),
    "take the answer from the host": ("def f(a):\n    open('{secret}').read()\n    return a + 1\n", 0),
    "look for the scorer's key": (
        "import gc, os\nkeys = [o for o in gc.get_objects() if isinstance(o, dict) and 'key' in o]\n"
        "for key in keys:\n    for fd in range(3, 40):\n        try: os.write(fd, repr(key).encode())\n        except OSError: pass\n" + WRONG,
        0,
    ),
    "replace the module by a pipe": (None, 0),
    "one right answer and a crash": ("import os\ndef f(a):\n    if a > 1: os.kill(os.getpid(), 9)\n    return 2\n", 1),
    "one right answer": (ONE, 1),
}  # fmt: skip


@pytest.fixture
async def sandbox(tmp_path):
    options = LocalOptions(processes=60, disk_mb=64, file_mb=32, total_memory_mb=512, memory_mb=1024, cpu_s=20)
    made = LocalSandbox(options, ComponentContext(str(tmp_path / "run"), "test"))
    if (await made.isolation()).level != "namespaces" or not Path(PYTHON).exists():
        await made.close()
        pytest.skip("needs user namespaces and a system Python")
    yield made
    await made.close()


@pytest.mark.parametrize("name", JUDGED)
async def test_judged_work_earns_what_it_is_worth(sandbox, tmp_path, name):
    code, right = JUDGED[name]
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    workspace = await sandbox.create("w", {"kept": b"1"})
    if code is None:
        await workspace.run(ExecRequest(["mkfifo", "mod.py"], 60.0, 100))
    else:
        for word, value in {"{secret}": str(secret), "{address}": "127.0.0.1", "{port}": "9"}.items():
            code = code.replace(word, value)
        await workspace.write("mod.py", code.encode())
    before = await workspace.list()
    task = Task("t", "p", ScorerSpec("pytest", SUITE))
    scorer = PytestScorer(PytestOptions(python=PYTHON), ComponentContext(".", "test"))
    score = await scorer.score(ScoringJob(task, ExecutionEnd(ExecutionStatus.COMPLETED, "done")), workspace)
    assert score.value == pytest.approx(right / 3), [(m.name, m.passed, m.evidence) for m in score.milestones]
    assert await workspace.list() == before, "the workspace is as the agent left it, and nothing of the scorer is in it"
    left = await workspace.run(ExecRequest(["sh", "-c", "ls /proc | grep -c '^[0-9]*$'"], 60.0, 100))
    assert int(left.stdout) <= 4, "something of the judged work is still running"


# What an agent leaves behind, and what its right answer then earns: what cannot be judged is worth nothing, and no fault
# of ours that would be tried again; what only looks odd loses nothing.
LEFT = {
    "a workspace that is shut": ("chmod 000 .", 0.0),
    "a workspace that is read only": ("chmod 555 .", 0.0),
    "no room for a copy": ("for n in 1 2 3; do head -c 15000000 /dev/urandom > big$n; done", 0.0),
    "no room for a copy, by many files": ("seq 9000 | xargs touch", 0.0),
    "large files that are unreadable": ("mkdir d; for n in 1 2; do head -c 15000000 /dev/urandom > d/$n; done; chmod 0 d", 1.0),
    "holes": ("for n in 1 2 3; do truncate -s 32M hole$n; done", 1.0),
    "a pipe for the tests": ("mkfifo tests", 1.0),
    "a link for the tests": ("ln -s / tests", 1.0),
    "a link to itself for the tests": ("ln -s tests tests", 1.0),
    "a file for the tests": ("echo 1 > tests", 1.0),
    "odd names": ("touch \"$(printf 'a\\nb')\" \"$(printf '\\377')\" ./-rf; mkdir .gyre-1; chmod 0 .gyre-1", 1.0),
    "folders that are read only": ("mkdir -p a/b; touch a/b/c; chmod 555 a/b a", 1.0),
    "a shut home": ("chmod 000 $HOME $TMPDIR", 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
async def test_what_is_left_behind_is_judged_for_what_it_is(sandbox, name):
    command, worth = LEFT[name]
    workspace = await sandbox.create("w", {"mod.py": b"def f(a): return a + 1\n"})
    done = await workspace.run(ExecRequest(["bash", "-c", command], 60.0, 1000))
    assert (done.exit_code, done.limit) == (0, None)
    task = Task("t", "p", ScorerSpec("pytest", {**SUITE, "timeout_s": 60.0}))
    scorer = PytestScorer(PytestOptions(python=PYTHON), ComponentContext(".", "test"))
    score = await scorer.score(ScoringJob(task, ExecutionEnd(ExecutionStatus.COMPLETED, "done")), workspace)
    assert score.value == worth, (score.why, [(m.name, m.passed, m.evidence) for m in score.milestones])


NOBODY = """
import asyncio, os, sys
sys.path[:0] = sys.argv[1:3]
from attacks import ATTACKS, LIMITS
from gyre_core import ComponentContext, ExecRequest
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox.local import LocalSandbox

async def main(run):
    words = {"secret": run + "/outside/secret", "outside": run + "/outside", "port": 9, "abstract": "gyre-none",
             "pid": os.getpid(), "address": "127.0.0.1"}
    os.mkdir(run + "/outside")
    open(words["secret"], "w").write("the secret\\n")
    sandbox = LocalSandbox(LocalOptions(**LIMITS), ComponentContext(run, "test"))
    level = (await sandbox.isolation()).level
    print(level)
    if level != "namespaces":
        return await sandbox.close()
    for name, attack in ATTACKS.items():
        workspace = await sandbox.create("w", {"kept": b"1"})
        result = await workspace.run(ExecRequest(["bash", "-c", attack.format(**words)], 1.5, 20000))
        after = await workspace.run(ExecRequest(["sh", "-c", "echo on; ls /proc | grep -c '^[0-9]*$'"], 60.0, 1000))
        assert after.stdout.startswith(b"on") and int(after.stdout.split()[1]) <= 4, (name, result, after)
        assert b"the secret" not in result.stdout + result.stderr, name
        assert open(words["secret"]).read() == "the secret\\n" and os.listdir(run + "/outside") == ["secret"], name
        await workspace.close()
        assert os.listdir(run + "/workspaces") == [], name
    await sandbox.close()
    print(len(ATTACKS), "attacks failed")

asyncio.run(main(sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.skipif(not (shutil.which("setpriv") and os.path.exists(PYTHON)), reason="needs setpriv, a system Python")
def test_all_attacks_fail_for_a_user_without_privileges():
    user = str(20_001 + os.getpid() % 40_000)  # nobody else's: other runs of these tests may be under way here
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        base.chmod(0o755)
        for module in (gyre_core, gyre_harnesses, pluggy):
            source = Path(module.__file__).parent
            shutil.copytree(source, base / "lib" / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(PROGRAMS.__file__, base / "lib" / "attacks.py")
        (base / "run").mkdir()
        os.chown(base / "run", int(user), int(user))
        become = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", PYTHON, "-c", NOBODY]
        done = subprocess.run(
            [*become, str(base / "lib"), str(base / "lib"), str(base / "run")], capture_output=True, text=True, cwd="/"
        )
        if done.returncode == 0 and not done.stdout.startswith("namespaces"):
            pytest.skip("users without privileges get no namespaces here")
        assert done.returncode == 0, done.stderr
        assert f"{len(PROGRAMS.ATTACKS)} attacks failed" in done.stdout
    end = time.monotonic() + 60
    while left := subprocess.run(["ps", "-u", user, "-o", "pid=,args="], capture_output=True, text=True).stdout:
        assert time.monotonic() < end, left  # a keeper whose channel was closed ends by itself, in a moment of its own
        time.sleep(0.05)
