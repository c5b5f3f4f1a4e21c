"""`gyre plugins`: what is installed, in which version, and why something is unusable.

Invariant: listing imports the light modules named in entry points and nothing behind them.
"""

from __future__ import annotations

from gyre_core.plugins import Component, PluginManager

from gyre_rl.cli.console import Console


def list_plugins(console: Console, manager: PluginManager | None = None) -> None:
    """Print every component and every plugin that could not be loaded."""
    manager = manager or PluginManager.installed()
    components = manager.components()
    broken = [{"name": b.name, "distribution": b.distribution, "reason": b.reason} for b in manager.broken]
    rows = [as_row(component) for component in components]
    console.result({"components": rows, "broken": broken}, as_text(rows, broken))


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
