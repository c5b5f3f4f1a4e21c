"""Run the code of Markdown pages, so that no page shows code that does not work.

Every ```python block is run, all blocks of a page in order and in one namespace, in an empty folder. A block that is
not meant to run says so: ```python sketch (names that a page does not define), ```python no-run: needs a GPU. A
```bash block is run only when it says so (```bash run), from the root of the checkout, and ```bash slow only with
--slow. An indented block is not code to run.

    python tools/docs.py README.md docs            run these pages
    python tools/docs.py --python PY README.md     with another interpreter (a clean environment)
    python tools/docs.py --list docs               only say what would run
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```([A-Za-z]+)([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = {"python": 300, "bash": 1800}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, the rest of its first line, its code and the line of the page it begins on."""

    language: str
    note: str
    code: str
    line: int

    @property
    def runs(self) -> bool:
        """Whether it is run at all; `slow` ones only when asked for."""
        if self.language == "python":
            return not self.note.startswith(("no-run", "sketch"))
        return self.language == "bash" and self.note in ("run", "slow")

    @property
    def slow(self) -> bool:
        """Whether it takes minutes."""
        return self.note == "slow"


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(match[1], match[2].strip(), match[3], line))
    return found


def script(text: str, language: str, *, slow: bool) -> str:
    """All blocks of one language that run, as one program whose line numbers are those of the page."""
    lines: list[str] = []
    for block in blocks(text):
        if block.language == language and block.runs and (slow or not block.slow):
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.code.rstrip("\n").split("\n")
    return "\n".join(lines) + "\n" if lines else ""


def run_page(page: Path, python: str = sys.executable, *, slow: bool = False) -> list[str]:
    """Run a page; what went wrong, or nothing."""
    text = page.read_text(encoding="utf-8")
    failures = []
    for language in ("python", "bash"):
        code = script(text, language, slow=slow)
        if not code:
            continue
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, f"{page.stem}.{'py' if language == 'python' else 'sh'}")
            program.write_text(code, encoding="utf-8")
            argv = [python, str(program)] if language == "python" else ["bash", "-euo", "pipefail", str(program)]
            try:
                done = subprocess.run(
                    argv,
                    cwd=folder if language == "python" else ROOT,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S[language],
                    check=False,
                )
            except subprocess.TimeoutExpired:
                failures.append(f"{page}: the {language} code did not end in {TIMEOUT_S[language]} s")
                continue
            if done.returncode != 0:
                failures.append(f"{page}: the {language} code ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return failures


def pages(paths: Iterable[Path]) -> list[Path]:
    """Markdown files among `paths` and below the folders among them, sorted."""
    found: set[Path] = set()
    for path in paths:
        found |= set(path.rglob("*.md")) if path.is_dir() else {path}
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or list; the exit status says whether all code ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args(arguments)
    failures: list[str] = []
    for page in pages(asked.paths):
        running = [b for b in blocks(page.read_text(encoding="utf-8")) if b.runs and (asked.slow or not b.slow)]
        if not running:
            continue
        print(f"{page}: {len(running)} blocks", flush=True)
        if not asked.list:
            failures += run_page(page, asked.python, slow=asked.slow)
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
