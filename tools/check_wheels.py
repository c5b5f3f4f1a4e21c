"""Build every wheel and use each in a clean environment, as somebody who installs only that one would.

    python tools/check_wheels.py               all packages
    python tools/check_wheels.py gyre-sched    these packages

For each: the wheel holds py.typed and the license and nothing foreign; it installs with nothing else of ours beside
what it declares; it imports; the code of its README runs there. gyre-sched must bring no other distribution at all, and
import in less than 50 ms of processor time (the best of several: other programs share the machine). Needs uv.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALONE = "gyre-sched"
IMPORT_MS = 50.0
TRIES = 9
EXAMPLE_NEEDS = {"gyre-loss": ["transformers"]}
"""What a README's example uses beside its package."""
_TIME = "import time; t = time.process_time(); import {module}; print((time.process_time() - t) * 1000)"


class Wrong(Exception):  # noqa: N818 - a finding
    """A package is not as it should be."""


def members() -> dict[str, Path]:
    """Distribution name -> its folder, of the whole workspace."""
    files = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/gyre-*/pyproject.toml")]
    return {tomllib.loads(f.read_text(encoding="utf-8"))["project"]["name"]: f.parent for f in sorted(files)}


def call(*argv: str | Path, **options: object) -> str:
    """Standard output of a command; Wrong with what it printed if it failed."""
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise Wrong(f"{' '.join(map(str, argv))} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def check_contents(wheel: Path, module: str) -> None:
    """What the wheel holds."""
    names = zipfile.ZipFile(wheel).namelist()
    if f"{module}/py.typed" not in names:
        raise Wrong(f"{wheel.name} has no {module}/py.typed")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        raise Wrong(f"{wheel.name} has no license")
    foreign = [n for n in names if not n.startswith((f"{module}/", f"{module}-")) or "/tests/" in n]
    if foreign:
        raise Wrong(f"{wheel.name} holds what does not belong to it: {', '.join(foreign[:5])}")


def check_installed(name: str, wheels: Path, folder: Path) -> str:
    """Install `name` alone and use it; a line that says what was found."""
    module, environment = name.replace("-", "_"), folder / name
    call("uv", "venv", "-q", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    before = {d["name"] for d in json.loads(call("uv", "pip", "list", "--python", python, "--format", "json"))}
    call("uv", "pip", "install", "-q", "--python", python, "--find-links", wheels, name)
    brought = {d["name"] for d in json.loads(call("uv", "pip", "list", "--python", python, "--format", "json"))}
    brought -= before
    ours = sorted(d for d in brought if d.startswith("gyre-") and d != name)
    call(python, "-c", f"import {module}", cwd=folder)
    note = f"{len(brought) - 1} other distributions" + (f", of ours {', '.join(ours)}" if ours else "")
    if name == ALONE:
        if brought != {name}:
            raise Wrong(f"{name} brings {', '.join(sorted(brought - {name}))}; it must bring nothing")
        best = min(float(call(python, "-c", _TIME.format(module=module), cwd=folder)) for _ in range(TRIES))
        if best >= IMPORT_MS:
            raise Wrong(f"importing {module} takes {best:.1f} ms at best, expected less than {IMPORT_MS:.0f}")
        note += f", imports in {best:.1f} ms"
    for extra in EXAMPLE_NEEDS.get(name, []):
        call("uv", "pip", "install", "-q", "--python", python, extra)
    readme = members()[name] / "README.md"
    call(sys.executable, ROOT / "tools" / "docs.py", "--python", python, readme)
    return note


def main(arguments: Sequence[str] | None = None) -> int:
    """Check; the exit status says whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], help="distributions; all when none is named")
    asked = parser.parse_args(arguments)
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheels = folder / "dist"
        call("uv", "build", "--all-packages", "--wheel", "-o", wheels, "-q", cwd=ROOT)
        for name in asked.names or members():
            try:
                (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
                check_contents(wheel, name.replace("-", "_"))
                print(f"{name}: {check_installed(name, wheels, folder)}", flush=True)
            except Wrong as error:
                bad += 1
                print(f"{name}: WRONG: {error}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
