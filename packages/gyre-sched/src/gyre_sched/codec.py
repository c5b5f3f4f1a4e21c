"""Events and commands as JSON objects and back, exactly.

One object per record: ``{"kind": "CellLost", "time": 1.5, "cell": ["a", 0], "reason": "..."}``. The types of the fields
are taken from the record classes themselves, so a new event needs no code here. Unknown kinds, missing and surplus
fields are errors that say so.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

from . import events
from .errors import LogError

__all__ = ["decode", "encode"]

KINDS: dict[str, type] = {kind.__name__: kind for kind in events.ALL_EVENTS}


def encode(record: Any) -> dict[str, Any]:
    """A JSON-able object for an event or a command."""
    out: dict[str, Any] = {"kind": type(record).__name__}
    for name in _names(type(record)):
        out[name] = _plain(getattr(record, name))
    return out


def decode(data: dict[str, Any]) -> events.Event:
    """The event that ``encode`` was given."""
    name = data.get("kind")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise LogError(f"cannot read an event of kind {name!r}; expected one of: {', '.join(sorted(KINDS))}")
    readers = _readers(kind)
    surplus = set(data) - set(readers) - {"kind"}
    if surplus:
        raise LogError(f"cannot read a {name}: it has no field {sorted(surplus)}; its fields: {list(readers)}")
    try:
        values = {field: readers[field](data[field]) for field in readers if field in data}
        return typing.cast(events.Event, kind(**values))
    except (TypeError, ValueError, KeyError) as err:
        raise LogError(f"cannot read a {name} from {data}: {err}") from err


def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


_names = typing.cast(Callable[[Any], tuple[str, ...]], cache(_field_names))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    if dataclasses.is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in _names(type(value))}
    return value


def _field_readers(kind: Any) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(kind)
    return {name: _reader(hints[name]) for name in _names(kind)}


_readers = typing.cast(Callable[[Any], dict[str, Callable[[Any], Any]]], cache(_field_readers))


def _reader(hint: Any) -> Callable[[Any], Any]:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        inner = _reader(next(a for a in typing.get_args(hint) if a is not types.NoneType))
        return lambda v: None if v is None else inner(v)
    if origin is tuple:
        item = _reader(typing.get_args(hint)[0])
        return lambda v: tuple(item(x) for x in v)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return lambda v: hint(*v)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        inner_kind = hint
        return lambda v: inner_kind(**v)
    if hint is float:
        return float
    return lambda v: v
