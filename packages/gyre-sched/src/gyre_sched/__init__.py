"""Elastic scheduler for RL on LLM agents: a pure state machine, a router, a simulator and a planner.

``Scheduler(config, policy).handle(event)`` returns the commands to carry out. ``gyre_sched.aio`` drives it on real
cells; ``gyre_sched.sim`` in virtual time. Needs nothing but the standard library.
"""

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
