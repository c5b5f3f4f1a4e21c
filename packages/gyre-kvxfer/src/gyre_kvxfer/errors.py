"""What can go wrong in a move, as types a caller can act on.

Invariant: every message says what was being done, what came, what was expected and what to do. None of these
errors means that a session is lost: except for `OwnershipUnknown` the source still owns it, and in every case the
session can be continued by prefilling its tokens again.
"""

from __future__ import annotations


def explain(doing: str, came: object, expected: object, do: str) -> str:
    """One sentence per question a reader has; used by every error of this package."""
    return f"{doing}: got {came}; expected {expected}. {do}"


class KVError(RuntimeError):
    """Base of all errors of this package."""


class LayoutRefused(KVError):  # noqa: N818 - a refusal is an answer, not a fault
    """The two layouts cannot be converted into one another, or a layout describes nothing possible."""


class MoveRefused(KVError):  # noqa: N818 - a refusal is an answer, not a fault
    """A side declined the move before ownership changed; `code` says why in one stable word.

    Codes: `unknown_session`, `no_room`, `version`, `layout`, `busy`, `lease`, `tokens`, `aborted`, `engine`, `stale`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class VerificationFailed(MoveRefused):
    """What was read is not what the manifest names (tokens, version, a block's digest, or non-finite values)."""

    def __init__(self, message: str) -> None:
        super().__init__("verification", message)


class TransportError(KVError):
    """Bytes could not be moved: the peer died, access was denied, a range was not offered."""


class ProtocolError(KVError):
    """A frame or message breaks the protocol; nothing of it was used."""


class AuthenticationError(ProtocolError):
    """The peer does not hold the shared key, or a frame was changed on its way."""


class OwnershipUnknown(KVError):  # noqa: N818 - names a state, and the name is the message
    """The source was told to give the session up and never answered.

    The destination does not own the session and must not decode it. Find out whether the source lives (then ask it
    again) or is dead for certain (then fence it), or continue the session by prefill under a new session name.
    """
