"""The taking side of a move as a machine without I/O: events in, actions out.

States: `new → opening → reserving → copying ⇄ extending → freezing → reserving → copying → entering → claiming →
owner`; `failed` from anywhere before `owner`, `unknown` from `claiming` when the source falls silent.

Invariant: this side never decodes unless in `owner`, reached only by the source's `Released` or, while claiming, by
the certain death of the source (`Fenced`). KV enters the prefix cache only if its copy ended inside the source's
lease, counted from before the last answered request was sent: bytes read later may be anything. Nothing is entered
under another version or for other tokens than the manifest's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gyre_kvxfer.engine import Int32
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.messages import (
    Abort,
    Commit,
    Done,
    Extend,
    Freeze,
    Message,
    Offer,
    Open,
    Refused,
    Released,
    Renew,
    Renewed,
)
from gyre_kvxfer.naming import TokenDigest
from gyre_kvxfer.source import ActionFailed, Fenced, Received, Send, Tick

# -- events of this side alone (the others are the source's) -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the move."""

    now: float


@dataclass(frozen=True, slots=True)
class Reserved:
    """`DoReserve` ended: int32 block table for the asked number of tokens."""

    block_ids: Int32
    now: float


@dataclass(frozen=True, slots=True)
class Copied:
    """`DoCopy` ended: every byte of its range lies here and, if it was final and asked for, the digests agree."""

    now: float


@dataclass(frozen=True, slots=True)
class Entered:
    """`DoEnter` ended: the KV is in this side's prefix cache."""

    now: float


Event: TypeAlias = Begin | Received | Reserved | Copied | Entered | ActionFailed | Tick | Fenced

# -- actions of this side alone ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DoReserve:
    """Reserve (or grow to) `n_tokens` tokens under `version`; answer `Reserved` or `ActionFailed("reserve")`."""

    n_tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class DoCopy:
    """Copy tokens [start, stop); `src_blocks`, `dst_blocks` int32 block tables from token 0 on.

    `final`: nothing more follows; check `digests` (uint64 a block, may be empty) over all blocks.
    """

    start: int
    stop: int
    src_blocks: Int32
    dst_blocks: Int32
    final: bool
    digests: np.ndarray[tuple[int], np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class DoEnter:
    """Enter the KV into the prefix cache; answer `Entered` or `ActionFailed("enter")`."""

    version: int
    token_ids: Int32
    block_ids: Int32


@dataclass(frozen=True, slots=True)
class DoCancel:
    """Give the reservation back."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The move ended: `owner`, `failed` or `unknown`."""

    outcome: str
    code: str
    reason: str


Action: TypeAlias = Send | DoReserve | DoCopy | DoEnter | DoCancel | Finished


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """Numbers that steer a move.

    `freeze_below` bytes: a session this small is frozen at once. `settle_below` bytes: when a pre-copy round moved no
    more than this, freeze. `max_rounds` pre-copy rounds at most. `reply_s`: wait this long before sending a request
    again (doubling); `give_up_s`: in all, for one request. `digest`: `""`, `"fast"` or `"strong"` block digests,
    compared by the destination. `finite`: refuse KV with NaN or infinity. `version`: KV of another policy
    version is refused before the source stops decoding (-1: only the sink decides, after).
    """

    freeze_below: int = 8 << 20
    settle_below: int = 8 << 20
    max_rounds: int = 6
    reply_s: float = 2.0
    give_up_s: float = 20.0
    digest: str = ""
    finite: bool = False
    version: int = -1


class DestinationMachine:
    """One move at the destination. `handle` is the only way in."""

    __slots__ = (
        *("_code", "_copied", "_destination", "_digest", "_dst", "_fingerprint", "_first_sent", "_lease_from"),
        *("_lease_s", "_offer", "_policy", "_reason", "_request", "_resend_at", "_round", "_rounds", "_sent_at"),
        *(
            "_seq",
            "_session",
            "_src",
            "_token_nbytes",
            "_tokens",
            "_wait",
            "_block_size",
            "_dst_block_size",
            "frozen_at",
            "move",
            "state",
        ),
    )

    def __init__(
        self,
        move: str,
        session: str,
        destination: str,
        layout: KVLayout,
        policy: MovePolicy,
    ) -> None:
        self.move = move
        self.state = "new"
        self.frozen_at = 0.0
        self._session, self._destination, self._fingerprint = session, destination, layout.fingerprint()
        self._token_nbytes, self._policy = layout.token_nbytes, policy
        self._digest: TokenDigest | None = None
        self._tokens = np.zeros(0, np.int32)
        self._src = np.zeros(0, np.int32)
        self._dst = np.zeros(0, np.int32)
        self._block_size = 0
        self._dst_block_size = layout.block_size
        self._copied = self._round = self._rounds = 0
        self._offer: Offer | None = None
        self._seq = 0
        self._request: Message | None = None
        self._first_sent = self._sent_at = self._lease_from = 0.0
        self._lease_s = 0.0
        self._resend_at, self._wait = float("inf"), 0.0
        self._code = self._reason = ""

    @property
    def may_decode(self) -> bool:
        """Whether this side may decode the session now."""
        return self.state == "owner"

    @property
    def tokens(self) -> Int32:
        """int32[n]: the tokens of the newest offer."""
        return self._tokens

    @property
    def rounds(self) -> int:
        """Copy rounds so far, the final one included."""
        return self._rounds

    def handle(self, event: Event) -> list[Action]:
        """The actions that follow from an event."""
        match event:
            case Begin(now):
                policy = self._policy
                limits = (policy.freeze_below, policy.digest, policy.version)
                opening = Open(self.move, 1, self._session, self._destination, *limits)
                self.frozen_at = now
                return self._ask("opening", opening, now)
            case Received(message, now):
                return self._received(message, now)
            case Reserved(block_ids, now):
                return self._reserved(block_ids) if self.state == "reserving" else []
            case Copied(now):
                return self._copy_done(now) if self.state == "copying" else []
            case Entered(now):
                return self._entered(now) if self.state == "entering" else []
            case ActionFailed(_, code, reason):
                return self._fail(code, reason) if self.state != "claiming" else []
            case Tick(now):
                return self._tick(now)
            case Fenced():
                return self._fenced()

    # -- messages ------------------------------------------------------------------------------------------------
    def _received(self, m: Message, now: float) -> list[Action]:
        if isinstance(m, Released):
            return self._own() if self.state in ("claiming", "unknown") else []
        if isinstance(m, Refused):
            if self.state == "unknown":
                self.state = "claiming"
            return self._fail(m.code, m.reason, tell=False)
        if self._request is None or m.seq != self._request.seq:
            return []
        if isinstance(m, Renewed):
            self._answered(m.lease_ms)
            return []
        if isinstance(m, Offer) and self.state in ("opening", "extending", "freezing"):
            return self._offered(m, now)
        return []

    def _answered(self, lease_ms: int) -> None:
        """The outstanding request is answered: the lease runs from when it was first sent."""
        self._lease_from, self._lease_s = self._first_sent, lease_ms / 1000
        self._request, self._resend_at = None, float("inf")

    def _offered(self, m: Offer, now: float) -> list[Action]:
        self._answered(m.lease_ms)
        if self.state == "opening" and not m.frozen:
            self.frozen_at = 0.0
        problem = self._take(m)
        if problem:
            return self._fail(*problem)
        self._offer = m
        if self._rounds and -(-m.n_tokens // self._dst_block_size) <= len(self._dst):
            return self._copy(m)  # the first time a reservation is made, also of no blocks: it is what is entered
        self.state = "reserving"
        return [DoReserve(m.n_tokens, m.version)]

    def _take(self, m: Offer) -> tuple[str, str] | None:
        """Join the offer's part to what is known; the first thing that does not fit, as (code, reason)."""
        known = len(self._tokens)
        if m.fingerprint != self._fingerprint:
            return (
                "layout",
                f"the source's KV is {m.fingerprint}, this side's {self._fingerprint}: other models or shapes",
            )
        if m.block_size <= 0 or self._block_size not in (0, m.block_size):
            return "layout", f"blocks of {m.block_size} tokens, before {self._block_size}"
        self._block_size = m.block_size
        if m.session != self._session or m.n_tokens != m.have + len(m.token_ids) or m.have > known:
            return "stale", f"an offer of {m.session!r}, tokens {m.have}..{m.n_tokens}; {known} are known"
        if self._offer is not None and m.version != self._offer.version:
            return "version", f"the source changed from version {self._offer.version} to {m.version} during the move"
        if m.n_tokens < known:
            return "tokens", f"the source had {known} tokens and now offers {m.n_tokens}"
        if not np.array_equal(self._tokens[m.have :], m.token_ids[: known - m.have]):
            return "tokens", f"the source's tokens from {m.have} on are not those it offered before"
        if self._digest is None:
            self._digest = TokenDigest(self._fingerprint, m.version)
        self._digest.update(m.token_ids[known - m.have :])
        self._tokens = np.concatenate([self._tokens[: m.have], m.token_ids]).astype(np.int32)
        if self._digest.hex() != m.token_digest:
            return "tokens", "the offer's tokens, version or layout are not those its digest names"
        at = m.have // m.block_size
        self._src = np.concatenate([self._src[:at], m.block_ids]).astype(np.int32)
        if len(self._src) != -(-m.n_tokens // m.block_size):
            return "tokens", f"{len(self._src)} blocks of {m.block_size} for {m.n_tokens} tokens"
        return None

    # -- own side's answers --------------------------------------------------------------------------------------
    def _reserved(self, block_ids: Int32) -> list[Action]:
        assert self._offer is not None
        if len(block_ids) < len(self._dst) or not np.array_equal(block_ids[: len(self._dst)], self._dst):
            self._copied = 0
        self._dst = block_ids
        need = -(-self._offer.n_tokens // self._dst_block_size)
        if len(block_ids) < need:
            return self._fail("no_room", f"{len(block_ids)} blocks were reserved, {need} are needed")
        return self._copy(self._offer)

    def _copy(self, offer: Offer) -> list[Action]:
        stop = offer.n_tokens if offer.frozen else self._full(offer.n_tokens)
        self.state = "copying"
        self._round = (stop - self._copied) * self._token_nbytes
        self._rounds += 1
        return [DoCopy(self._copied, stop, self._src, self._dst, offer.frozen, offer.digests)]

    def _full(self, n_tokens: int) -> int:
        """Tokens in full blocks: those that cannot change any more."""
        return n_tokens - n_tokens % self._block_size

    def _copy_done(self, now: float) -> list[Action]:
        assert self._offer is not None
        if now >= self._lease_from + self._lease_s:
            return self._fail("lease", "the copy ended after the source's lease; what was read cannot be trusted")
        if self._offer.frozen:
            self.state = "entering"
            self._request, self._resend_at = None, float("inf")
            blocks = self._dst[: -(-len(self._tokens) // self._dst_block_size)]
            return [DoEnter(self._offer.version, self._tokens, blocks)]
        self._copied = self._full(self._offer.n_tokens)
        if self._round > self._policy.settle_below and self._rounds < self._policy.max_rounds:
            return self._ask("extending", Extend(self.move, self._seq + 1, self._copied), now)
        self.frozen_at = now
        return self._ask("freezing", Freeze(self.move, self._seq + 1, self._copied), now)

    def _entered(self, now: float) -> list[Action]:
        assert self._offer is not None
        claim = Commit(self.move, self._seq + 1, self._offer.generation, self._offer.token_digest)
        return self._ask("claiming", claim, now)

    # -- time ----------------------------------------------------------------------------------------------------
    def _ask(self, state: str, request: Message, now: float) -> list[Action]:
        self.state, self._request, self._seq = state, request, request.seq
        self._first_sent = self._sent_at = now
        self._wait = self._policy.reply_s
        self._resend_at = now + self._wait
        return [Send(request)]

    def _tick(self, now: float) -> list[Action]:
        if self._request is not None and now >= self._resend_at:
            if now >= self._first_sent + self._policy.give_up_s:
                return self._silent()
            self._wait *= 2
            self._resend_at = now + self._wait
            return [Send(self._request)]
        waits = self.state in ("reserving", "copying") and self._request is None
        if waits and now > self._lease_from + self._lease_s / 3:
            renew = Renew(self.move, self._seq + 1)
            return self._ask(self.state, renew, now)
        return []

    def _silent(self) -> list[Action]:
        """The source does not answer."""
        if self.state != "claiming":
            return self._fail("silent", "the source did not answer in time")
        self.state = "unknown"
        self._request, self._resend_at = None, float("inf")
        return [Finished("unknown", "silent", "the source was asked for the session and never answered")]

    # -- ends ----------------------------------------------------------------------------------------------------
    def _own(self) -> list[Action]:
        self.state = "owner"
        self._request, self._resend_at = None, float("inf")
        return [Send(Done(self.move, self._seq + 1)), Finished("owner", "", "")]

    def _fenced(self) -> list[Action]:
        if self.state in ("claiming", "unknown"):
            return self._own()
        return self._fail("fenced", "the source is dead", tell=False)

    def _fail(self, code: str, reason: str, tell: bool = True) -> list[Action]:
        if self.state in ("owner", "failed", "unknown"):
            return []
        entered = self.state == "claiming"
        self.state, self._code, self._reason = "failed", code, reason
        self._request, self._resend_at = None, float("inf")
        out: list[Action] = [] if entered else [DoCancel()]
        if tell:
            out.append(Send(Abort(self.move, self._seq + 1, code)))
        return [*out, Finished("failed", code, reason)]
