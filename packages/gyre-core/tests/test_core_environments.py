"""Environments: built once, never used half built, another one for another description."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from gyre_core import ConfigError, InfrastructureError
from gyre_core.environments import COMPLETE, build, find, folder, read_spec

SPEC = """
name = "toy"
check = ["-c", "import toy_marker; assert toy_marker.X == 7"]

[[step]]
pip = ["--version"]

[[file]]
path = "toy_marker.py"
content = "X = 7"
"""


def spec_in(folder: Path, text: str = SPEC) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "environment.toml"
    path.write_text(text)
    return path


def test_a_built_environment_is_found_and_reused(tmp_path: Path) -> None:
    spec = read_spec(spec_in(tmp_path / "plugin"))
    assert find("toy", tmp_path) is None
    said: list[str] = []
    python = build(spec, tmp_path, report=said.append)
    assert python.is_file()
    assert find("toy", tmp_path) == find("toy", tmp_path, spec=spec) == python
    steps = len(said)
    assert build(spec, tmp_path, report=said.append) == python
    assert len(said) == steps + 1
    assert "complete" in said[-1]


def test_what_fails_is_told_with_its_log_and_never_found(tmp_path: Path) -> None:
    spec = read_spec(spec_in(tmp_path / "plugin", SPEC.replace("X == 7", "X == 8")))
    with pytest.raises(InfrastructureError, match="AssertionError"):
        build(spec, tmp_path)
    assert find("toy", tmp_path) is None
    assert folder(spec, tmp_path).is_dir(), "left for the reader; thrown away at the next try"


def test_an_install_compiles_no_more_than_its_check_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files are never imported. What is, is compiled once and not at every start of an engine."""
    for name in ("used", "unused"):
        package = tmp_path / "plugin" / "source" / f"toy_{name}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    wheel_in(tmp_path / "plugin" / "source", tmp_path / "plugin" / "toy-1.0-py3-none-any.whl")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    text = SPEC.replace('["--version"]', '["install", "--no-index", "{here}/toy-1.0-py3-none-any.whl"]')
    text = text.replace("import toy_marker", "import toy_used, toy_marker")
    python = build(read_spec(spec_in(tmp_path / "plugin", text)), tmp_path)
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    assert list((packages / "toy_used").glob("__pycache__/*.pyc"))
    assert not list((packages / "toy_unused").glob("__pycache__/*.pyc"))


def wheel_in(source: Path, wheel: Path) -> None:
    """A wheel of pure Python with what is below `source`."""
    info = "toy-1.0.dist-info"
    files = {path.relative_to(source).as_posix(): path.read_text() for path in source.rglob("*.py")}
    files |= {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))


def test_half_built_is_built_again(tmp_path: Path) -> None:
    spec = read_spec(spec_in(tmp_path / "plugin"))
    build(spec, tmp_path)
    (folder(spec, tmp_path) / COMPLETE).unlink()
    assert find("toy", tmp_path) is None
    stale = folder(spec, tmp_path) / "stale"
    stale.write_text("")
    build(spec, tmp_path)
    assert not stale.exists()


def test_the_digest_follows_the_files_a_step_names(tmp_path: Path) -> None:
    text = SPEC.replace('["--version"]', '["install", "-r", "{here}/requirements.txt"]')
    path = spec_in(tmp_path / "plugin", text)
    with pytest.raises(ConfigError, match=r"requirements\.txt"):
        read_spec(path)
    requirements = path.with_name("requirements.txt")
    requirements.write_text("a==1\n")
    first = read_spec(path)
    assert first.steps == (("install", "-r", str(requirements)),)
    requirements.write_text("a==2\n")
    assert read_spec(path).digest != first.digest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("name", "nam"), "unknown keys nam"),
        (('name = "toy"', 'name = "../toy"'), "plain name"),
        (('["--version"]', '"--version"'), "list of words"),
        (('"toy_marker.py"', '"../toy_marker.py"'), "inside site-packages"),
        (("[[step]]", "[[step]"), "TOML"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_spec(spec_in(tmp_path, SPEC.replace(*change, 1)))


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    spec = read_spec(spec_in(tmp_path / "plugin", 'python = "3.2"\n' + SPEC))
    with pytest.raises(InfrastructureError, match=r"python3\.2"):
        build(spec, tmp_path)
