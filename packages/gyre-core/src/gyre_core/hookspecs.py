"""The hooks of Gyre: discovery and life-cycle events only; hot paths call the typed protocols instead.

A plugin implements `gyre_register` in the module named by its entry point in the group "gyre":

    from gyre_core import Kind, Registration, hookimpl

    @hookimpl
    def gyre_register():
        yield Registration(Kind.ENGINE, "mine", "my_plugin.engine:MyEngine", options="my_plugin.options:Options")
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from gyre_core.registration import Registration
from gyre_core.runtime import RunEvent

PROJECT = "gyre"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """What a plugin module may implement."""

    @hookspec
    def gyre_register(self) -> Iterable[Registration]:  # type: ignore[empty-body]
        """Name the components this plugin brings. Called once; must not import anything heavy."""

    @hookspec
    def gyre_run_started(self, run_dir: str) -> None:
        """A run has its folder and its resolved configuration; nothing has been started yet."""

    @hookspec
    def gyre_event(self, event: RunEvent) -> None:
        """Something happened in the run. Must return at once; errors are logged and do not stop the run."""

    @hookspec
    def gyre_run_ended(self, run_dir: str, ok: bool) -> None:
        """The run has ended and every process of it is gone."""
