"""`python -m gyre_tito`: check, tree, export, import, serve. A thin shell over the library.

Exit codes of `check`: 0 no law is broken, 1 some are, 2 the path could not be read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gyre_tito import check_files, show
from gyre_tito.chat_format import ChatFormat
from gyre_tito.findings import KINDS
from gyre_tito.foreign import FORMATS, ForeignFileError
from gyre_tito.schema import StoreError
from gyre_tito.store import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    asked = _parser().parse_args(arguments)
    try:
        return int(asked.run(asked))
    except (StoreError, ForeignFileError, ValueError, OSError, ImportError) as error:
        _say(str(error), to=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gyre_tito", description="Trajectory stores and rollout files.")
    commands = parser.add_subparsers(required=True, metavar="command")

    check = commands.add_parser("check", help="hold the laws of recording against a store or a rollout file")
    check.add_argument("path")
    check.add_argument("--format", choices=("gyre", *FORMATS), help="default: look at the file")
    check.add_argument("--json", action="store_true", help="one JSON object instead of text")
    check.add_argument("--notes", action="store_true", help="show notes as well as errors and warnings")
    check.set_defaults(run=_check)

    tree = commands.add_parser("tree", help="list executions, or show the tree of one")
    tree.add_argument("path")
    tree.add_argument("execution", nargs="?")
    tree.add_argument("--call", type=int, help="show the tokens of this call's path")
    tree.add_argument("--diff", type=int, help="with --call: where that call and this one part")
    tree.add_argument("--last", type=int, help="with --call: only the last so many tokens")
    tree.add_argument("--export", help="write the calls to this .parquet or .jsonl file instead of showing them")
    tree.add_argument("--json", action="store_true")
    tree.set_defaults(run=_tree)

    export = commands.add_parser("export", help="write a store as JSON lines or Parquet (by the file's ending)")
    export.add_argument("path")
    export.add_argument("target")
    export.add_argument("--step", type=int)
    export.add_argument("--group")
    export.add_argument("--execution")
    export.set_defaults(run=_export)

    bring = commands.add_parser("import", help="read another framework's rollout file into a store")
    bring.add_argument("path")
    bring.add_argument("store")
    bring.add_argument("--format", choices=tuple(FORMATS))
    bring.add_argument("--prefix", default="", help="goes before the names of the executions")
    bring.set_defaults(run=_import)

    proxy = commands.add_parser("serve", help="run the recording proxy in a process of its own")
    proxy.add_argument("--backend", required=True, help="package.module:factory of the engine's Backend")
    proxy.add_argument("--store", required=True)
    proxy.add_argument("--model-dir", required=True, help="folder with tokenizer.json")
    proxy.add_argument("--admin-token-file", required=True, help="file whose first line is the admin token")
    proxy.add_argument("--family")
    proxy.add_argument("--history", choices=("exact", "template"), default="exact")
    proxy.add_argument("--model", default="policy", help="the name that agents see")
    proxy.add_argument("--host", default="127.0.0.1")
    proxy.add_argument("--port", type=int, default=8600)
    proxy.add_argument("--workers", type=int, default=1)
    proxy.add_argument("--context-limit", type=int)
    proxy.add_argument("--durability", choices=("power", "process"), default="power")
    proxy.set_defaults(run=_serve)

    for command in (check, tree, export, bring):
        command.add_argument("--model", help="folder with tokenizer.json, to show and compare text")
        command.add_argument("--family", help="chat format of that model (default: its own template)")
    return parser


def _check(asked: argparse.Namespace) -> int:
    chat = _format(asked)
    report = check_files.check_path(asked.path, asked.format, None if chat is None else check_files.reader_of(chat))
    if asked.json:
        _say(json.dumps(report.as_json()))
        return 1 if report.errors else 0
    shown = [one for one in report.findings if asked.notes or one.severity != "note"]
    for one in shown:
        where = " ".join(
            part
            for part in (
                one.execution,
                one.place,
                f"call {one.call}" if one.call is not None else "",
                f"token {one.token}" if one.token is not None else "",
            )
            if part
        )
        kind = KINDS[one.code]
        _say(f"{one.severity}: {one.code} (law {kind.law}) at {where}: {one.message}")
        if one.tokens:
            _say(f"    tokens {' '.join(map(str, one.tokens))}")
        _say(f"    likely cause: {kind.cause}")
    _say(f"{report.path}: {report.rollouts} rollouts ({report.form}), {report.errors} errors, {len(shown)} findings")
    return 1 if report.errors else 0


def _tree(asked: argparse.Namespace) -> int:
    where = Path(asked.path)
    chat = _format(asked)
    decode = None if chat is None else chat.decode
    with Store.open(check_files.store_in(where) if where.is_dir() else where) as store:
        if asked.export is not None:
            return _write(store, asked, asked.export, execution=asked.execution, decode=decode)
        if asked.execution is None:
            infos = store.executions()
            if asked.json:
                from gyre_tito.admin import describe

                _say(json.dumps([describe(info) for info in infos]))
            else:
                _say("\n".join(show.list_lines(infos)))
            return 0
        tree = store.load_tree(asked.execution)
        if asked.json:
            _say(json.dumps(show.summary(tree)))
        elif asked.call is not None and asked.diff is not None:
            _say("\n".join(show.diff_lines(tree, asked.call, asked.diff, decode)))
        elif asked.call is not None:
            _say("\n".join(show.token_lines(tree, asked.call, decode, asked.last)))
        else:
            _say("\n".join(show.tree_lines(tree, store.calls(asked.execution), decode)))
    return 0


def _export(asked: argparse.Namespace) -> int:
    where = Path(asked.path)
    chat = _format(asked)
    decode = None if chat is None else chat.decode
    chosen = {"step": asked.step, "group": asked.group, "execution": asked.execution, "decode": decode}
    with Store.open(check_files.store_in(where) if where.is_dir() else where) as store:
        return _write(store, asked, asked.target, **chosen)


def _write(store: Store, asked: argparse.Namespace, target: str, **chosen: Any) -> int:
    from gyre_tito.export import export

    if chosen.get("execution") is not None:
        store.execution(chosen["execution"])
    count = export(store, target, **chosen)
    told = json.dumps({"calls": count, "file": target})
    _say(told if getattr(asked, "json", False) else f"wrote {count} calls to {target}")
    return 0


def _import(asked: argparse.Namespace) -> int:
    from gyre_tito.importing import import_file

    async def run() -> int:
        with Store.open(asked.store, writable=True) as store:
            return await import_file(asked.path, store, form=asked.format, chat=_format(asked), prefix=asked.prefix)

    _say(f"imported {asyncio.run(run())} executions into {asked.store}")
    return 0


def _serve(asked: argparse.Namespace) -> int:
    from gyre_tito.serve import ServeOptions, serve

    values = {key: value for key, value in vars(asked).items() if key not in ("run", "admin_token_file")}
    token = Path(asked.admin_token_file).read_text("utf-8").splitlines()[0].strip()
    return serve(ServeOptions(admin_token=token, **values))


def _format(asked: argparse.Namespace) -> ChatFormat | None:
    if asked.model is None:
        return None
    from gyre_tito.families import load_format

    return load_format(asked.model, family=asked.family)


def _say(text: str, to: object = None) -> None:
    stream = sys.stdout if to is None else sys.stderr
    stream.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
