"""Every example's files are good as `gyre check` sees them; the laptop ones really run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from gyre_core import Kind, PluginError, PluginManager
from gyre_rl.cli.sizing import memory_problems
from gyre_rl.config import load

EXAMPLES = Path(__file__).parents[1] / "examples"
FAMILIES = ("files", "terminal", "migrate", "team", "nl2repo")
SIZES = ("laptop", "8-gpus", "64-gpus")
FILES = [EXAMPLES / family / f"{size}.toml" for family in FAMILIES for size in SIZES]
SECTIONS = {"tasks": Kind.TASKSET, "engine": Kind.ENGINE, "trainer": Kind.TRAINER, "harness": Kind.HARNESS}


def plugins_of(file: Path) -> dict[str, str]:
    """Section -> plugin, of a file and what it extends."""
    table = tomllib.loads(file.read_text())
    base = plugins_of(file.parent / table["extends"]) if "extends" in table else {}
    return base | {key: table[key]["name"] for key in SECTIONS if "name" in table.get(key, {})}


def need_plugins(file: Path) -> None:
    manager = PluginManager.installed()
    for section, name in plugins_of(file).items():
        try:
            manager.find(SECTIONS[section], name)
        except PluginError:
            pytest.skip(f"the {SECTIONS[section].value} {name!r} is not installed")


def gyre(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gyre_rl", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_file_is_read_whole(file):
    need_plugins(file)
    config = load(file)
    assert config.name == f"{file.parent.name}-{file.stem}"
    assert config.tasks.name == file.parent.name
    accelerators = config.cells.count * config.cells.accelerators
    assert accelerators == {"laptop": 0, "8-gpus": 8, "64-gpus": 64}[file.stem]


@pytest.mark.parametrize("file", [FILES[0], FILES[4], FILES[8]], ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_gyre_check_finds_a_file_good_and_its_model_fits(file):
    need_plugins(file)
    done = gyre("check", "--elsewhere", "--json", str(file))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ok"]
    assert bool(told["memory"]) == (file.stem != "laptop")


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_model_fits(file):
    need_plugins(file)
    assert list(memory_problems(load(file))) == []


@pytest.mark.parametrize(("stage", "fits"), [(2, False), (3, True)])
def test_32_billion_weights_fit_on_8_accelerators_when_they_are_sharded_too(stage, fits, tmp_path):
    """Masters and moments are in host memory; stage 2 leaves all weights on each accelerator."""
    file = EXAMPLES / "files" / "8-gpus.toml"
    need_plugins(file)
    shape = json.loads((EXAMPLES / "models" / "qwen3-14b.json").read_text())
    shape |= {"num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    sets = {"model.shape": f'"{tmp_path}/config.json"', "trainer.stage": stage, "cells.accelerators": 8}
    sets["trainer.offload_optimizer"] = "true"
    config = load(file, [f"{key}={value}" for key, value in sets.items()])
    assert bool(list(memory_problems(config))) != fits


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_gyre_check_finds_every_file_good(file):
    need_plugins(file)
    done = gyre("check", "--elsewhere", str(file))
    assert done.returncode == 0, done.stderr


def test_each_folder_says_what_to_expect():
    for family in FAMILIES:
        page = (EXAMPLES / family / "README.md").read_text()
        assert f"gyre run examples/{family}/laptop.toml" in page
        assert re.search(r"[Ee]xpect", page)
    overview = (EXAMPLES / "README.md").read_text()
    assert all(f"({family}/README.md)" in overview for family in FAMILIES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.checked if f == "team" else ()) for f in FAMILIES]
)
def test_a_laptop_run_goes_through(family, tmp_path):
    file = EXAMPLES / family / "laptop.toml"
    need_plugins(file)
    done = gyre("run", str(file), "--plain", "--json", "--set", f"dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == "finished"
    assert told["steps"] == 1
    assert told["lost_calls"] == 0
