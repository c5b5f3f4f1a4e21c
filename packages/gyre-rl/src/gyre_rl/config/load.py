"""Reading a run's configuration: file, `extends`, `--set`, plugins' sections, checks across sections.

Invariant: `load` returns a configuration that is right as a whole, or raises one error that lists every problem with
its place. It reads files and nothing else; whether this machine can carry the run out is `gyre_rl.cli.preflight`.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_core.errors import ConfigError
from gyre_core.plugins import PluginManager
from gyre_core.registration import Kind

from gyre_rl.config.checks import cross_checks, transport_check
from gyre_rl.config.convert import Converter, plugin_fields
from gyre_rl.config.locate import key_lines
from gyre_rl.config.objectives import with_objective
from gyre_rl.config.problems import Problem, RunConfigError
from gyre_rl.config.schema import PluginChoice, RunConfig

FILE_NAME = "gyre.toml"


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of keys: a file or a `--set`. `places` gives the place of a dotted key."""

    table: Mapping[str, Any]
    places: Mapping[str, str] = field(default_factory=dict)


def find_file(path: Path) -> Path:
    """`path` itself, or its gyre.toml when it is a folder; ConfigError when there is none."""
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"looking for the configuration {path}",
            got="a folder without it" if path.is_dir() else "no such file",
            expected=f"a TOML file, or a folder with a {FILE_NAME}",
            fix="Give the path of the run's file; `gyre run examples/quickstart` is one that works.",
        )
    return file


def load(path: Path, sets: Sequence[str] = (), plugins: PluginManager | None = None) -> RunConfig:
    """The run that the file (or folder) at `path` describes, with `sets` ("a.b=c") laid over it.

    Raises RunConfigError with all problems, or ConfigError when a file cannot be read at all.
    """
    file = find_file(path)
    layers = [*file_layers(file), *(set_layer(text) for text in sets)]
    return from_layers(layers, str(path), plugins or PluginManager.installed(), base_dir=str(file.parent.absolute()))


def loads(text: str, base_dir: str = ".", plugins: PluginManager | None = None) -> RunConfig:
    """The run that a TOML text describes; `base_dir` is the folder that its relative paths mean."""
    layer = text_layer(text, "text")
    return from_layers([layer], "text", plugins or PluginManager.installed(), base_dir=base_dir)


def file_layers(file: Path) -> list[Layer]:
    """The layers of a file: what it extends first, itself last."""
    layers: list[Layer] = []
    seen: list[Path] = []
    current: Path | None = file
    while current is not None:
        if current.resolve() in seen:
            chain = " -> ".join(p.name for p in [*seen, current])
            raise ConfigError(f"reading the configuration {file}", got=f"extends that go in a circle: {chain}")
        seen.append(current.resolve())
        layer = text_layer(_read(current, file), current.name)
        base = layer.table.get("extends")
        if base is not None and not isinstance(base, str):
            raise ConfigError(f"reading {current}", got=f"extends = {base!r}", expected="the path of a TOML file")
        table = {key: value for key, value in layer.table.items() if key != "extends"}
        layers.insert(0, Layer(table, layer.places))
        current = None if base is None else current.parent / base
    return layers


def text_layer(text: str, label: str) -> Layer:
    """The layer of a TOML text, its places being lines of `label`; ConfigError when it is not TOML."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"reading {label}",
            got=f"text that is not TOML: {error}",
            fix="Text needs quotes; a section starts with [its name]; each key stands once.",
        ) from error
    return Layer(table, {key: f"{label}:{line}" for key, line in key_lines(text).items()})


def set_layer(text: str) -> Layer:
    """The layer of one `--set a.b=c`: c is a TOML value, or plain text when it is none."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(
            f"reading --set {text}",
            got="no key and value",
            expected="key=value, such as --set rollout.group_size=4",
        )
    for candidate in (f"{key} = {value}", f"{key} = {json.dumps(value)}"):
        try:
            table = tomllib.loads(candidate)
        except tomllib.TOMLDecodeError:
            continue
        return Layer(table, dict.fromkeys(key_lines(candidate), f"--set {text}"))
    raise ConfigError(f"reading --set {text}", got=f"{key!r} as the key", expected="a dotted key such as rollout.top_p")


def from_layers(layers: Sequence[Layer], source: str, plugins: PluginManager, *, base_dir: str) -> RunConfig:
    """Merge, convert and check; RunConfigError with every problem."""
    table: dict[str, Any] = {"base_dir": base_dir}
    places: dict[str, str] = {}
    for layer in layers:
        table = merge(table, layer.table)
        places.update(layer.places)
    table["base_dir"] = str(Path(base_dir, table["base_dir"])) if isinstance(table["base_dir"], str) else base_dir
    converter = Converter(plugins.options_type, lambda path: _place(places, path), _sections())
    config = converter.build(RunConfig, table)
    problems = list(converter.problems)
    if isinstance(config, RunConfig):
        config = with_objective(config, plugins)
        brought = [c.registration.name for c in plugins.components(Kind.TRANSPORT) if not c.missing]
        found = [*cross_checks(config), *transport_check(config, brought)]
        problems += [dataclasses.replace(p, where=_place(places, p.path)) for p in found]
    if problems:
        raise RunConfigError(source, sorted(problems, key=_order))
    return typing.cast("RunConfig", config)


def merge(base: Mapping[str, Any], over: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """`over` laid over `base`, table by table. A section that names another plugin takes nothing from the old one."""
    result = dict(base)
    for key, value in over.items():
        old, here = result.get(key), f"{path}{key}"
        if here in _PLUGIN_DEFAULTS:
            old = {"name": old} if isinstance(old, str) else old
            value = {"name": value} if isinstance(value, str) else value
            if isinstance(value, Mapping) and isinstance(old, Mapping) and "name" in value:
                default = _PLUGIN_DEFAULTS[here]
                old = old if value["name"] == old.get("name", default) else None
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merge(typing.cast("Mapping[str, Any]", old), value, f"{here}.") if both else value
    return result


def _plugin_defaults() -> dict[str, str | None]:
    return {
        path: field.default.name if isinstance(field.default, PluginChoice) else None
        for path, _, field, many in plugin_fields(RunConfig)
        if not many
    }


_PLUGIN_DEFAULTS = _plugin_defaults()


def _sections() -> dict[str, str]:
    """Each key that has one home -> its section ("" for the top)."""
    homes: dict[str, list[str]] = {}
    hints = typing.get_type_hints(RunConfig)
    for each in dataclasses.fields(RunConfig):
        homes.setdefault(each.name, []).append("")
        section = hints[each.name]
        if dataclasses.is_dataclass(section) and section is not PluginChoice:
            for inner in dataclasses.fields(section):
                homes.setdefault(inner.name, []).append(each.name)
    return {key: places[0] for key, places in homes.items() if len(places) == 1}


def _place(places: Mapping[str, str], path: str) -> str:
    while path:
        if path in places:
            return places[path]
        path = path.rpartition(".")[0]
    return ""


def _order(problem: Problem) -> tuple[str, int]:
    name, _, line = problem.where.rpartition(":")
    return (name, int(line)) if line.isdigit() else (problem.where or "~", 0)


def _read(path: Path, asked: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        doing = f"reading the configuration {asked}"
        got = f"{path}: {error.strerror if isinstance(error, OSError) else error}"
        raise ConfigError(doing, got=got, expected="a readable UTF-8 file") from error
