"""Elastic scheduler for RL on LLM agents: a pure state machine, a router, a simulator and a planner.

``Scheduler(config, policy).handle(event)`` returns the commands to carry out. ``gyre_sched.aio`` drives it on real
cells; ``gyre_sched.sim`` in virtual time. Needs nothing but the standard library. Names are loaded when first used, so
that importing the package costs a tool that only lists or registers it next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import CostPriors, SchedConfig
    from .driver import CellDriver, MoveRefused, MoveReport
    from .ids import CellId, CellState, EndStatus, Role, SessionPhase
    from .machine import Scheduler
    from .policies import POLICIES, Policy, Turn, colocate, cost_aware, static, watermark

__all__ = [
    "POLICIES",
    "CellDriver",
    "CellId",
    "CellState",
    "CostPriors",
    "EndStatus",
    "MoveRefused",
    "MoveReport",
    "Policy",
    "Role",
    "SchedConfig",
    "Scheduler",
    "SessionPhase",
    "Turn",
    "colocate",
    "cost_aware",
    "static",
    "watermark",
]

_HOMES = {
    "config": ("CostPriors", "SchedConfig"),
    "driver": ("CellDriver", "MoveRefused", "MoveReport"),
    "ids": ("CellId", "CellState", "EndStatus", "Role", "SessionPhase"),
    "machine": ("Scheduler",),
    "policies": ("POLICIES", "Policy", "Turn", "colocate", "cost_aware", "static", "watermark"),
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
