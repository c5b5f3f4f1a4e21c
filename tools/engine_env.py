"""Build the environment of an engine or trainer that lives outside the workspace's lock, or say where it is.

    python tools/engine_env.py vllm                 build unless complete; the last line is its interpreter
    python tools/engine_env.py vllm sglang --json   several; one JSON object name -> interpreter as the last line
    python tools/engine_env.py --list               what there is to build, and what is built

The description is `environment.toml` in the plugin's package; the environment goes to the cache folder (GYRE_CACHE, or
`gyre` in the user's cache folder) and is reused as long as the description stays the same. Needs only Python.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "packages" / "gyre-core" / "src"))  # runs before anything is installed

from gyre_core.environments import EnvironmentSpec, build, find, read_spec  # noqa: E402
from gyre_core.errors import GyreError  # noqa: E402


def specs() -> dict[str, EnvironmentSpec]:
    """Name -> description, of every plugin in the workspace that ships one."""
    read = (read_spec(path) for path in sorted(ROOT.glob("plugins/gyre-*/src/*/environment.toml")))
    return {spec.name: spec for spec in read}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Build environments of engines and trainers.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="say what there is to build and what is built")
    parser.add_argument("--root", type=Path, help="cache folder")
    parser.add_argument("--rebuild", action="store_true", help="throw away what is there")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object name -> interpreter")
    options = parser.parse_args(argv)
    known = specs()
    if options.list:
        for name, spec in known.items():
            print(f"{name:12} {find(name, options.root, spec=spec) or 'not built'}")
        return 0
    unknown = [name for name in options.names if name not in known]
    if unknown or not options.names:
        parser.error(f"which environment? {', '.join(unknown) or 'none'} given, there are {', '.join(known)}")
    built: dict[str, str] = {}
    for name in options.names:
        try:
            python = build(
                known[name], options.root, rebuild=options.rebuild, report=lambda s: print(s, file=sys.stderr)
            )
        except GyreError as error:
            print(error, file=sys.stderr)
            return 1
        built[name] = str(python)
    print(json.dumps(built) if options.json else "\n".join(built.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
