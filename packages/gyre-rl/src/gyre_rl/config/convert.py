"""From TOML tables to frozen dataclasses, with every problem reported and not only the first.

Invariant: a key is either taken by a field or reported; nothing is dropped in silence and nothing is converted by
guess ("3" is not 3). Leaf values are checked by msgspec against the field's annotation; the structure is walked here.
Not here: files, merging, and checks that need two sections.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from gyre_core.errors import PluginError
from gyre_core.registration import Kind

from gyre_rl.config.describe import describe
from gyre_rl.config.problems import Problem, nearest
from gyre_rl.config.schema import PluginChoice

OptionsType = Callable[[Kind, str], "type[Any] | None"]
"""The dataclass of a plugin's options, or None when it takes none; PluginError when it cannot be used."""


class _Invalid:
    """Stands for a value that was reported."""


INVALID = _Invalid()


@dataclasses.dataclass(slots=True)
class Converter:
    """Collects `problems` while it builds; `options_type` looks plugins up and `where` says where a key is written."""

    options_type: OptionsType
    where: Callable[[str], str] = lambda path: ""
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key -> the section it belongs to, for keys that stand in a wrong section."""
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def report(self, path: str, message: str) -> _Invalid:
        """Add a problem; returns the stand-in for the value."""
        self.problems.append(Problem(path, message, self.where(path)))
        return INVALID

    def build(self, cls: type[Any], table: Mapping[str, Any], path: str = "") -> Any:
        """An instance of the dataclass `cls` from `table`, or INVALID when anything in it was reported."""
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        for key in table:
            if key not in fields:
                self.unknown(key, fields, path)
        values: dict[str, Any] = {}
        for name, field in fields.items():
            here = f"{path}.{name}" if path else name
            kind = plugin_kind(hints[name])
            if kind is not None and (name in table or not _required(field)):
                values[name] = self._choices(kind, field, hints[name], table.get(name, _ABSENT), here)
            elif name in table:
                values[name] = self.value(hints[name], table[name], here)
            elif _required(field):
                values[name] = self.report(here, f"missing; expected {describe(hints[name])}")
        if any(value is INVALID for value in values.values()):
            return INVALID
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            return self.report(path, str(error))

    def value(self, annotation: Any, raw: Any, path: str) -> Any:
        """`raw` as the annotation wants it, or INVALID."""
        nested = _nested(annotation)
        if nested is not None and isinstance(raw, Mapping):
            return self.build(nested, raw, path)
        item = _item_dataclass(annotation)
        if item is not None and isinstance(raw, list) and all(isinstance(r, Mapping) for r in raw):
            built = [self.build(item, r, f"{path}.{i}") for i, r in enumerate(raw)]
            return INVALID if INVALID in built else tuple(built)
        if nested is not None and not isinstance(raw, Mapping):
            return self.report(path, f"got {show(raw)}, expected {describe(annotation)}")
        try:
            return msgspec.convert(raw, annotation, strict=True)
        except msgspec.ValidationError as error:
            inside = str(error).partition(" - at ")[2].strip("`$")
            place = f" (at {inside})" if inside else ""
            return self.report(path, f"got {show(raw)}{place}, expected {describe(annotation)}")

    def unknown(self, key: str, known: Mapping[str, Any], path: str) -> None:
        """Report a key that no field takes, with the nearest one that would."""
        here = f"{path}.{key}" if path else key
        near = nearest(key, known)
        section = self.elsewhere.get(key)
        if near:
            hint = f"did you mean {near!r}?"
        elif section is not None and section != path:
            hint = f"{key!r} belongs " + (f"in [{section}]" if section else "at the top, before any section")
        else:
            hint = f"expected one of {', '.join(sorted(known)) or 'no key at all'}"
        self.report(here, f"unknown key; {hint}")

    def _choices(self, kind: Kind, field: dataclasses.Field[Any], annotation: Any, raw: Any, path: str) -> Any:
        if not takes_many(annotation):
            default = None if _required(field) else field.default.name
            return self.choice(kind, {} if raw is _ABSENT else raw, path, default)
        items = [] if raw is _ABSENT else raw
        if not isinstance(items, list):
            return self.report(path, f"got {show(items)}, expected a list of {kind}s")
        built = [self.choice(kind, item, f"{path}.{i}", None) for i, item in enumerate(items)]
        return INVALID if INVALID in built else tuple(built)

    def choice(self, kind: Kind, raw: Any, path: str, default: str | None) -> PluginChoice | _Invalid:
        """A plugin's name and options from its section, or from its name alone."""
        table = {"name": raw} if isinstance(raw, str) else raw
        if not isinstance(table, Mapping):
            return self.report(path, f"got {show(raw)}, expected the {kind}'s name or its section")
        name = table.get("name", default)
        if not isinstance(name, str):
            got = "no name" if name is None else f"{show(name)} as its name"
            return self.report(f"{path}.name", f"got {got}, expected which {kind} to use")
        options = {key: value for key, value in table.items() if key != "name"}
        try:
            cls = self.options_type(kind, name)
        except PluginError as error:
            return self.report(f"{path}.name" if "name" in table else path, str(error))
        if cls is None:
            for key in options:
                self.report(f"{path}.{key}", f"unknown key; the {kind} {name!r} takes no options")
            return INVALID if options else PluginChoice(name)
        built = self.build(cls, options, path)
        return built if isinstance(built, _Invalid) else PluginChoice(name, built)


_ABSENT = object()


def plugin_kind(annotation: Any) -> Kind | None:
    """The kind of plugin that a field chooses, or None for any other field."""
    return next((m for m in getattr(annotation, "__metadata__", ()) if isinstance(m, Kind)), None)


def plugin_fields(cls: type[Any], path: str = "") -> Iterator[tuple[str, Kind, dataclasses.Field[Any], bool]]:
    """Every key below `cls` that chooses plugins: its dotted path, their kind, its field, whether it takes many."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint, here = hints[field.name], f"{path}{field.name}"
        if (kind := plugin_kind(hint)) is not None:
            yield here, kind, field, takes_many(hint)
        elif dataclasses.is_dataclass(hint):
            yield from plugin_fields(typing.cast("type[Any]", hint), f"{here}.")


def takes_many(annotation: Any) -> bool:
    """Whether a field that chooses plugins takes a list of them."""
    return typing.get_origin(_bare(annotation)) is tuple


def show(value: Any) -> str:
    """A value as TOML would write it, cut to a length fit for one line."""
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _bare(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _nested(annotation: Any) -> type[Any] | None:
    """The dataclass in `D`, `D | None` or an annotated form of them."""
    bare = _bare(annotation)
    options = typing.get_args(bare) if isinstance(bare, types.UnionType) else (bare,)
    return next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)


def _item_dataclass(annotation: Any) -> type[Any] | None:
    """The dataclass in `tuple[D, ...]`, `list[D]` or `Sequence[D]`."""
    bare = _bare(annotation)
    if typing.get_origin(bare) not in (tuple, list, Sequence):
        return None
    return _nested(typing.get_args(bare)[0])
