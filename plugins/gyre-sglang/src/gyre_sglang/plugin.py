"""Entry point of the plugin: names its components; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from gyre_core import Registration, hookimpl


@hookimpl
def gyre_register() -> Iterable[Registration]:
    """What this plugin brings."""
    return []
