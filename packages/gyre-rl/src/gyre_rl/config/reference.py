"""The reference of the configuration, generated from the dataclasses that are the configuration.

    python -m gyre_rl.config.reference > docs/reference/config.md

Invariant: every field of every section is listed with its type, default and docstring, so that the page cannot fall
behind (a test compares them). `describe_options` does the same for the options of any plugin.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gyre_rl.config.convert import plugin_fields, plugin_kind
from gyre_rl.config.describe import describe
from gyre_rl.config.dump import _value, to_table
from gyre_rl.config.schema import PluginChoice, RunConfig

HEAD = """# Configuration

A run is one TOML file (`gyre run FILE`, or `gyre run DIR` for DIR/gyre.toml). This page is generated from the
dataclasses that the file is read into.

- Relative paths of inputs mean the folder of the file; the run directory is relative to the working directory.
- A section that chooses a plugin has the key `name`; every other key of it is an option of that plugin, listed by
  `gyre plugins KIND NAME`. The plugin's name alone is enough: `engine = "local"`.
- `extends = "base.toml"` lays the file over another one. `--set rollout.group_size=4` lays one key over the file; the
  value is TOML, and a plain word is text.
- Unknown keys, keys in a wrong section and wrong values are errors, reported together, each with its line.
- The resolved configuration, defaults written out, is kept as config.toml in the run directory. Texts of keys
  named `api_key`, `token`, `password` or `secret`, or ending in `_api_key` and so on, are masked there and wherever the
  configuration is shown; `gyre resume` then wants them again, by `--set`.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key."""

    name: str
    type: str
    default: str
    """As TOML; "" for a key that must be given, "absent" for one that may be left out."""
    text: str


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The string that follows each field in the class's source; empty where there is none."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast("ast.ClassDef", tree.body[0]).body
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[node.target.id] = " ".join(str(text).split())
    return found


def entries(cls: type[Any]) -> Iterator[Entry]:
    """The keys of a section, nested sections and plugin choices left out."""
    hints, docs = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
    for field in dataclasses.fields(cls):
        if field.init and not dataclasses.is_dataclass(hints[field.name]) and plugin_kind(hints[field.name]) is None:
            yield Entry(field.name, describe(hints[field.name]), _default(field), docs.get(field.name, ""))


def sections(cls: type[Any], path: str = "") -> Iterator[tuple[str, type[Any]]]:
    """(path, dataclass) of the sections below `cls`, in the order of the file."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint) and hint is not PluginChoice:
            here = f"{path}{name}"
            yield here, typing.cast("type[Any]", hint)
            yield from sections(typing.cast("type[Any]", hint), f"{here}.")


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD, "## Top of the file\n", _table(RunConfig)]
    for path, cls in sections(RunConfig):
        parts += [f"## [{path}]\n", f"{inspect.cleandoc(cls.__doc__ or '')}\n", _table(cls)]
    parts += ["## Sections that choose a plugin\n", _plugin_table()]
    return "\n".join(parts)


def describe_options(cls: type[Any]) -> str:
    """The options of a plugin as text for a terminal."""
    lines = []
    for entry in entries(cls):
        default = f"default {entry.default}" if entry.default else "must be given"
        lines.append(f"{entry.name}: {entry.type}; {default}")
        lines += textwrap.wrap(entry.text, 100, initial_indent="    ", subsequent_indent="    ")
    for path, nested in sections(cls):
        lines += [f"[{path}]", textwrap.indent(describe_options(nested), "  ")]
    return "\n".join(lines)


def _table(cls: type[Any]) -> str:
    rows = ["| key | value | default | |", "|---|---|---|---|"]
    for entry in entries(cls):
        default = f"`{entry.default}`" if entry.default not in ("", "absent") else entry.default or "required"
        rows.append(f"| `{entry.name}` | {entry.type} | {default} | {entry.text.replace('|', '/')} |")
    return "\n".join(rows) + "\n"


def _plugin_table() -> str:
    rows = ["| section | kind | default |", "|---|---|---|"]
    for path, kind, field, many in plugin_fields(RunConfig):
        if many:
            rows.append(f"| `[[{path}]]` | {kind}, any number | none |")
        else:
            default = f"`{field.default.name}`" if isinstance(field.default, PluginChoice) else "required"
            rows.append(f"| `[{path}]` | {kind} | {default} |")
    return "\n".join(rows) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value: Any = field.default_factory()
    elif field.default is dataclasses.MISSING:
        return ""
    else:
        value = field.default
    return "absent" if value is None else _value(to_table(value))


if __name__ == "__main__":
    sys.stdout.write(page())
