"""`gyre plugins`: what is installed, in which version, and why something is unusable.

Invariant: listing imports the light modules named in entry points and nothing behind them.
"""

from __future__ import annotations

import dataclasses

from gyre_core.errors import ConfigError
from gyre_core.plugins import Component, PluginManager
from gyre_core.registration import Kind

from gyre_rl.cli.console import Console


def kind_of(text: str) -> Kind:
    """The kind named `text`; ConfigError naming all kinds otherwise."""
    if text not in set(Kind):
        raise ConfigError("looking for plugins", got=f"the kind {text!r}", expected=f"one of {', '.join(Kind)}")
    return Kind(text)


def list_plugins(console: Console, kind: str = "", manager: PluginManager | None = None) -> None:
    """Print every component (of one kind, when it is named) and every plugin that could not be loaded."""
    manager = manager or PluginManager.installed()
    components = manager.components(kind_of(kind) if kind else None)
    broken = [{"name": b.name, "distribution": b.distribution, "reason": b.reason} for b in manager.broken]
    rows = [as_row(component) for component in components]
    console.result({"components": rows, "broken": broken}, as_text(rows, broken))


def show_options(console: Console, kind: str, name: str, manager: PluginManager | None = None) -> None:
    """Print what a component's section of a run's file may say."""
    from gyre_rl.config.reference import describe_options, entries

    manager = manager or PluginManager.installed()
    options = manager.options_type(kind_of(kind), name)
    if options is None:
        console.result({"options": []}, f"The {kind} {name!r} takes no options.")
        return
    rows = [dataclasses.asdict(entry) for entry in entries(options)]
    console.result({"options": rows}, describe_options(options))


def as_row(component: Component) -> dict[str, object]:
    """A component as plain data."""
    registration = component.registration
    return {
        "kind": str(registration.kind),
        "name": registration.name,
        "distribution": component.distribution,
        "version": component.version,
        "usable": not component.missing,
        "missing": list(component.missing),
        "summary": registration.summary,
    }


def as_text(rows: list[dict[str, object]], broken: list[dict[str, str]]) -> str:
    """A table for a person."""
    if not rows and not broken:
        return "No plugin is installed. `pip install gyre-local gyre-harnesses gyre-scorers gyre-tasks` brings a set."
    cells = [
        (
            str(row["kind"]),
            str(row["name"]),
            f"{row['distribution']} {row['version']}",
            str(row["summary"]) if row["usable"] else f"unusable: install {', '.join(_names(row['missing']))}",
        )
        for row in rows
    ]
    widths = [max((len(line[i]) for line in cells), default=0) for i in range(3)]
    lines = [
        "  ".join([*(part.ljust(width) for part, width in zip(line, widths, strict=False)), line[3]]) for line in cells
    ]
    lines += [f"broken: {b['name']} of {b['distribution']}: {b['reason']}" for b in broken]
    return "\n".join(line.rstrip() for line in lines)


def _names(missing: object) -> list[str]:
    return [str(name) for name in missing] if isinstance(missing, list) else []
