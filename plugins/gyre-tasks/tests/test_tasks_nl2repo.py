"""`nl2repo`: folders are read or refused with their place; hidden tests come from a folder, an archive or pip."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from gyre_core import ComponentContext, ConfigError, ExecutionEnd, ExecutionStatus, InfrastructureError, ScoringJob
from gyre_core.testing.folder import FolderSandbox
from gyre_tasks.nl2repo import sources
from gyre_tasks.nl2repo.benchmark import read_project, split_commands
from gyre_tasks.nl2repo.options import Nl2RepoOptions
from gyre_tasks.nl2repo.taskset import Nl2RepoTaskSet

PROJECT = {
    "start.md": "# Adder\nWrite `adder.add`.\n",
    "test_case_count.txt": "3",
    "test_commands.json": '["pip install -e .", "pytest -v --tb=short -k \\"not slow\\" tests"]',
    "test_files.json": '["tests", "conftest.py"]',
}
ORIGINAL = {
    "adder.py": "def add(a, b):\n    return a + b\n",
    "tests/test_adder.py": "from adder import add\n\n\ndef test_a():\n    assert add(1, 2) == 3\n\n\n"
    "def test_b():\n    assert add(0, 0) == 0\n\n\ndef test_c():\n    assert add(-1, 1) == 0\n",
    "testsuite.txt": "not below tests",
}
BACKEND = """
import os, tarfile
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    os.makedirs(os.path.join(folder, "adder-1.0.dist-info"))
    with open(os.path.join(folder, "adder-1.0.dist-info", "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: adder\\nVersion: 1.0\\n")
    return "adder-1.0.dist-info"
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def put(folder: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def archive(path: Path, files: Mapping[str, str], links: Mapping[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"adder-1.0/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(f"adder-1.0/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return path


@pytest.fixture
def bench(tmp_path):
    put(tmp_path / "bench" / "adder", PROJECT)
    return tmp_path


def tasks(base: Path, **options: object):
    made = Nl2RepoTaskSet(Nl2RepoOptions(path="bench", **options), ComponentContext(".", "test", base_dir=str(base)))  # type: ignore[arg-type]
    return [*made.tasks("train"), *made.tasks("heldout")]


def test_a_project_becomes_a_task(bench):
    """Plain data: a task travels between the processes of a run."""
    put(bench / "hidden" / "adder", ORIGINAL)
    [task] = tasks(bench, tests="hidden")
    options = task.scorer.options
    assert task.id == "nl2repo/adder"
    assert task.files == {"start.md": PROJECT["start.md"].encode()}
    assert options["files"] == {"tests/test_adder.py": ORIGINAL["tests/test_adder.py"].encode()}
    assert (options["targets"], options["count"]) == (("tests",), 3)
    assert options["arguments"] == ("-k", "not slow")
    assert "add(1, 2)" not in task.prompt
    [as_text] = tasks(bench, tests="hidden", prompt="text")
    assert (as_text.prompt, as_text.files) == (PROJECT["start.md"], {})


async def test_the_score_is_the_share_of_the_counted_tests(bench):
    scorers = pytest.importorskip("gyre_scorers.hidden.scorer")
    options = pytest.importorskip("gyre_scorers.options")
    archive(bench / "hidden" / "adder-1.0.tar.gz", ORIGINAL)
    [task] = tasks(bench, tests="hidden")
    scorer = scorers.PytestScorer(options.PytestOptions(python=sys.executable), ComponentContext(".", "test"))
    end = ExecutionEnd(ExecutionStatus.COMPLETED, "done")
    right, part = ORIGINAL["adder.py"], "def add(a, b):\n    return abs(a) + b\n"
    for code, expected in ((right, 1.0), (part, 2 / 3), (None, 0.0)):
        files = {} if code is None else {"adder.py": code.encode()}
        workspace = await FolderSandbox(str(bench)).create("w", files)
        score = await scorer.score(ScoringJob(task, end), workspace)
        assert score.value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("file", "text", "place"),
    [
        ("test_case_count.txt", "many", r"test_case_count\.txt:1"),
        ("test_case_count.txt", "0", r"test_case_count\.txt:1"),
        ("test_files.json", '[\n"tests"\n', r"test_files\.json:\d"),
        ("test_files.json", "[]", r"test_files\.json:1"),
        ("test_commands.json", '["make test"]', r"test_commands\.json:1.*0 commands"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(bench, file, text, place):
    (bench / "bench" / "adder" / file).write_text(text)
    with pytest.raises(ConfigError, match=place):
        tasks(bench)


def test_a_missing_file_is_named(bench):
    (bench / "bench" / "adder" / "test_files.json").unlink()
    with pytest.raises(ConfigError, match=r"no test_files\.json"):
        tasks(bench)


def test_commands_keep_what_chooses_tests():
    targets, arguments, left_out = split_commands(
        ["pip install -e .", "python -m pytest -n 4 --cov=x -p no:y --ignore tests/slow ./tests/ test_a.py"], Path("f")
    )
    assert targets == ("tests", "test_a.py")
    assert arguments == ("--ignore", "tests/slow")
    assert left_out == ("pip install -e .", "-n", "4", "--cov=x", "-p", "no:y")


def test_only_and_heldout_name_projects(bench):
    put(bench / "bench" / "other", PROJECT)
    for name in ("adder", "other"):
        put(bench / "hidden" / name, ORIGINAL)
    assert [task.id for task in tasks(bench, only=("other",), tests="hidden")] == ["nl2repo/other"]
    context = ComponentContext(".", "test", base_dir=str(bench))
    chosen = Nl2RepoTaskSet(Nl2RepoOptions(path="bench", tests="hidden", heldout=("other",)), context)
    assert [task.id for task in chosen.tasks("heldout")] == ["nl2repo/other"]
    assert [task.id for task in chosen.tasks("train")] == ["nl2repo/adder"]
    with pytest.raises(ConfigError, match="absent"):
        tasks(bench, only=("absent",))
    with pytest.raises(ConfigError, match="no path"):
        Nl2RepoTaskSet(None, context).tasks("train")


def test_looking_ahead_fetches_nothing_and_finds_wrong_names(bench, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started a process"))
    context = ComponentContext(".", "test", base_dir=str(bench))
    fetching = {"path": "bench", "heldout": ()}
    assert Nl2RepoTaskSet(Nl2RepoOptions(**fetching), context).check("train") == []
    with pytest.raises(ConfigError, match="absent"):
        Nl2RepoTaskSet(Nl2RepoOptions(**fetching, only=("absent",)), context).check("train")
    put(bench / "hidden" / "adder", ORIGINAL)
    here = Nl2RepoTaskSet(Nl2RepoOptions(**fetching, tests="hidden"), context)
    assert here.check("train") == here.tasks("train") != []


def test_one_task_is_found_without_the_tests_of_the_others(bench):
    put(bench / "bench" / "other", PROJECT)
    put(bench / "hidden" / "adder", ORIGINAL)
    context = ComponentContext(".", "test", base_dir=str(bench))
    found = Nl2RepoTaskSet(Nl2RepoOptions(path="bench", tests="hidden"), context)
    assert found.named("adder") == found.named("nl2repo/adder")
    assert found.named("adder").id == "nl2repo/adder"
    with pytest.raises(ConfigError, match="such as adder"):
        found.named("addder")
    with pytest.raises(InfrastructureError, match="other"):
        found.named("other")


def test_tests_that_are_nowhere_are_named_before_anything_starts(bench):
    (bench / "hidden").mkdir()
    put(bench / "bench" / "other", PROJECT)
    with pytest.raises(InfrastructureError, match=r"adder: .*neither a folder nor an archive(.|\n)*other: "):
        tasks(bench, tests="hidden", heldout=())
    archive(bench / "hidden" / "Adder-1.0.tar.gz", {"adder.py": "x"})
    with pytest.raises(InfrastructureError, match="none of them below tests"):
        tasks(bench, tests="hidden", only=("adder",))


def test_an_archive_gives_regular_files_below_its_top_folder(tmp_path):
    path = archive(tmp_path / "adder-1.0.tar.gz", {"a": "1", "../../b": "2", "c/d": "3"}, {"link": "/etc/passwd"})
    assert sources.read_archive(path) == {"a": b"1", "c/d": b"3"}
    path.write_bytes(b"no archive")
    with pytest.raises(InfrastructureError, match="a source archive"):
        sources.read_archive(path)


def has_pip() -> bool:
    try:
        return bool(sources.find_python())
    except InfrastructureError:
        return False


@pytest.mark.skipif(not has_pip(), reason="no interpreter with pip here")
def test_pip_fetches_once_and_says_what_went_wrong(tmp_path, monkeypatch):
    """pip itself, asked for a project that lies in a folder: no network."""
    files = {**ORIGINAL, "pyproject.toml": PYPROJECT, "backend.py": BACKEND, "PKG-INFO": "Metadata-Version: 2.1\n"}
    archive(tmp_path / "index" / "adder-1.0.tar.gz", files)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    found = sources.fetch("adder==1.0", tmp_path / "cache", None, 120.0)
    assert "tests/test_adder.py" in sources.read_archive(found)
    (tmp_path / "index" / "adder-1.0.tar.gz").unlink()
    assert sources.fetch("adder==1.0", tmp_path / "cache", None, 120.0) == found
    with pytest.raises(InfrastructureError, match="fetching the sources of subtracter"):
        sources.fetch("subtracter", tmp_path / "cache", None, 120.0)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["adder==1.0"]


# The public benchmark's own folders, where they are, with the projects' sources from the package index.

BENCH = Path(__file__).parents[4] / "shared" / "nl2repo"
REQUIREMENTS = {"unidecode": "Unidecode==1.4.0", "six": "six==1.17.0", "typing_extensions": "typing_extensions"}


def test_the_public_folders_are_read():
    if not BENCH.is_dir():
        pytest.skip(f"no NL2RepoBench folders at {BENCH}")
    read = {folder.parent.name: read_project(folder.parent) for folder in BENCH.glob("*/start.md")}
    assert read["unidecode"].count == 65
    assert read["unidecode"].targets == ("tests",)
    assert read["typing_extensions"].targets == ("src",)
    assert read["six"].hidden("test_six.py")


def original(name: str) -> dict[str, bytes]:
    """The project without its tests, from the index; skips where there is none."""
    from gyre_tasks.settings import cache_folder

    if not BENCH.is_dir():
        pytest.skip(f"no NL2RepoBench folders at {BENCH}")
    try:
        found = sources.fetch(REQUIREMENTS[name], cache_folder() / "sources", None, 300.0)
    except InfrastructureError as error:
        pytest.skip(f"the package index does not give the sources: {error}")
    project = read_project(BENCH / name)
    return {path: data for path, data in sources.read_archive(found).items() if not project.hidden(path)}


def half_of(name: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """Every second module emptied; of a project that is one module, functions gone that its tests call, not import."""
    if name == "unidecode":
        modules = sorted(path for path in files if path.startswith("unidecode/x"))
        return {**files, **dict.fromkeys(modules[1::2], b"")}
    path, gone = SPOILT[name]
    spoil = "\n\ndef _absent(*a, **k):\n    raise NotImplementedError\n\n\n" + "".join(
        f"{function} = _absent\n" for function in gone.split()
    )
    return {**files, path: files[path] + spoil.encode()}


SPOILT = {
    "six": (
        "six.py",
        "ensure_binary ensure_str ensure_text with_metaclass wraps print_ raise_from assertRegex iterkeys",
    ),
    "typing_extensions": (
        "src/typing_extensions.py",
        "get_overloads is_typeddict get_original_bases evaluate_forward_ref assert_never assert_type",
    ),
}
"""Of a project that is one module: the module, and which of its functions are gone."""


def as_pytest_reports(folder: Path, name: str, files: dict[str, bytes]) -> float:
    """The share of passed tests in pytest's own XML report, skipped ones left out, with the sandbox's Python."""
    import importlib.util
    from xml.etree import ElementTree

    from gyre_tasks.settings import cache_folder

    whole = sources.read_archive(sources.fetch(REQUIREMENTS[name], cache_folder() / "sources", None, 300.0))
    project = read_project(BENCH / name)
    for path, data in {**files, **{p: d for p, d in whole.items() if project.hidden(p)}}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    spec = importlib.util.find_spec("pytest")
    assert spec is not None
    assert spec.origin is not None
    report = folder.with_name("report.xml")
    flags = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        f"--junitxml={report}",
        "-c",
        "/dev/null",
    ]
    done = subprocess.run(
        ["/usr/bin/python3", "-S", "-m", "pytest", *flags, "--rootdir=.", *project.targets],
        cwd=folder,
        env={
            "PYTHONPATH": f"{folder}:{folder}/src:{Path(spec.origin).parents[1]}",
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
        },
        capture_output=True,
        timeout=280,
    )
    assert report.is_file(), done.stdout + done.stderr
    cases = ElementTree.parse(report).getroot().iter("testcase")
    outcomes = [{child.tag for child in case} for case in cases]
    counted = [each for each in outcomes if "skipped" not in each]
    return sum(not each & {"failure", "error"} for each in counted) / max(len(counted), 1)


def by_command(name: str, folder: Path) -> dict[str, object]:
    """What `gyre score` prints."""
    command = ["score", "--tasks", "nl2repo", "--task", name, "--workspace", str(folder), "--json"]
    sets = [f"tasks.path={BENCH}", f'tasks.sources.{name}="{REQUIREMENTS[name]}"']
    flags = [word for each in sets for word in ("--set", each)]
    done = subprocess.run([sys.executable, "-m", "gyre_rl", *command, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def lay_out(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.checked if name == "unidecode" else ()) for name in REQUIREMENTS]
)
def test_original_half_and_empty(name, tmp_path):
    """On the original's sources nearly all; on a half exactly what pytest says; on nothing nothing."""
    pytest.importorskip("gyre_rl")
    pytest.importorskip("gyre_harnesses")
    if not Path("/usr/bin/python3").exists():
        pytest.skip("no /usr/bin/python3 for the sandbox here")
    whole = original(name)
    full = by_command(name, lay_out(tmp_path / "whole", whole))
    assert full["score"] >= 0.98
    milestones = full["milestones"]
    assert len(milestones) >= 0.9 * read_project(BENCH / name).count  # one a test that was not skipped
    assert all("::" in each["name"] for each in milestones)
    half = half_of(name, whole)
    got = by_command(name, lay_out(tmp_path / "half", half))["score"]
    expected = as_pytest_reports(lay_out(tmp_path / "plain" / "copy", {}), name, half)
    assert 0.0 < got < full["score"]
    assert got == pytest.approx(expected, abs=1e-9)
    assert by_command(name, lay_out(tmp_path / "empty", {}))["score"] == 0.0
