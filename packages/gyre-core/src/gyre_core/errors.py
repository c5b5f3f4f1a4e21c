"""Errors that say what was being done, what came, what was expected and what to do.

Invariant: the message of every `GyreError` has those four parts in that order, so that a log line alone is
enough to act on. Not here: which errors end an execution and how (that is `gyre_core.execution`).
"""

from __future__ import annotations


class GyreError(Exception):
    """Base of the errors Gyre raises on purpose.

    `doing` is the activity that failed, `got` what came, `expected` what would have been right and `fix`
    what the reader should do. All but `doing` may be left out when they would say nothing.
    """

    def __init__(self, doing: str, *, got: str = "", expected: str = "", fix: str = "") -> None:
        self.doing, self.got, self.expected, self.fix = doing, got, expected, fix
        super().__init__(doing, got, expected, fix)

    def __str__(self) -> str:
        parts = [self.doing]
        if self.got:
            parts.append(f"got {self.got}")
        if self.expected:
            parts.append(f"expected {self.expected}")
        text = ": ".join(parts[:2]) if len(parts) > 1 else parts[0]
        if len(parts) > 2:
            text += f"; {parts[2]}"
        return f"{text}. {self.fix}" if self.fix else text


class ConfigError(GyreError):
    """The configuration of a run or of a plugin cannot be used."""


class PluginError(GyreError):
    """A plugin is missing, cannot be imported or does not do what its kind requires."""


class CapabilityError(GyreError):
    """A component was asked for something it does not offer."""


class InfrastructureError(GyreError):
    """Ours failed, not the agent: sandbox, engine, network, disk. Never counts as a zero score."""


class CellLostError(InfrastructureError):
    """The cell that was asked is gone, or answers from another incarnation."""


class ContextLengthError(GyreError, ValueError):
    """A prompt does not fit the engine's context (or its whole KV pool): the agent's limit, not our fault.

    A ValueError, as every request is that can never run."""
