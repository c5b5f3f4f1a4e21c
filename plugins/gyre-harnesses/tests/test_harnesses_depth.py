"""Folders deeper than an interpreter recurses and a path may be long: looked at, saved and removed like any other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gyre_core import ComponentContext, ExecRequest, InfrastructureError
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox import folders, paths, snapshots
from gyre_harnesses.sandbox.local import LocalSandbox

DIG = "import os\nfor _ in range({depth}): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').write('x')"


@pytest.fixture
async def sandbox(tmp_path):
    made = LocalSandbox(LocalOptions(), ComponentContext(str(tmp_path), "test"))
    yield made
    await made.close()


async def dug(sandbox, depth):
    workspace = await sandbox.create("w", {"a": b"1"})
    done = await workspace.run(ExecRequest(["python3", "-c", DIG.format(depth=depth)], 300.0, 1000))
    assert (done.exit_code, done.limit) == (0, None), done
    return workspace


async def test_what_lies_1200_folders_deep_is_listed_read_saved_restored_and_removed(sandbox, tmp_path):
    workspace = await dug(sandbox, 1200)
    deep = "d/" * 1200 + "f"
    assert await workspace.list() == ["a", deep]
    assert await workspace.list("d/" * 1100) == [deep]
    assert await workspace.read(deep) == b"x"
    await workspace.write("d/" * 1300 + "g", b"y")
    await workspace.snapshot(str(tmp_path / "rest"))
    again = await sandbox.restore("again", str(tmp_path / "rest"))
    assert await again.list() == ["a", "d/" * 1300 + "g", deep]
    await workspace.close()
    await again.close()
    assert os.listdir(tmp_path / "workspaces") == []


async def test_what_no_path_reaches_is_left_out_refused_at_rest_and_removed(sandbox, tmp_path):
    workspace = await dug(sandbox, 3000)
    assert await workspace.list() == ["a"]
    with pytest.raises(OSError, match="too long"):
        await workspace.read("d/" * 3000 + "f")
    with pytest.raises(InfrastructureError, match="a path of more than"):
        await workspace.snapshot(str(tmp_path / "rest"))
    assert os.listdir(tmp_path) == ["workspaces"]
    await workspace.close()
    assert os.listdir(tmp_path / "workspaces") == []


def test_a_snapshot_that_fails_in_any_way_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()

    def broken(*_):
        raise MemoryError

    monkeypatch.setattr(snapshots, "_fill", broken)
    with pytest.raises(MemoryError):
        snapshots.save(str(tmp_path / "work"), str(tmp_path / "rest"), 1 << 20)
    assert os.listdir(tmp_path) == ["work"]


def test_a_folder_that_is_moved_while_it_is_walked_leads_nowhere_else(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    (outside / "mine").write_text("1")
    seen: list[str] = []

    def move(spot, name):
        if name == "b":
            os.rename(inside / "a", outside / "a")
        return paths._enter(spot, name)

    start = os.open(inside, os.O_RDONLY)
    with pytest.raises(OSError, match="moved"):
        seen.extend(spot.path(name) for spot, name, _ in paths.trees.walk(start, move))
    os.close(start)
    assert seen == ["a", "a/b"]


def test_dots_lead_back_by_names_and_not_to_where_a_folder_was_moved(tmp_path):
    work = tmp_path / "work"
    (work / "a").mkdir(parents=True)
    (work / "f").write_text("inside")
    (tmp_path / "f").write_text("outside")
    assert paths.read_beneath(str(work), "a/../f", 100) == b"inside"
    assert paths.read_beneath(str(work), "a/.././a/../f", 100) == b"inside"
    with pytest.raises(PermissionError):
        paths.read_beneath(str(work), "a/../../f", 100)
    with pytest.raises(FileNotFoundError):
        paths.read_beneath(str(work), "b/../f", 100)


def test_links_in_a_folder_that_is_removed_are_not_followed(tmp_path):
    outside = tmp_path / "out"
    outside.mkdir(mode=0o500)
    (outside / "mine").write_text("1")
    outside.chmod(0o500)
    (tmp_path / "in" / "x").mkdir(parents=True)
    (tmp_path / "in" / "link").symlink_to(outside)
    (tmp_path / "in" / "x" / "link").symlink_to(outside / "mine")
    folders.remove(str(tmp_path / "in"))
    assert os.listdir(tmp_path) == ["out"]
    assert (Path(outside).stat().st_mode & 0o777, os.listdir(outside)) == (0o500, ["mine"])
