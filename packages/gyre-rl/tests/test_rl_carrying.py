"""Folders go into a workspace and come out as they were, and nothing comes out beside its target."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gyre_core import ConfigError, ExecRequest, InfrastructureError, ScorerSpec, Task
from gyre_core.testing.folder import FolderSandbox
from gyre_rl.agents.carrying import at_start, carry_in, carry_out, read_tree


def write(folder):
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "sub" / "plain with space").write_bytes(b"\0\xff")
    (folder / "link").symlink_to("run.sh")
    (folder / "sub" / "out").symlink_to("/etc/passwd")
    (folder / "to-folder").symlink_to("sub")


async def test_in_and_out_again_is_the_same(tmp_path):
    folder, back = tmp_path / "from", tmp_path / "back"
    write(folder)
    sandbox = FolderSandbox(str(tmp_path))
    workspace = await carry_in(sandbox, "w", folder)
    assert read_tree(Path(workspace.path)) == read_tree(folder)
    await carry_out(workspace, back)
    assert read_tree(back) == read_tree(folder)
    assert read_tree(folder).executable == {"run.sh"}
    await carry_out(workspace, back)  # once more, over what is there
    assert read_tree(back) == read_tree(folder)
    await sandbox.close()


async def test_a_task_begins_with_scripts_that_can_be_run(tmp_path):
    sandbox = FolderSandbox(str(tmp_path))
    files = {"tools/run.sh": b"#!/bin/sh\necho ran\n", "-odd name": b"#!/bin/sh\n", "plain.sh": b"#!/bin/sh\n"}
    task = Task("t", "p", ScorerSpec("files", {}), files, executable=("tools/run.sh", "-odd name"))
    workspace = await at_start(sandbox, "w", task)
    assert (await workspace.run(ExecRequest(["tools/run.sh"], 10, 100))).stdout == b"ran\n"
    tree = read_tree(Path(workspace.path))
    assert (tree.files, tree.executable) == (files, set(task.executable))


async def test_a_workspace_that_could_not_be_filled_is_closed(tmp_path):
    sandbox = FolderSandbox(str(tmp_path))
    task = Task("t", "p", ScorerSpec("files", {}), {}, executable=("missing",))
    with pytest.raises(InfrastructureError, match="chmod"):
        await at_start(sandbox, "w", task)
    assert not [path for path in tmp_path.rglob("*") if path.is_dir() and path.name.startswith("w")]


async def test_many_files(tmp_path):
    folder = tmp_path / "from"
    folder.mkdir()
    for number in range(501):
        (folder / f"l{number}").symlink_to(f"t{number}")
    sandbox = FolderSandbox(str(tmp_path))
    await carry_out(await carry_in(sandbox, "w", folder), tmp_path / "back")
    assert read_tree(tmp_path / "back") == read_tree(folder)


async def test_nothing_is_written_through_a_link_of_the_target(tmp_path):
    """Of one that an earlier execution left there, say."""
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (target / "sub").symlink_to(outside)
    (target / "file").symlink_to(outside / "made")
    sandbox = FolderSandbox(str(tmp_path))
    with pytest.raises(InfrastructureError, match="leads elsewhere"):
        await carry_out(await sandbox.create("w", {"sub/file": b"x"}), target)
    await carry_out(await sandbox.create("w", {"file": b"x"}), target)
    assert list(outside.iterdir()) == []
    assert (target / "file").read_bytes() == b"x"
    assert not (target / "file").is_symlink()


async def test_what_is_no_folder_is_refused_and_a_broken_workspace_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        read_tree(tmp_path / "nowhere")
    workspace = await FolderSandbox(str(tmp_path)).create("w", {})
    os.rmdir(workspace.path)
    with pytest.raises((InfrastructureError, OSError)):
        await carry_out(workspace, tmp_path / "back")
