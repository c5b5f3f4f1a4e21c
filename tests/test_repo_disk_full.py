"""A disk that is full: said before a run starts, and said clearly when it fills up under a run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gyre_core import InfrastructureError
from gyre_rl.cli.errors import explain
from gyre_rl.run.bus import EventBus
from gyre_rl.views.events import Notice
from gyre_rl.views.log import read_log

KIB = 1024


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 256 KiB; skipped where mounting is not permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", f"size={256 * KIB}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount program")
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def gyre(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-c", "from gyre_rl.cli import main; main()", *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def make_config(folder: Path) -> None:
    (folder / "policy").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / "policy" / name).write_text("{}")
    (folder / "gyre.toml").write_text('name = "small"\ntasks = "files"\n[model]\npath = "policy"\n')


def test_a_run_on_a_full_disk_is_refused_before_it_starts(tiny_disk, tmp_path):
    make_config(tmp_path)
    done = gyre("run", ".", "--json", "--set", f"dir={tiny_disk}/run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"No space left on device in {tiny_disk}" in done.stderr
    assert "--set dir=" in done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["ok"] is False
    assert not (tiny_disk / "run").exists()


def test_an_event_log_that_fills_the_disk_says_what_to_do(tiny_disk):
    bus = EventBus(tiny_disk / "events.jsonl", [])

    def fill() -> None:
        for _ in range(1000):
            bus.emit(Notice("x" * KIB))

    with pytest.raises(InfrastructureError, match=r"No space left on device.*gyre resume"):
        fill()
    bus.close()
    log = tiny_disk / "events.jsonl"
    with log.open("rb+") as torn:
        torn.truncate(100 * KIB + 7)
    resumed = EventBus(log, [])
    resumed.emit(Notice("resumed"))
    resumed.close()
    assert [event.kind for event in read_log(log)][-2:] == ["notice", "notice"]
    assert read_log(log)[-1].data["text"] == "resumed"


def test_a_full_disk_deep_inside_is_explained(tiny_disk):
    async def deep() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread((tiny_disk / "big").write_bytes, bytes(1024 * KIB)))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(deep())
    error = explain(caught.value)
    assert error is not None
    assert error.got.startswith("No space left on device")
    assert "gyre resume" in error.fix
