"""Every page's code runs; links lead somewhere; the runner itself finds what it must."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from gyre_tito.findings import KINDS

ROOT = Path(__file__).resolve().parent.parent


def load_tool(name):
    spec = spec_from_file_location(f"gyre_tools_{name}", ROOT / "tools" / f"{name}.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


docs = load_tool("docs")
FOLDERS = ["docs", "packages", "plugins", "examples"]
PAGES = [
    page
    for page in docs.pages([*(ROOT / f for f in FOLDERS if (ROOT / f).is_dir()), *ROOT.glob("*.md")])
    if not {"node_modules", ".venv"} & set(page.parts)
]


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.runs for b in docs.blocks(p.read_text()))], ids=name_of)
def test_the_code_of_a_page_runs(page):
    assert docs.run_page(page) == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.slow for b in docs.blocks(p.read_text()))], ids=name_of)
def test_the_slow_code_of_a_page_runs(page):
    assert docs.run_page(page, slow=True) == []


def linked(page):
    """The files that a page's links name, existing or not."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [target for target in targets if not re.match(r"[a-z]+:|#", target)]
    return [(page.parent / target.partition("#")[0]).resolve() for target in local]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for file in linked(page):
        assert file.exists(), f"{page}: a link to {file} leads nowhere"


def unreachable(index):
    """Pages beside and below an index that neither it nor a page it links to names."""
    first = {file for file in linked(index) if file.suffix == ".md"}
    second = {file for page in first for file in linked(page)}
    return sorted(set(index.parent.rglob("*.md")) - first - second - {index})


def test_every_page_is_linked_from_the_index_or_from_a_page_that_it_links():
    assert unreachable(ROOT / "docs" / "index.md") == []


def test_a_page_two_links_away_from_the_index_is_found(tmp_path):
    for name, text in {"index": "[a](a.md#x)", "a": "[b](b.md)", "b": "[c](c.md)", "c": "`[d](d.md)`"}.items():
        (tmp_path / f"{name}.md").write_text(text)
    assert unreachable(tmp_path / "index.md") == [tmp_path / "c.md"]


def test_each_law_that_a_check_prints_is_told_on_its_page():
    told = re.findall(r"^\| (\d[\d.]*) \| ", (ROOT / "docs" / "why" / "tito.md").read_text(), re.MULTILINE)
    assert {kind.law for kind in KINDS.values()} - set(told) == set()


def test_the_runner_runs_what_it_should_and_reports_failures(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n```python\nx = 1\n```\ntext\n```python no-run: needs a GPU\nraise SystemExit(3)\n```\n"
        "```python\nassert x == 1\n```\n```bash\nfalse\n```\n```text\nno\n```\n"
    )
    assert docs.run_page(page) == []
    assert [b.line for b in docs.blocks(page.read_text()) if b.runs] == [3, 10]
    page.write_text(
        "\n\n```python\nx = 1\nraise ValueError('here')\n```\n```bash run\nexit 4\n```\n```bash slow\nexit 5\n```\n"
    )
    python, bash = docs.run_page(page)
    assert "line 5" in python
    assert "here" in python
    assert "ended with 4" in bash
