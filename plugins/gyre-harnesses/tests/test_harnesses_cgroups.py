"""Control groups of workspaces: where they are looked for, what the kernel keeps, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from gyre_core import ComponentContext, ConfigError, ExecRequest, InfrastructureError
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox import cgroups
from gyre_harnesses.sandbox.local import LocalSandbox

MOUNTS_1 = "31 30 0:26 / {at}/memory rw - cgroup cgroup rw,memory\n32 30 0:27 / {at}/p rw - cgroup cgroup rw,cpu,pids\n"
MOUNTS_2 = "31 30 0:26 {root} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def proc(folder: Path, mountinfo: str, cgroup: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mountinfo").write_text(mountinfo)
    (folder / "cgroup").write_text(cgroup)
    return folder


def test_version_2_is_looked_for_below_the_own_group(tmp_path):
    own = tmp_path / "user.slice" / "run.scope"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    seen = proc(tmp_path / "a", MOUNTS_2.format(root="/", at=tmp_path), "0::/user.slice/run.scope\n")
    assert cgroups.candidates(seen)[0] == cgroups.Place(2, (str(own),))
    inside = proc(tmp_path / "b", MOUNTS_2.format(root="/user.slice", at=tmp_path), "0::/user.slice/run.scope\n")
    (tmp_path / "run.scope").mkdir()
    (tmp_path / "run.scope" / "cgroup.controllers").write_text("memory\n")
    assert cgroups.candidates(inside)[0] == "version 2: no pids controller"
    assert cgroups.candidates(proc(tmp_path / "c", "", ""))[0] == "version 2: not mounted"


def test_version_1_has_a_folder_for_each_controller(tmp_path):
    seen = proc(tmp_path / "a", MOUNTS_1.format(at=tmp_path), "5:memory:/x/y\n4:cpu,pids:/\n0::/\n")
    assert cgroups.candidates(seen)[1] == cgroups.Place(1, (f"{tmp_path}/memory/x/y", f"{tmp_path}/p"))
    assert cgroups.candidates(proc(tmp_path / "b", "", ""))[1] == "version 1: no memory and no pids hierarchy"


def test_limits_are_written_as_each_version_takes_them(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "p").mkdir()
    second = cgroups.make(cgroups.Place(2, (str(tmp_path),)), "w", 1 << 20, 10)
    [folder] = second.folders
    assert {each.name: each.read_text() for each in Path(folder).iterdir()} == {
        "memory.max": str(1 << 20),
        "memory.swap.max": "0",
        "pids.max": "18",
    }
    assert second.events == f"{folder}/memory.events"
    first = cgroups.make(cgroups.Place(1, (f"{tmp_path}/m", f"{tmp_path}/p")), "w", 1 << 20, 10)
    assert Path(first.folders[0], "memory.limit_in_bytes").read_text() == str(1 << 20)
    assert Path(first.folders[1], "pids.max").read_text() == "18"
    with pytest.raises(OSError):
        cgroups.make(cgroups.Place(2, (str(tmp_path / "absent"),)), "w", 1, 1)


@pytest.mark.parametrize(("version", "names"), [(1, cgroups._FIRST_NAMES), (2, ("memory.max", "memory.swap.max"))])
def test_a_kernel_that_counts_no_swap_gives_groups_all_the_same(tmp_path, version, names):
    limit, swap = tmp_path / names[0], tmp_path / names[1]
    limit.touch()
    swap.symlink_to("/sys/gyre-absent")  # as in a control group's folder: not there, and not even root can make it
    with pytest.raises(OSError):
        swap.write_text("0")
    cgroups._limit(cgroups.Group(version, (str(tmp_path),)), 1 << 20, 10)
    assert (limit.read_text(), (tmp_path / "pids.max").read_text()) == (str(1 << 20), "18")


def test_a_process_of_another_namespace_is_not_taken_for_our_own_group(tmp_path, monkeypatch):
    (tmp_path / "cgroup.procs").write_text("0\n17\n")
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    cgroups._kill(str(tmp_path))
    assert killed == [17]


@pytest.fixture
def unjoined(tmp_path, monkeypatch):
    """Groups can be made, it seems, but no process can join one."""
    place = cgroups.Place(2, (str(tmp_path),))
    monkeypatch.setattr(cgroups, "find", lambda _: place)
    monkeypatch.setattr(cgroups, "make", lambda *_: cgroups.Group(2, (f"{tmp_path}/gone",)))


async def test_where_no_process_can_join_a_group_there_are_none(unjoined, tmp_path):
    made = LocalSandbox(LocalOptions(), ComponentContext(str(tmp_path / "run"), "test"))
    try:
        assert "as a process joins a group" in str((await made.isolation()).place)
        workspace = await made.create("w", {})
        assert (await run(workspace, "echo on")).stdout == b"on\n"
    finally:
        await made.close()
    named = LocalSandbox(LocalOptions(cgroup=str(tmp_path)), ComponentContext(str(tmp_path / "run"), "test"))
    with pytest.raises(ConfigError, match="no process can join"):
        await named.isolation()
    await named.close()
    assert os.listdir(tmp_path / "run" / "workspaces") == []


async def test_a_process_that_stays_leaves_neither_folders_nor_other_workspaces(tmp_path, monkeypatch):
    def stays(group):
        raise InfrastructureError(f"removing the control group {group.folders[0]}", got="processes that stay")

    monkeypatch.setattr(cgroups.Group, "end", stays)
    options = LocalOptions(cgroup="none")
    made = LocalSandbox(options, ComponentContext(str(tmp_path), "test"))
    for name in "abc":
        workspace = await made.create(name, {})
        workspace._group = None if name == "b" else cgroups.Group(2, (f"/{name}",))
    with pytest.raises(InfrastructureError, match=r"control group /[ac]"):
        await made.close()
    assert os.listdir(tmp_path / "workspaces") == []


async def test_a_folder_asked_for_by_name_is_used_or_refused(tmp_path):
    made = LocalSandbox(LocalOptions(cgroup="/sys/fs/cgroup/absent"), ComponentContext(str(tmp_path), "test"))
    with pytest.raises(ConfigError, match="/sys/fs/cgroup/absent"):
        await made.isolation()
    await made.close()
    with pytest.raises(ConfigError, match="'cgroup'"):
        LocalOptions(cgroup="relative")


@pytest.fixture(params=["auto", "none"])
async def sandbox(request, tmp_path):
    options = LocalOptions(isolation=request.param, total_memory_mb=128, processes=20)
    made = LocalSandbox(options, ComponentContext(str(tmp_path), "test"))
    found = await made.isolation()
    if isinstance(found.place, str):
        await made.close()
        pytest.skip(f"no control groups here: {found.place}")
    yield made
    await made.close()


def groups_of(sandbox) -> list[str]:
    here = [entry for folder in sandbox._isolation.place.folders for entry in os.listdir(folder)]
    return [name for name in here if name.startswith(f"gyre-{os.getpid()}-")]


async def run(workspace, command, timeout_s=30.0):
    return await workspace.run(ExecRequest(["bash", "-c", command], timeout_s, 10_000))


async def test_the_kernel_keeps_memory_and_processes(sandbox):
    workspace = await sandbox.create("w", {})
    # Over in a moment, between two looks: only the kernel can see it.
    spike = await run(workspace, "python3 -c 'bytearray(400 << 20)'; echo went on")
    assert (spike.exit_code, spike.limit) == (None, "memory")
    crowd = await run(workspace, "for i in $(seq 40); do sleep 9 & done 2>&1; echo ready", 8.0)
    assert b"Resource temporarily unavailable" in crowd.stdout + crowd.stderr
    fine = await run(workspace, "python3 -c 'print(len(bytearray(20 << 20)))'")
    assert (fine.exit_code, fine.limit, fine.stdout) == (0, None, b"20971520\n")


async def test_a_group_goes_with_its_workspace(sandbox):
    first = await sandbox.create("a", {})
    await sandbox.create("b", {})
    assert len(set(groups_of(sandbox))) == 2
    await first.close()
    assert len(set(groups_of(sandbox))) == 1
    await sandbox.close()
    assert groups_of(sandbox) == []


async def test_what_a_lost_keeper_left_behind_is_killed(sandbox):
    """Without a process namespace nothing else would find it."""
    workspace = await sandbox.create("w", {})
    procs = Path(workspace._group.folders[0], "cgroup.procs")
    while len(first := pids(procs)) > 1:  # the keeper's parent, which is about to end
        await asyncio.sleep(0.05)
    [keeper] = first
    running = asyncio.ensure_future(run(workspace, "sleep 300; true", 300))
    while len(left := pids(procs)) < 2:
        await asyncio.sleep(0.05)
    os.kill(keeper, signal.SIGKILL)
    await asyncio.gather(running, return_exceptions=True)
    await workspace.close()
    for pid in left:
        with contextlib.suppress(OSError):
            assert "sleep" not in Path(f"/proc/{pid}/cmdline").read_text()


def pids(procs: Path) -> list[int]:
    return [int(word) for word in procs.read_text().split()]
