"""Work that turns on the probe that starts it: it wins no milestone and never sees what is hidden."""

from __future__ import annotations

from pathlib import Path

import pytest
from gyre_core import ComponentContext, ExecutionEnd, ExecutionStatus, Kind, PluginManager, ScorerSpec, ScoringJob, Task
from gyre_tasks.folders.loader import PYTHON, read_task

TERMINAL = Path(__file__).parents[1] / "samples" / "terminal"
PATCH = r"""
import os, time
time.sleep(0.5)  # by then the probe waits
ahead = os.getppid()
with open(f"/proc/{ahead}/syscall") as file:
    at = int(file.read().split()[-1], 16)
with open(f"/proc/{ahead}/mem", "r+b", buffering=0) as memory:
    memory.seek(at)
    memory.write(b"\x31\xff\xb8\xe7\x00\x00\x00\x0f\x05")  # exit_group(0), for x86-64
"""
READ = r"""
import os, time
time.sleep(0.5)
ahead, seen = os.getppid(), b""
for path in (f"/proc/{ahead}/fd/0", f"/proc/{ahead}/cmdline", f"/proc/{ahead}/environ", "/proc/self/fd/0"):
    try:
        with open(path, "rb") as file:
            seen += file.read()
    except OSError:
        pass
try:
    os.lseek(0, 0, os.SEEK_SET)
    seen += os.read(0, 1 << 20)
except OSError:
    pass
try:
    with open(f"/proc/{ahead}/maps") as maps, open(f"/proc/{ahead}/mem", "rb", buffering=0) as memory:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if "rw" in line.split()[1] and end - begin < 1 << 26:
                memory.seek(begin)
                seen += memory.read(end - begin)
except OSError:
    pass
open("seen", "wb").write(seen)
"""
PROBE = """
import subprocess, sys
marked = "only the scorer knows 4711"
subprocess.run([sys.executable, "work.py"], timeout=20)
sys.exit(7)
"""


async def scored(tmp_path, task, files, *left):
    """The score of a workspace with these files, and what lies in it then under these names."""
    manager = PluginManager.installed()
    if (Kind.SANDBOX, "local") not in {(c.registration.kind, c.registration.name) for c in manager.components()}:
        pytest.skip("the sandbox 'local' is not installed")
    context = ComponentContext(str(tmp_path), "test")
    sandbox = manager.create(Kind.SANDBOX, "local", {}, context)
    try:
        workspace = await sandbox.create("cheat", files)
        scorer = manager.create(Kind.SCORER, task.scorer.name, {}, context)
        score = await scorer.score(ScoringJob(task, ExecutionEnd(ExecutionStatus.COMPLETED, "done")), workspace)
        return score, [await workspace.read(name, limit=1 << 30) for name in left]
    finally:
        await sandbox.close()


@pytest.mark.parametrize("sample", ["notes-service", "lookup-server", "supervisor"])
async def test_a_service_that_patches_its_judge_earns_nothing(tmp_path, sample):
    pytest.importorskip("gyre_scorers")
    task = read_task(TERMINAL / sample).task("terminal")
    names = {path for path in task.files if path.endswith(".py")}
    score, _ = await scored(tmp_path, task, {**task.files, **dict.fromkeys(names, PATCH.encode())})
    assert [m.name for m in score.milestones if m.passed] == []


@pytest.mark.parametrize("python", [PYTHON, ("python3", "-I", "-")], ids=["as it is", "without its beginning"])
async def test_what_a_probe_starts_neither_changes_nor_reads_it(tmp_path, python):
    """The other beginning shows that the attacks are attacks: where the kernel lets them, both succeed."""
    pytest.importorskip("gyre_scorers")
    options = {"milestones": [{"run": list(python), "stdin": PROBE, "name": "probe"}]}
    task = Task("t", "p", ScorerSpec("commands", options))
    patched, _ = await scored(tmp_path, task, {"work.py": PATCH.encode()})
    _, (seen,) = await scored(tmp_path, task, {"work.py": READ.encode()}, "seen")
    if python == PYTHON:
        assert (patched.value, "exit 7" in patched.milestones[0].evidence) == (0.0, True)
        assert b"only the scorer knows" not in seen
    elif patched.value == 0.0:
        pytest.skip("this kernel lets no program into its parent's memory")
    else:
        assert b"only the scorer knows" in seen
