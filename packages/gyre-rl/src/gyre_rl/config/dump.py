"""Writing a configuration as TOML that reads back to an equal one.

Invariant: `loads(dumps(config)) == config`; every key is written, defaults too, so that a run's record does not
change its meaning when a default does. Writes the values that TOML has; None is left out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from gyre_rl.config.schema import PluginChoice, RunConfig

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(config: RunConfig) -> str:
    """The configuration as TOML text, every section and every default in it."""
    return "\n".join(_table(to_table(config), ())).lstrip("\n") + "\n"


def to_table(value: Any) -> Any:
    """Dataclasses as tables, tuples as lists, enums as their values; fields that are None are left out."""
    if isinstance(value, PluginChoice):
        return {"name": value.name, **(to_table(value.options) if value.options is not None else {})}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        return {name: to_table(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {str(key): to_table(item) for key, item in value.items() if item is not None}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Sequence | frozenset | set) and not isinstance(value, str):
        return [to_table(item) for item in value]
    return value


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not _is_section(value)]
    for key, value in table.items():
        if not _is_section(value):
            continue
        name = ".".join(_key(part) for part in (*path, key))
        for item in value if isinstance(value, list) else [value]:
            lines += ["", f"[[{name}]]" if isinstance(value, list) else f"[{name}]", *_table(item, (*path, key))]
    return lines


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)
    )


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case float():
            return str(value) if math.isfinite(value) else {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        case list():
            return f"[{', '.join(_value(item) for item in value)}]"
        case dict():
            return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
        case int():
            return str(value)
    raise TypeError(f"writing a configuration: {value!r} is a {type(value).__name__}, which TOML does not have")
