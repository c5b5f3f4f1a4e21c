"""Writing a configuration as TOML that reads back to an equal one.

Invariant: `loads(dumps(config)) == config`; every key is written, defaults too, so that a run's record does not
change its meaning when a default does. Writes the values that TOML has; None is left out. What is for others to see, or
lies on a disk, has keys and passwords masked; reading it back gives the mask (`masked_keys`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from gyre_rl.config.schema import PluginChoice, RunConfig

_BARE = re.compile(r"[A-Za-z0-9_-]+")


MASK = "********"
_SECRET = re.compile(r"(.*_)?(api_key|token|password|secret)", re.IGNORECASE)
"""Names of keys whose texts are secrets."""


def dumps(config: RunConfig, *, masked: bool = False) -> str:
    """The configuration as TOML text, every section and every default in it; without its secrets when `masked`."""
    table = to_table(config)
    return "\n".join(_table(_masked(table) if masked else table, ())).lstrip("\n") + "\n"


def masked_keys(config: RunConfig) -> list[str]:
    """Dotted paths of the keys that hold a mask in place of their secret."""
    return [path for path, value in _texts(to_table(config), "") if value == MASK]


def _masked(table: Any) -> Any:
    if isinstance(table, list):
        return [_masked(item) for item in table]
    if not isinstance(table, dict):
        return table
    hidden = {key for key, value in table.items() if isinstance(value, str) and value and _SECRET.fullmatch(key)}
    return {key: MASK if key in hidden else _masked(value) for key, value in table.items()}


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield from _texts(item, f"{path}.{key}".lstrip("."))


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
