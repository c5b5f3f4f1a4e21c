"""Keep `uv.lock` free of download addresses, so that the committed file serves any package index.

uv writes the index's address and every file's URL and hash into its lock. The committed form keeps only
what matters for reproducibility, the exact versions and the dependency graph; `uv sync` then fetches those
versions from whichever index the reader uses and completes the file in the work tree.

    python tools/lock.py            strip uv.lock in place
    python tools/lock.py --check    exit 1 if the file in the index of git (or uv.lock itself) is not stripped
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "uv.lock"
_REGISTRY = re.compile(r'\{ registry = "[^"]*" \}')
_SDIST = re.compile(r"^sdist = \{.*\}\n", re.MULTILINE)
_WHEELS = re.compile(r"^wheels = \[\n(?:    .*\n)*\]\n", re.MULTILINE)
_METADATA = re.compile(r"^\[package\.metadata(?:\.[^\]]*)?\]\n(?:(?!\[).+\n|\n(?!\[))*", re.MULTILINE)


def strip(text: str) -> str:
    """Return the lock text with registry addresses, files and metadata tables removed; idempotent."""
    text = _REGISTRY.sub('{ registry = "index" }', text)
    for pattern in (_SDIST, _WHEELS, _METADATA):
        text = pattern.sub("", text)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def committed() -> str:
    """The lock as git would commit it (its index entry), or the work tree's file outside a checkout."""
    shown = subprocess.run(["git", "show", ":uv.lock"], cwd=LOCK.parent, capture_output=True, text=True, check=False)
    return shown.stdout if shown.returncode == 0 else LOCK.read_text()


def main() -> int:
    """Strip, or check; the exit status says whether the committed form is right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if not stripped")
    if parser.parse_args().check:
        text = committed()
        if text != strip(text) or "://" in text:
            print("uv.lock is committed with download addresses: run `python tools/lock.py`, then commit it.")
            return 1
        return 0
    LOCK.write_text(strip(LOCK.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
