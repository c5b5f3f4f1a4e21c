"""`gyre plugin new`: what it writes works before a line of it is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from gyre_core import ConfigError, Kind, PluginManager
from gyre_rl.cli.app import app
from gyre_rl.config import RunConfig
from gyre_rl.config.convert import plugin_fields
from gyre_rl.scaffold import KINDS, write_plugin
from gyre_rl.scaffold.write import contents, names_of

SLOW = (Kind.ENGINE, Kind.HARNESS, Kind.SANDBOX, Kind.TRAINER)
MARKED = [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in KINDS]


def in_package(folder, *argv, timeout=600):
    env = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", MARKED)
@pytest.mark.timeout(900)
def test_a_new_package_passes_its_own_tests(kind, tmp_path):
    write_plugin(kind, "my-thing", tmp_path)
    out = in_package(tmp_path / "gyre-my-thing", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert " passed" in out
    assert "failed" not in out


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_registers_light_and_its_options_are_checked(kind, tmp_path):
    write_plugin(kind, "my-thing", tmp_path)
    code = (
        "import json, sys; from gyre_core import PluginManager; import gyre_my_thing.plugin as plugin; "
        "m = PluginManager(); "
        "m.add(plugin); c = m.components()[0]; r = c.registration; light = 'torch' not in sys.modules; "
        "o = m.options_type(r.kind, r.name); o(); "
        "print(json.dumps([r.kind, r.name, m.load(r.kind, r.name).__name__, o.__name__, not light]))"
    )
    found = json.loads(in_package(tmp_path / "gyre-my-thing", "-c", code))
    word = "TaskSet" if kind is Kind.TASKSET else kind.value.capitalize()
    options = "MyThingObjective" if kind is Kind.OBJECTIVE else "MyThingOptions"
    assert found == [kind.value, "my-thing", f"MyThing{word}", options, False]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_is_clean(kind, tmp_path):
    write_plugin(kind, "my-thing", tmp_path)
    folder = tmp_path / "gyre-my-thing"
    root = Path(__file__).resolve().parents[3]
    in_package(folder, "-m", "ruff", "check", "--config", str(root / "pyproject.toml"), ".")
    in_package(folder, "-m", "mypy", "--strict", "src")


def test_the_metadata_is_what_discovery_needs():
    for kind in KINDS:
        files = contents(names_of(kind, "far"))
        project = tomllib.loads(files["pyproject.toml"])["project"]
        assert project["name"] == "gyre-far"
        assert project["entry-points"]["gyre"] == {"gyre_far": "gyre_far.plugin"}
        assert f'Kind.{kind.name},\n        "far",' in files["src/gyre_far/plugin.py"]
        assert not any("$" in text for text in files.values())


def test_the_command_names_every_kind():
    from gyre_rl.cli.app import PLUGIN_KINDS

    assert ", ".join(kind.value for kind in KINDS) == PLUGIN_KINDS


@pytest.mark.parametrize("name", ["My", "my_thing", "-x", "x-", "", "../up", "class", "1a"])
def test_names_that_no_package_can_have_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="such as my-thing"):
        write_plugin("scorer", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_kinds_and_taken_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no kind of component"):
        write_plugin("scoorer", "x", tmp_path)
    with pytest.raises(ConfigError, match="a kind without a template"):
        write_plugin("transport", "x", tmp_path)
    write_plugin("scorer", "x", tmp_path)
    with pytest.raises(ConfigError, match="which exists"):
        write_plugin("scorer", "x", tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_readme_says_how_a_runs_file_chooses_it(kind):
    """By a key that chooses components of this kind."""
    usage = contents(names_of(kind, "far"))["README.md"].partition("```toml\n")[2].partition("```")[0]
    chosen = Table(tomllib.loads(usage))
    if kind is Kind.OBJECTIVE:
        assert chosen == {"trainer": {"objective": "far"}}
        return
    paths = {path: many for path, kind_of, _, many in plugin_fields(RunConfig) if kind_of is kind}
    found = [
        (many and isinstance(chosen.at(path), list)) or (not many and isinstance(chosen.at(path), dict))
        for path, many in paths.items()
        if chosen.at(path) is not None
    ]
    assert found == [True], usage


class Table(dict):
    """What a TOML text says."""

    def at(self, path):
        """The value at a dotted path; None when there is none."""
        value = self
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def test_a_name_that_a_plugin_has_is_refused(tmp_path):
    taken = PluginManager.installed().components(Kind.LAUNCHER)[0]
    with pytest.raises(ConfigError, match=f"a name that {taken.distribution} brings already"):
        write_plugin("launcher", taken.registration.name, tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_plugin("sink", taken.registration.name, tmp_path)  # of another kind


def test_the_command_shows_the_options_of_a_component(capsys):
    from gyre_rl.cli.console import Console
    from gyre_rl.cli.listing import list_plugins, show_options

    manager = PluginManager.installed()
    show_options(Console(json=True), "launcher", "local", manager)
    assert json.loads(capsys.readouterr().out) == {"options": []}
    list_plugins(Console(json=True), "launcher", manager)
    assert [c["kind"] for c in json.loads(capsys.readouterr().out)["components"]] == ["launcher"] * 2
    with pytest.raises(ConfigError, match="the kind 'lancher'"):
        list_plugins(Console(), "lancher", manager)


def test_the_help_names_every_kind_that_there_is_a_template_for():
    new = typer.main.get_command(app).commands["plugin"].commands["new"]
    (kind,) = (param for param in new.params if param.name == "kind")
    assert kind.help.split(", ") == [kind.value for kind in KINDS]
