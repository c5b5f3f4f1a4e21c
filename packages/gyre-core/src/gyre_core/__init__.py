"""The words of Gyre in code: cells, roles, protocols, hooks and errors.

Everything here is plain data and typed protocols; the package imports pluggy and the standard library only.
The conformance suites for plugin authors are in `gyre_core.testing` (extra "testing").
"""

from gyre_core.agents import (
    ExecRequest,
    ExecResult,
    ExecutionJob,
    Harness,
    HarnessEvents,
    ModelEndpoint,
    Sandbox,
    Scorer,
    ScoringJob,
    Workspace,
)
from gyre_core.arrays import Array
from gyre_core.engine import (
    Engine,
    EngineCapability,
    EngineLoad,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    WeightSource,
)
from gyre_core.errors import (
    CapabilityError,
    CellLostError,
    ConfigError,
    ContextLengthError,
    GyreError,
    InfrastructureError,
    PluginError,
)
from gyre_core.execution import (
    ExecutionEnd,
    ExecutionStatus,
    Limits,
    Milestone,
    Purpose,
    Score,
    ScorerSpec,
    Task,
    TaskSet,
)
from gyre_core.facts import ModelFacts
from gyre_core.hookspecs import HookSpecs, hookimpl, hookspec
from gyre_core.ids import CellId, parse_cell_id
from gyre_core.kv import ExportedKV, ImportedKV, KVHandover, KVHolder, KVShape, MemoryRegion, PinnedKV
from gyre_core.plugins import BrokenPlugin, Component, PluginManager, load_symbol
from gyre_core.registration import ComponentContext, Kind, Registration
from gyre_core.roles import TRANSITIONS, CellState, Role, TransitionError, check_transition, role_of
from gyre_core.runtime import EventSink, Launcher, ProcessHandle, ProcessSpec, RunEvent
from gyre_core.trainer import (
    BatchStats,
    Contribution,
    MicroBatch,
    StepResult,
    Trainer,
    TrainerCapability,
)

__all__ = [
    "TRANSITIONS",
    "Array",
    "BatchStats",
    "BrokenPlugin",
    "CapabilityError",
    "CellId",
    "CellLostError",
    "CellState",
    "Component",
    "ComponentContext",
    "ConfigError",
    "ContextLengthError",
    "Contribution",
    "Engine",
    "EngineCapability",
    "EngineLoad",
    "EventSink",
    "ExecRequest",
    "ExecResult",
    "ExecutionEnd",
    "ExecutionJob",
    "ExecutionStatus",
    "ExportedKV",
    "FinishReason",
    "GenerateChunk",
    "GenerateRequest",
    "GyreError",
    "Harness",
    "HarnessEvents",
    "HookSpecs",
    "ImportedKV",
    "InfrastructureError",
    "KVHandover",
    "KVHolder",
    "KVShape",
    "Kind",
    "Launcher",
    "Limits",
    "MemoryRegion",
    "MicroBatch",
    "Milestone",
    "ModelEndpoint",
    "ModelFacts",
    "PauseMode",
    "PinnedKV",
    "PluginError",
    "PluginManager",
    "ProcessHandle",
    "ProcessSpec",
    "Purpose",
    "Registration",
    "Role",
    "RunEvent",
    "SamplingParams",
    "Sandbox",
    "Score",
    "Scorer",
    "ScorerSpec",
    "ScoringJob",
    "StepResult",
    "Task",
    "TaskSet",
    "Trainer",
    "TrainerCapability",
    "TransitionError",
    "WeightSource",
    "Workspace",
    "check_transition",
    "hookimpl",
    "hookspec",
    "load_symbol",
    "parse_cell_id",
    "role_of",
]
