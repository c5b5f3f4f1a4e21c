"""gyre-sched's own policies as components, found like those of any plugin.

Invariant: a policy holds no state; what it decides is gyre-sched's pure function of this name.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre_core import ComponentContext
from gyre_sched import Turn, colocate, cost_aware, static, watermark
from gyre_sched.view import View


class BuiltIn:
    """Made as components are made, from nothing."""

    def __init__(self, options: None, context: ComponentContext) -> None:
        del options, context


class Watermark(BuiltIn):
    """`gyre_sched.watermark`."""

    def __call__(self, view: View) -> Sequence[Turn]:
        """The turns to begin now."""
        return watermark(view)


class CostAware(BuiltIn):
    """`gyre_sched.cost_aware`."""

    def __call__(self, view: View) -> Sequence[Turn]:
        """The turns to begin now."""
        return cost_aware(view)


class Static(BuiltIn):
    """`gyre_sched.static`."""

    def __call__(self, view: View) -> Sequence[Turn]:
        """The turns to begin now."""
        return static(view)


class Colocate(BuiltIn):
    """`gyre_sched.colocate`."""

    def __call__(self, view: View) -> Sequence[Turn]:
        """The turns to begin now."""
        return colocate(view)
