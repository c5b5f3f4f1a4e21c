"""The giving side of a move as a machine without I/O: events in, actions out.

States: `new → pinning → pinned ⇄ pinning → freezing → frozen → given → moved`, and `aborted` from anywhere before
`given`.

Invariant (the ownership law): the session's owner is decided here and nowhere else. Until `given` the source owns the
session and may take it back alone, when the lease runs out; at `given` it never decodes the session again, unless it
is told that the destination is dead for certain (`Fenced`). The destination decodes only after it has seen
`Released`, which is sent only in `given` and later. So at no time do both decode.

Every request may come twice, late or never. The machine keeps no clock: events bring the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gyre_kvxfer.engine import Pinned
from gyre_kvxfer.messages import Abort, Commit, Done, Extend, Freeze, Message, Open, Refused, Released, Renew, Renewed

# -- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message came."""

    message: Message
    now: float


@dataclass(frozen=True, slots=True)
class PinDone:
    """`DoPin` ended: this is pinned, `token_digest` covers its tokens, `nbytes` is its size."""

    pinned: Pinned
    token_digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class FreezeDone:
    """`DoFreeze` ended: decoding has stopped."""

    pinned: Pinned
    token_digest: str


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """An action ended badly; `code` as in `MoveRefused`."""

    action: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""

    now: float


@dataclass(frozen=True, slots=True)
class Fenced:
    """The other side is dead for certain and will not come back under its name."""


Event: TypeAlias = Received | PinDone | FreezeDone | ActionFailed | Tick | Fenced

# -- actions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the other side."""

    message: Message


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Send the offer for what is pinned, as answer to `seq`, counted from token `have`."""

    seq: int
    have: int
    pinned: Pinned
    token_digest: str
    frozen: bool
    first: bool


@dataclass(frozen=True, slots=True)
class DoPin:
    """Pin the session; answer with `PinDone` or `ActionFailed("pin")`."""


@dataclass(frozen=True, slots=True)
class DoFreeze:
    """Freeze the session; answer with `FreezeDone` or `ActionFailed("freeze")`."""


@dataclass(frozen=True, slots=True)
class DoUnfreeze:
    """Let the session decode here again."""


@dataclass(frozen=True, slots=True)
class DoRelease:
    """Drop the pin of this generation; `forget`: the session has left, nothing of it is needed here any more."""

    generation: int
    forget: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """The move is over here: `moved`, `aborted` or `reclaimed`."""

    outcome: str
    code: str


Action: TypeAlias = Send | SendOffer | DoPin | DoFreeze | DoUnfreeze | DoRelease | Closed

LIVE = frozenset({"pinning", "pinned", "freezing", "frozen"})
"""States in which the source owns the session and its pins stand."""


class SourceMachine:
    """One move at the source. `handle` is the only way in."""

    __slots__ = (
        *("_answered", "_digest", "_freeze_below", "_have", "_opened", "_pinned", "_seq", "_wanted"),
        *("code", "deadline", "lease_s", "move", "state"),
    )

    def __init__(self, move: str, lease_s: float) -> None:
        self.move = move
        self.lease_s = lease_s
        self.state = "new"
        self.code = ""
        self.deadline = float("inf")
        self._seq = 0
        self._have = 0
        self._freeze_below = 0
        self._wanted = -1
        self._pinned: tuple[Pinned, ...] = ()
        self._digest = ""
        self._answered: Send | SendOffer | None = None
        self._opened = False

    @property
    def may_decode(self) -> bool:
        """Whether this side may decode the session now."""
        return self.state in ("new", "pinning", "pinned", "aborted")

    @property
    def owns(self) -> bool:
        """Whether this side owns the session (frozen or not)."""
        return self.state not in ("given", "moved")

    @property
    def readable(self) -> bool:
        """Whether pinned blocks may be read now."""
        return self.state in LIVE

    def handle(self, event: Event) -> list[Action]:
        """The actions that follow from an event."""
        match event:
            case Received(message, now):
                return self._received(message, now)
            case PinDone(pinned, digest, nbytes):
                return self._pin_done(pinned, digest, nbytes)
            case FreezeDone(pinned, digest):
                return self._freeze_done(pinned, digest)
            case ActionFailed(action, code, reason):
                return self._failed(action, code, reason)
            case Tick(now):
                return self._expire() if now >= self.deadline else []
            case Fenced():
                return self._fenced()

    # -- messages ------------------------------------------------------------------------------------------------
    def _received(self, m: Message, now: float) -> list[Action]:
        if isinstance(m, Commit):
            return self._commit(m, now)
        if isinstance(m, Done):
            return self._done()
        if isinstance(m, Abort):
            return self._abort("aborted") if self.owns else []
        if self.state == "aborted":
            return [Send(Refused(self.move, m.seq, self.code, "the source has ended this move"))]
        if m.seq < self._seq or not self.owns:
            return []
        if m.seq == self._seq:
            return [self._answered] if self._answered is not None else []
        return self._request(m, now)

    def _request(self, m: Message, now: float) -> list[Action]:
        """A request not seen before. The other side sends the next one only after the answer to the last."""
        self._seq, self._answered = m.seq, None
        self.deadline = now + self.lease_s
        match (m, self.state):
            case (Open(freeze_below=limit, version=wanted), "new"):
                self._freeze_below, self._wanted = limit, wanted
                self.state = "pinning"
                return [DoPin()]
            case (Extend(have=have), "pinned"):
                self._have = have
                self.state = "pinning"
                return [DoPin()]
            case (Freeze(have=have), "pinned"):
                self._have = have
                self.state = "freezing"
                return [DoFreeze()]
            case (Renew(), "pinned" | "frozen"):
                reply = Send(Renewed(self.move, m.seq, int(self.lease_s * 1000)))
                self._answered = reply
                return [reply]
        return [
            *self._abort("order"),
            Send(Refused(self.move, m.seq, "order", f"{type(m).__name__} came out of order")),
        ]

    def _commit(self, m: Commit, now: float) -> list[Action]:
        if self.state in ("given", "moved"):
            return [Send(Released(self.move, m.seq))]
        if self.state == "aborted":
            return [Send(Refused(self.move, m.seq, self.code, "the source has taken the session back"))]
        if self.state != "frozen" or m.seq < self._seq:
            return []
        if m.generation != self._pinned[-1].generation or m.token_digest != self._digest:
            return [*self._abort("tokens"), Send(Refused(self.move, m.seq, "tokens", "not what was offered"))]
        self._seq = m.seq
        self.deadline = now + self.lease_s
        self.state = "given"
        return [Send(Released(self.move, m.seq))]

    def _done(self) -> list[Action]:
        if self.state != "given":
            return []
        return self._let_go()

    # -- engine's answers ----------------------------------------------------------------------------------------
    def _pin_done(self, pinned: Pinned, digest: str, nbytes: int) -> list[Action]:
        if self.state == "aborted":
            return [DoRelease(pinned.generation)]
        dropped = self._hold(pinned)
        self._digest = digest
        if self._wanted not in (-1, pinned.version):
            reason = f"the source holds KV of version {pinned.version}, not {self._wanted}"
            return [*dropped, *self._abort("version"), Send(Refused(self.move, self._seq, "version", reason))]
        if nbytes <= self._freeze_below and not self._opened:
            self.state = "freezing"
            return [*dropped, DoFreeze()]
        self.state = "pinned"
        return [*dropped, self._offer(frozen=False)]

    def _freeze_done(self, pinned: Pinned, digest: str) -> list[Action]:
        if self.state == "aborted":
            return [DoRelease(pinned.generation), DoUnfreeze()]
        dropped = self._hold(pinned)
        self._digest = digest
        self.state = "frozen"
        return [*dropped, self._offer(frozen=True)]

    def _hold(self, pinned: Pinned) -> list[Action]:
        """Keep the new pin and drop the older ones: the new one covers their blocks."""
        old = {p.generation for p in self._pinned} - {pinned.generation}
        self._pinned = (pinned,)
        return [DoRelease(g) for g in sorted(old)]

    def _failed(self, action: str, code: str, reason: str) -> list[Action]:
        if action not in ("pin", "freeze") or not self.readable:
            return []
        out = self._abort(code, frozen=action == "freeze")
        return [*out, Send(Refused(self.move, self._seq, code, reason))]

    # -- ends ----------------------------------------------------------------------------------------------------
    def _abort(self, code: str, frozen: bool = False) -> list[Action]:
        """End the move; the session stays here. An action in flight is undone when it reports."""
        if self.state == "aborted":
            return []
        out: list[Action] = [DoRelease(p.generation) for p in self._pinned]
        if self.state == "frozen" or frozen:
            out.append(DoUnfreeze())
        self._finish("aborted", code)
        return [*out, Closed("aborted", code)]

    def _expire(self) -> list[Action]:
        if self.state in LIVE:
            return self._abort("lease")
        return self._let_go() if self.state == "given" else []

    def _let_go(self) -> list[Action]:
        out: list[Action] = [DoRelease(p.generation, forget=True) for p in self._pinned]
        self._finish("moved", "")
        return [*out, Closed("moved", "")]

    def _fenced(self) -> list[Action]:
        if self.state != "given":
            return self._abort("fenced") if self.owns else []
        out: list[Action] = [DoRelease(p.generation) for p in self._pinned]
        self._finish("aborted", "fenced")
        return [*out, DoUnfreeze(), Closed("reclaimed", "fenced")]

    def _finish(self, state: str, code: str) -> None:
        self.state, self.code, self.deadline, self._pinned = state, code, float("inf"), ()

    # -- replies -------------------------------------------------------------------------------------------------
    def _offer(self, frozen: bool) -> SendOffer:
        offer = SendOffer(self._seq, self._have, self._pinned[-1], self._digest, frozen, not self._opened)
        self._opened, self._answered = True, offer
        return offer
