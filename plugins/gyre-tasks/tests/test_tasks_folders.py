"""Task folders: what becomes a task, and that every mistake is named with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from gyre_core import ComponentContext, ConfigError, Kind, PluginManager
from gyre_tasks.folders.loader import PYTHON, read_task
from gyre_tasks.folders.options import FolderOptions
from gyre_tasks.folders.taskset import FolderTaskSet
from gyre_tasks.located import key_lines

COMMANDS = '''about = "x"
split = "heldout"
floor = 0.25
prompt = """
Do this:
run = "not a key"
"""

[scorer]
name = "commands"

[[scorer.milestones]]
name = "first"
probe = "p.py one two"

[[scorer.milestones]]
run = "true"
weight = 3
'''
COMPOSITE = """prompt = "p"

[scorer]
name = "composite"

[[scorer.parts]]
scorer = "pytest"
targets = ["suite.py"]
count = 2
weight = 2
gate = 0.5

[[scorer.parts]]
scorer = "commands"
name = "probes"

[[scorer.parts.milestones]]
probe = "probes/q.py"

[[scorer.parts]]
scorer = "files"

[[scorer.parts.milestones]]
path = "out"
expect = "out.txt"
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def test_a_folder_becomes_a_task(tmp_path):
    folder = write(tmp_path / "one", {"task.toml": COMMANDS, "start/a/b.txt": "b", "hidden/p.py": "print(1)\n"})
    (folder / "start" / "a" / "run.sh").write_text("true")
    (folder / "start" / "a" / "run.sh").chmod(0o755)
    read = read_task(folder)
    task = read.task("mine")
    assert tuple(task.executable) == ("a/run.sh",)
    assert (task.id, task.prompt, read.split, read.floor) == (
        "mine/one",
        'Do this:\nrun = "not a key"',
        "heldout",
        0.25,
    )
    assert task.files == {"a/b.txt": b"b", "a/run.sh": b"true"}
    assert task.scorer.options["milestones"] == [
        {"run": [*PYTHON, "one", "two"], "stdin": "print(1)\n", "name": "first"},
        {"run": "true", "weight": 3},
    ]


def test_parts_of_a_composite_get_their_hidden_files(tmp_path):
    hidden = {"hidden/suite.py": "s", "hidden/probes/q.py": "q", "hidden/out.txt": "o"}
    options = read_task(write(tmp_path, {"task.toml": COMPOSITE, **hidden})).scorer.options
    suite, probes, files = options["parts"]
    assert (suite["weight"], suite["gate"], suite["options"]["count"]) == (2, 0.5, 2)
    assert set(suite["options"]["files"]) == {"suite.py", "out.txt"}
    assert probes["name"] == "probes"
    assert probes["options"]["milestones"][0]["stdin"] == "q"
    assert files["options"] == {"milestones": [{"path": "out", "content": b"o"}]}


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("floor = 0.25", "floor = 2", r"task\.toml:3.*below 1"),
        ("floor = 0.25", "flor = 0.25", r"task\.toml:3.*unknown key.*did you mean 'floor'"),
        ('split = "heldout"', 'split = "test"', r"task\.toml:2.*train, heldout"),
        ('split = "heldout"', "split = 3", r"task\.toml:2.*a text"),
        ("about", "about about", r"task\.toml:1"),
        ("p.py one two", "q.py", r"task\.toml:14.*'q\.py', which is not in 'hidden'"),
        ('run = "true"', 'run = "true"\nprobe = "p.py"', r"task\.toml:17.*beside 'probe'"),
        ("[scorer]", "[scorers]", r"task\.toml.*'scorer\.name'.*nothing"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path, old, new, place):
    assert COMMANDS.count(old) >= 1
    text = COMMANDS.replace(old, new, 1)
    with pytest.raises(ConfigError, match=place):
        read_task(write(tmp_path, {"task.toml": text, "hidden/p.py": ""}))


def test_links_and_missing_suites_are_refused(tmp_path):
    suite = 'prompt = "p"\n[scorer]\nname = "pytest"\ntargets = ["t.py"]\ncount = 1\n'
    with pytest.raises(ConfigError, match=r"task\.toml:2.*'hidden'"):
        read_task(write(tmp_path, {"task.toml": suite}))
    write(tmp_path, {"hidden/t.py": ""})
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "link").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="a link"):
        read_task(tmp_path)


def test_keys_are_found_on_their_lines():
    assert key_lines('a = """\nb = 1\n"""\n[t.u]\nc.d = 2\n[[x]]\ny = 1\n[[x]]\ny = 2\n') == {
        "a": 1, "t.u": 4, "t.u.c.d": 5, "x.0": 6, "x.0.y": 7, "x.1": 8, "x.1.y": 9,
    }  # fmt: skip


def test_the_task_set_folder_lists_what_is_there(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / "mine" / name, {"task.toml": COMMANDS, "hidden/p.py": ""})
    context = ComponentContext(".", "test", base_dir=str(tmp_path))
    listed = FolderTaskSet(FolderOptions(path="mine"), context)
    assert [task.id for task in listed.tasks("heldout")] == ["folder/a", "folder/b"]
    assert [task.id for task in FolderTaskSet(FolderOptions("mine", ("b",)), context).tasks("heldout")] == ["folder/b"]
    with pytest.raises(ConfigError, match="no path"):
        FolderTaskSet(None, context).tasks("train")
    with pytest.raises(ConfigError, match="only = 'c'"):
        FolderTaskSet(FolderOptions("mine", ("c",)), context).tasks("train")
    with pytest.raises(ConfigError, match="no such folder"):
        FolderTaskSet(FolderOptions("absent"), context).tasks("train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no task"):
        FolderTaskSet(FolderOptions("empty"), context).tasks("train")


def test_all_task_sets_are_registered():
    manager = PluginManager.installed()
    for name in ("folder", "nl2repo", "terminal", "migrate", "team"):
        assert manager.find(Kind.TASKSET, name).distribution == "gyre-tasks"
        manager.create(Kind.TASKSET, name, {}, ComponentContext(".", "test"))
