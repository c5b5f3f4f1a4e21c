"""What can go wrong between a trainer and whoever takes its weights.

Invariant: every message says what was being done, what came, what was expected and, where there is one, the way out.
All are `WeightsError`, so that a caller may treat "this version cannot be used" as one case. Not here: retries.
"""

from __future__ import annotations


class WeightsError(RuntimeError):
    """A version could not be published, opened or applied, or a gradient not handed over."""

    def __init__(self, doing: str, *, got: str, expected: str = "", fix: str = "") -> None:
        text = f"{doing}: got {got}" + (f", expected {expected}" if expected else "") + (f". {fix}" if fix else "")
        super().__init__(text)
        self.doing, self.got, self.expected, self.fix = doing, got, expected, fix


class IncompleteError(WeightsError):
    """A file or the whole version is missing, cut short or still being written."""


class CorruptError(WeightsError):
    """Bytes are there but are not the ones that were published."""


class VersionError(WeightsError):
    """Another version than the one asked for, or a delta against another base than the one held."""


class MismatchError(WeightsError):
    """Tensors are missing, too many, or of another shape or dtype than the target's."""


class PeerError(WeightsError):
    """The other side of a group or a handover is gone, silent for too long, or refused."""


class RefusedError(PeerError):
    """The other side has answered, and will not."""


class UnreachableError(PeerError):
    """There is no other side: no endpoint, or nobody listens at it."""


class NoRoomError(WeightsError):
    """A disk or memory file system has no room for a version, or cannot be written."""
