"""What commands hide from the looks at disk and memory is counted; honest commands are not hindered by looks."""

from __future__ import annotations

import os
import types

import pytest
from gyre_core import ComponentContext, ConfigError, ExecRequest
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox.keeper import usage
from gyre_harnesses.sandbox.local import LocalSandbox

LIMITS = LocalOptions(disk_mb=32, file_mb=64, total_memory_mb=128, cgroup="none")
WAIT = "\ntime.sleep(600)"
WRITE = "import ctypes, mmap, os, socket, threading, time\ndata = b'x' * (48 << 20)\n"
FILE = "f = os.open('f', os.O_RDWR | os.O_CREAT); os.unlink('f'); os.write(f, data)\n"
UNDUMPABLE = "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
MEMORY = "files = [os.memfd_create('x') for _ in range(4)]\nfor f in files: os.write(f, data)\ndata = b''\n"
SEGMENT = """
libc = ctypes.CDLL(None)
libc.shmat.restype, libc.shmdt.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range({count}):
    at = libc.shmat(libc.shmget(0, 48 << 20, 0o1600), None, 0)
    ctypes.memset(at, 1, 48 << 20)
    libc.shmdt(at)
"""
DISK = {
    "beyond all paths": "for _ in range(30): os.mkdir('d' * 200); os.chdir('d' * 200)\nopen('f', 'wb').write(data)",
    "without a name": FILE,
    "without a name, mapped only": FILE + "m = mmap.mmap(f, len(data)); os.close(f)",
    "without a name, in a thread's own table": f"""
def hide():
    ctypes.CDLL(None).unshare(0x400)
    {FILE.replace("; ", chr(10) + "    ")}
    time.sleep(600)
threading.Thread(target=hide).start()
""",
    "without a name, in a process that forbids to look": FILE + UNDUMPABLE,
}
RAM = {
    "in a file of memory": MEMORY,
    "in a process that forbids to look": MEMORY + UNDUMPABLE,
    "in segments": "data = b''\n" + SEGMENT.format(count=4),
    "behind a first thread that ended": """
def later():
    while ") Z" not in open(f"/proc/{os.getpid()}/stat").read(): time.sleep(0.01)
    more = data * 4
    time.sleep(600)
threading.Thread(target=later).start()
ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)
""",
    "in the child of a thread": "def child():\n    if os.fork() == 0:\n        x = data * 4\n        time.sleep(600)\n"
    "    time.sleep(600)\nthreading.Thread(target=child).start()",
}


@pytest.fixture(params=["namespaces", "landlock", "none"])
async def workspace(request, tmp_path):
    sandbox = LocalSandbox(
        LocalOptions(**{**{n: getattr(LIMITS, n) for n in LIMITS.__slots__}, "isolation": request.param}),
        ComponentContext(str(tmp_path), "test"),
    )
    try:
        await sandbox.isolation()
    except ConfigError as error:
        pytest.skip(str(error))
    yield await sandbox.create("w", {})
    await sandbox.close()


async def python(workspace, text, seconds=120.0):
    return await workspace.run(ExecRequest(["python3", "-c", text], seconds, 2000))


@pytest.mark.parametrize("how", DISK)
async def test_disk_that_is_hidden_counts(workspace, how):
    assert (await python(workspace, WRITE + DISK[how] + WAIT)).limit == "disk"


@pytest.mark.parametrize("how", RAM)
async def test_memory_that_is_hidden_counts(workspace, how):
    assert (await python(workspace, WRITE + RAM[how] + WAIT)).limit == "memory"


async def test_segments_end_with_the_command_that_made_them(workspace):
    left = WRITE + SEGMENT.format(count=1) + "print(libc.shmget(77, 10, 0o1600), libc.msgget(77, 0o1600), "
    left += "libc.semget(77, 1, 0o1600))"
    made = await python(workspace, left)
    assert made.exit_code == 0, made
    assert b"-1" not in made.stdout
    for _ in range(3):
        assert (await python(workspace, WRITE + SEGMENT.format(count=1))).limit is None
    ask = "import ctypes\nlibc = ctypes.CDLL(None)\n"
    ask += "print(libc.shmget(77, 0, 0), libc.msgget(77, 0), libc.semget(77, 0, 0))"
    assert (await python(workspace, ask)).stdout == b"-1 -1 -1\n"


async def test_a_file_of_memory_counts_once_though_it_is_mapped_too(workspace):
    shared = """data = b''
for _ in range(2):
    f = os.memfd_create('x')
    for _ in range(40): os.write(f, b'x' * (1 << 20))
    m = mmap.mmap(f, 40 << 20)
    globals().setdefault('kept', []).append(m)
    sum(m[::4096])
time.sleep(2)
print('done')
"""
    assert (await python(workspace, WRITE + shared)).stdout == b"done\n"


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o600])
def test_a_folder_that_its_owner_closed_is_looked_into_and_is_as_it_was(tmp_path, monkeypatch, mode):
    """As another user, or its mode says nothing: in a child, which does not come back."""
    (tmp_path / "w" / "a" / "b").mkdir(parents=True)
    (tmp_path / "w" / "c").mkdir()
    (tmp_path / "w" / "a" / "b" / "f").write_bytes(b"x" * (1 << 20))
    uid = 54_000
    for path in (tmp_path, *tmp_path.rglob("*")):
        if os.geteuid() == 0:
            os.chown(path, uid, uid)
    for path in ("w/a/b", "w/a", "w/c", "w"):
        (tmp_path / path).chmod(mode)
    above = os.open(tmp_path, os.O_PATH)
    child = os.fork()
    if child == 0:
        try:
            os.chdir(above)
            if os.geteuid() == 0:
                os.setresuid(uid, uid, uid)
            used = usage.disk_use(("./w",), 1 << 30)
            modes = [os.stat("w").st_mode & 0o777]
            os.chmod("w", 0o700)
            modes += [os.stat(f"w/{name}").st_mode & 0o777 for name in "ac"]
            os.chmod("w/a", 0o700)
            modes.append(os.stat("w/a/b").st_mode & 0o777)
            os.chmod("w/a/b", 0o700)
            os._exit(0 if used > 1 << 20 and modes == [mode] * 4 else 1)
        finally:
            os._exit(2)
    os.close(above)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_folder_that_cannot_be_looked_into_is_over_the_limit(tmp_path, monkeypatch):
    (tmp_path / "w" / "a").mkdir(parents=True)

    def refused(spot, name):
        raise PermissionError(name)

    assert usage.disk_use((str(tmp_path / "w"),), 1 << 20) < 1 << 20
    monkeypatch.setattr(usage, "trees", types.SimpleNamespace(**{**vars(usage.trees), "enter": refused}))
    monkeypatch.setattr(usage.os, "chmod", refused)
    assert usage.disk_use((str(tmp_path / "w"),), 1 << 20) > 1 << 20
