"""The house rules that no other tool checks: sizes, side effects, environment, dependencies, what a package carries."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = sorted(
    p.parent for p in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/gyre-*/pyproject.toml")]
)
FILE_LINES, FUNCTION_LINES = 440, 70
"""The house's measure is about 400 and about 60; a little more is allowed before it is an error."""
LEAVES = ("gyre_sched", "gyre_tito", "gyre_loss", "gyre_kvxfer", "gyre_weights")
HEAVY = ("torch", "transformers", "sglang", "vllm", "megatron", "deepspeed", "ray", "cupy", "renderers", "verifiers")
ENVIRONMENT = {
    "packages/gyre-rl/src/gyre_rl/procs/launcher.py": "a child inherits the environment it was started in",
    "packages/gyre-rl/src/gyre_rl/procs/tether.py": "so does one on another machine",
}
"""Files beside settings.py that may look at the environment, and why."""
ELSEWHERE = {
    "plugins/gyre-sglang/src/gyre_sglang/server/gyre_sglang_server": "put on the path of SGLang's own environment",
    "plugins/gyre-vllm/src/gyre_vllm/inside": "put on the path of vLLM's own environment",
    **{
        f"plugins/gyre-{name}/src/gyre_{name}/{module}.py": "imported by rank processes alone"
        for name, modules in {
            "deepspeed": ("model", "replica", "zero"),
            "megatron": ("cpu_shim", "families", "layout", "model", "optimizer", "replica"),
        }.items()
        for module in modules
    },
}
"""Folders and files whose code runs in another environment, and why: they import what that one has."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sources() -> list[Path]:
    return sorted(path for member in MEMBERS for path in (member / "src").rglob("*.py"))


def code() -> list[Path]:
    return sorted([*sources(), *ROOT.glob("tools/*.py"), *ROOT.glob("examples/**/*.py")])


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def tracked() -> list[Path]:
    shown = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in shown.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("path", code(), ids=name_of)
def test_files_and_functions_are_small(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES, f"{path} has {text.count(chr(10))} lines: split it by what it is about"
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{path}:{node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_globals_and_no_environment(path):
    for node in ast.walk(parsed(path)):
        assert not isinstance(node, ast.Global), f"{path}:{node.lineno}: `global`: pass it, or keep it in an object"
        if path.name == "settings.py" or name_of(path) in ENVIRONMENT:
            continue
        attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
        looks = attribute and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv")
        assert not looks, f"{path}:{node.lineno}: the environment is read in one settings.py per package"


def module_level_calls(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements at import time that act on something beyond the names of the module."""
    own = {t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    for node in tree.body:
        acted = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
            acted = [node.value.func] if isinstance(node.value, ast.Call) else [node.value]
            if not isinstance(acted[0], ast.Attribute):
                yield node
        for target in acted:
            root = target
            while isinstance(root, ast.Subscript | ast.Attribute):
                root = root.value
            if root is not target and not (isinstance(root, ast.Name) and root.id in own):
                yield node
        if isinstance(node, ast.For | ast.While | ast.With | ast.Delete | ast.AugAssign):
            yield node


@pytest.mark.parametrize("path", [p for p in sources() if p.name != "__main__.py"], ids=name_of)
def test_importing_has_no_side_effects(path):
    for node in module_level_calls(parsed(path)):
        pytest.fail(f"{path}:{node.lineno}: a statement that acts at import time (CONTRIBUTING.md: no side effects)")


def test_the_rule_against_side_effects_finds_them():
    fine = "import os\na = b(); a.e(1)\na.c.d = 1\n"
    bad = f"{fine}os.environ['A'] = '1'\nprint(1)\nfor x in y:\n    x()\nwith a:\n    pass\nz = f()\n"
    assert [node.lineno for node in module_level_calls(ast.parse(bad))] == [4, 5, 6, 8]


WITNESS = """
import json, logging, os, signal, sys, threading
def look():
    return dict(env=dict(os.environ), cwd=os.getcwd(), handlers=len(logging.root.handlers), level=logging.root.level,
                threads=threading.active_count(), sigint=str(signal.getsignal(signal.SIGINT)),
                hook=str(sys.excepthook), path=list(sys.path))
before = look()
import importlib
for module in {modules!r}:
    importlib.import_module(module)
after = look()
print(json.dumps([sorted(k for k in before if before[k] != after[k]), [m for m in {heavy!r} if m in sys.modules]]))
"""


def import_and_look(modules):
    program = WITNESS.format(modules=modules, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)
def test_importing_a_package_changes_nothing_and_is_light(member):
    """The package's own __init__: what everybody who depends on it pays for."""
    changed, heavy = import_and_look([import_name(member)])
    assert changed == []
    assert heavy == []


@pytest.mark.parametrize("point", sorted(entry_points(group="gyre"), key=lambda p: p.name), ids=lambda p: p.name)
def test_entry_point_modules_are_import_light(point):
    changed, heavy = import_and_look([point.module])
    assert changed == []
    assert heavy == [], "a module named in an entry point registers strings (CONTRIBUTING.md)"


def import_name(member: Path) -> str:
    return member.name.replace("-", "_")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level module) of every absolute import in a file, wherever it stands."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]


def requirements(member: Path) -> tuple[set[str], set[str]]:
    """Distribution names that a member depends on: always, and with its extras."""
    project = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    always = {normal(text) for text in project.get("dependencies", [])}
    extras = {normal(text) for group in project.get("optional-dependencies", {}).values() for text in group}
    return always, extras


def normal(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)
def test_a_package_imports_only_what_it_declares(member):
    always, extras = requirements(member)
    brought = packages_distributions()
    for path in (member / "src").rglob("*.py"):
        if name_of(path.parent) in ELSEWHERE or name_of(path) in ELSEWHERE:
            continue
        for line, module in imports(path):
            if module in sys.stdlib_module_names or module == import_name(member):
                continue
            distributions = {normal(d) for d in brought.get(module, [module])} | {module.replace("_", "-")}
            known = distributions & (always | extras)
            optional = module in OPTIONAL.get(member.name, ())
            assert known or optional, f"{path}:{line}: imports {module}, which {member.name} does not declare"


OPTIONAL = {
    "gyre-harnesses": ("minisweagent", "verifiers"),
    "gyre-loss": ("transformers", "triton"),
    "gyre-kvxfer": ("cupy", "nixl", "nixl_cu12", "torch", "vllm", "cuda"),
    "gyre-tito": ("transformers", "pyarrow", "uvloop"),
}
"""Modules that a package uses when they are there and does not ask for: imported inside functions only."""


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)
def test_optional_modules_are_imported_late(member):
    for path in (member / "src").rglob("*.py"):
        for node in parsed(path).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for name in names:
                late = OPTIONAL.get(member.name, ())
                assert name.partition(".")[0] not in late, f"{path}:{node.lineno}: import {name} where it is used"


def test_leaves_depend_on_no_other_package_of_ours():
    for member in MEMBERS:
        always, extras = requirements(member)
        ours = {name for name in always | extras if name.startswith("gyre-")}
        if import_name(member) in LEAVES or member.name == "gyre-core":
            assert ours == set(), member
        elif member.parent.name == "plugins":
            allowed = {"gyre-core", *(leaf.replace("_", "-") for leaf in LEAVES)}
            assert ours <= allowed, member
            adapted = ours - {"gyre-core", "gyre-weights"}  # engines and trainers also carry weights
            assert len(adapted) <= 1, f"{member}: a plugin adapts at most one leaf, and may publish or take weights"
    assert requirements(ROOT / "packages/gyre-sched")[0] == set()
    assert requirements(ROOT / "packages/gyre-core")[0] == {"pluggy"}


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)
def test_a_package_is_whole(member):
    for name in (
        "README.md",
        "LICENSE",
        f"src/{import_name(member)}/py.typed",
        f"src/{import_name(member)}/__init__.py",
    ):
        assert (member / name).is_file(), f"{member.name} has no {name}"
    assert (member / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    project = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    assert project["readme"] == "README.md"
    assert list((member / "tests").glob("test_*.py")), f"{member.name} has no tests"


def test_every_package_is_under_the_import_contracts():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    assert sorted(settings["root_packages"]) == sorted(import_name(member) for member in MEMBERS)
    plugins = {import_name(m) for m in MEMBERS if m.parent.name == "plugins"}
    between = next(c for c in settings["contracts"] if c["type"] == "independence" and set(c["modules"]) & plugins)
    assert set(between["modules"]) == plugins
    composed = next(
        c
        for c in settings["contracts"]
        if c["source_modules" if c["type"] == "forbidden" else "modules"] == ["gyre_rl"]
    )
    assert set(composed["forbidden_modules"]) == plugins


def test_test_files_have_names_of_their_own():
    names = [p.name for p in tracked() if p.name.startswith("test_") and p.suffix == ".py"]
    assert sorted(names) == sorted(set(names))


HIDDEN = (
    "py" + "pi.org",
    "python" + "hosted",
    "registry.npm" + "js",
    "deb.deb" + "ian.org",
    "/wo" + "rk/main",
    "/wo" + "rk/shared",
    "/ro" + "ot/",
)


def test_no_file_names_a_package_index_or_a_path_of_one_machine():
    for path in tracked():
        if path.suffix in (".safetensors", ".png", ".db", ".parquet", ".zst", ".gguf"):
            continue
        # uv completes its lock in the work tree with addresses; what counts is the form that is committed
        text = committed_lock() if path.name == "uv.lock" else path.read_text(encoding="utf-8", errors="replace")
        for word in HIDDEN:
            assert word not in text, f"{path} names {word}"


def committed_lock() -> str:
    return subprocess.run(["git", "show", ":uv.lock"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_nothing_large_is_committed():
    for path in tracked():
        assert path.stat().st_size < 8 << 20, f"{path} is {path.stat().st_size >> 20} MiB"


def test_adrs_are_numbered_and_listed():
    records = sorted(p.name for p in (ROOT / "docs/adr").glob("[0-9]*.md"))
    assert [name[:4] for name in records] == [f"{i:04d}" for i in range(1, len(records) + 1)]
    index = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    assert all(name in index for name in records)
