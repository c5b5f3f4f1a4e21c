"""Handing a session's KV from one vLLM to another, with gyre-kvxfer's checks in front of vLLM's NIXL connector.

vLLM checks nothing: it takes blocks for a prompt they do not belong to, and poisons its prefix cache with them. So what
is exported bears the digest of its tokens, the policy version and its age, and is imported only for a context that
begins with these tokens under the same version. Both servers need `transfers`.

Importing computes one token and throws it away; what came is then in the destination's prefix cache under its present
salt, where the session's next call finds it, but for the last, partly filled block. Of a call that was stopped for the
move (`take_session`) nothing is fetched here: the session's next call fetches what is missing, the partly filled block
with it, and computes one token. Invariant: an import that is refused leaves the destination as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from gyre_core import Array, CapabilityError, ExportedKV, ImportedKV, InfrastructureError
from gyre_kvxfer.errors import MoveRefused, VerificationFailed
from gyre_kvxfer.vllm import Export, check_export, export_request, exported, import_request, take_request

from gyre_vllm.calls import RunningCall
from gyre_vllm.network import is_loopback
from gyre_vllm.server import Server
from gyre_vllm.state import EngineState
from gyre_vllm.transfers import FETCH_S
from gyre_vllm.wire import ID_PREFIX

Tokens: TypeAlias = npt.NDArray[np.int32]

COMPLETIONS = "/v1/completions"
LEASE_S = 20.0
"""How old an export may be when it is used; vLLM holds the blocks for 30 s."""
TAKE_S = 5.0
"""How long a server may take to end a call so that its KV is held. It answers when it schedules the request, which on a
full one is later than the export would be of any use; the session's next call is prefilled then."""
LAST_TOKENS_S = 10.0
"""How long the last tokens of a stopped call may take to come."""
CLOCKS_S = 5.0
"""How far two machines' clocks may be apart, so that an export that is used is younger than the 30 s of vLLM's hold."""


class Contexts:
    """The newest context of each session, as its last call left it. Bounded by the tokens that the server can hold KV
    of: beyond them the oldest sessions' KV is not there any more. A context counts under the salt it was made with."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[str, Tokens]] = OrderedDict()
        self._tokens = 0

    def note(self, session: str, salt: str, token_ids: Sequence[int] | Array, room: int) -> None:
        """The session's context is this now; `room` tokens of all sessions are kept."""
        self._drop(session)
        tokens = np.asarray(token_ids, np.int32)
        self._held[session] = (salt, tokens)
        self._tokens += len(tokens)
        while self._tokens > room and self._held:
            self._drop(next(iter(self._held)))

    def of(self, session: str, salt: str) -> Tokens | None:
        """int32 [n], or None when nothing is known under this salt."""
        found = self._held.get(session)
        return found[1] if found is not None and found[0] == salt else None

    def _drop(self, session: str) -> None:
        held = self._held.pop(session, None)
        self._tokens -= len(held[1]) if held is not None else 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an `ExportedKV` of this engine bears. `machine`: the source's address for other machines; `stopped`: of a
    call that was ended for the move; `digest`: of the weights that its KV was computed with, if anybody knows it."""

    export: Export
    machine: str
    stopped: bool = False
    digest: str = ""


class Arrivals:
    """What the next calls of sessions are to fetch. Each is for one call, which must begin with its tokens."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, Tokens, Export]] = {}

    def add(self, salt: str, tokens: Tokens, export: Export) -> None:
        """For the session's next call under this salt."""
        now = time.time()
        self._held = {name: held for name, held in self._held.items() if held[2].taken_at + LEASE_S > now}
        self._held[export.session] = (salt, tokens, export)

    def take(self, session: str, salt: str, prompt: Sequence[int]) -> dict[str, Any] | None:
        """vLLM's parameters for this call; None when nothing waits for it or what waits does not fit."""
        held = self._held.pop(session, None)
        if held is None or held[0] != salt or time.time() > held[2].taken_at + LEASE_S:
            return None
        tokens = held[1]
        return held[2].params if np.array_equal(tokens, prompt[: len(tokens)]) else None


async def export_session(state: EngineState, session: str, token_ids: Tokens, *, running: bool) -> ExportedKV | None:
    """Let the source keep the KV of this context for another server to fetch; InfrastructureError if it gives none.
    None when the weights change before it has: there is nothing of this context under the next ones."""
    doing = f"exporting the KV of {session!r}"
    server = connected(state, doing)
    version, salt = state.version, state.salt
    body = export_request(server.facts.model, token_ids, version) | {"cache_salt": salt}
    try:
        async with state.transfers.one():
            answer = await _complete(server, body)
    except TimeoutError:
        state.ready(doing)
        return None
    if state.salt != salt:
        return None
    try:
        export = exported(answer, session, token_ids, version, time.time(), LEASE_S)
    except MoveRefused as error:
        raise InfrastructureError(doing, got=str(error), expected="an export") from error
    return _held(export, state, server, token_ids, running=running)


async def take_session(state: EngineState, session: str, calls: Sequence[RunningCall]) -> ExportedKV | None:
    """End these running calls of a session with ABORT and hold the KV of the longest, up to its last token but one.
    None when the server cannot, or not soon, or weights change meanwhile: they are ended all the same, and a server
    that comes to it later finds nothing to end."""
    server = connected(state, f"stopping {session!r}")
    sampling = [call for call in calls if len(call.sampled) > call.first and not call.at_rest.is_set()]
    longest = max(sampling, key=lambda call: len(call.prompt) + len(call.sampled), default=None)
    for call in calls:
        call.abort()
    if longest is None or not server.facts.takes:
        await state.end_segments(server, list(calls))
        return None
    longest.taken = True
    asked, version = time.time(), state.version
    body = take_request(server.facts.model, ID_PREFIX + longest.server_id, version)
    answer: dict[str, Any] = {}
    try:
        with contextlib.suppress(TimeoutError):
            async with state.transfers.one(TAKE_S):
                answer = await _complete(server, body)
        if answer.get("kv_transfer_params"):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(longest.at_rest.wait(), LAST_TOKENS_S)
    finally:
        await state.end_segments(server, list(calls))
    context = np.asarray([*longest.prompt, *longest.sampled], np.int32)
    try:
        export = exported(answer, session, context, version, asked, LEASE_S)
    except MoveRefused:
        return None
    same = longest.salt == state.salt and export.n_tokens == len(context) - 1
    return _held(export, state, server, context, running=False, stopped=True) if same else None


def _held(
    export: Export, state: EngineState, server: Server, tokens: Tokens, *, running: bool, stopped: bool = False
) -> ExportedKV:
    ticket = msgspec.json.encode(Ticket(export, server.machine, stopped, state.digest))
    return ExportedKV(export.session, export.version, tokens, ticket, running)


async def import_session(state: EngineState, arrivals: Arrivals, given: ExportedKV) -> ImportedKV:
    """Fetch what was exported for this context. InfrastructureError when it does not fit: another version, other
    tokens, too old, out of reach, not here in time, or weights that change meanwhile; the session's next call is then
    prefilled."""
    doing = f"importing the KV of {given.session!r}"
    server = connected(state, doing)
    tokens = np.asarray(given.token_ids, np.int32)
    try:
        ticket = msgspec.json.decode(given.ticket, type=Ticket)
        check_export(ticket.export, tokens, state.version, time.time())
    except (MoveRefused, VerificationFailed, msgspec.MsgspecError) as error:
        raise InfrastructureError(doing, got=str(error), expected="an export that fits") from error
    if ticket.digest and state.digest and ticket.digest != state.digest:
        got, expected = f"KV of version {state.version} with contents {ticket.digest}", f"contents {state.digest}"
        raise InfrastructureError(doing, got=got, expected=expected)
    _require_reach(ticket, server, doing)
    if ticket.stopped:
        arrivals.add(state.salt, tokens, ticket.export)
        return ImportedKV(len(tokens), len(tokens) - ticket.export.n_tokens, 0)
    body = import_request(
        ticket.export, server.facts.model, tokens, state.version, time.time(), max_tokens=1, temperature=0
    )
    salt, changed = state.salt, InfrastructureError(doing, got="a change of weights", expected="the same to its end")
    try:
        async with state.transfers.one(FETCH_S):
            answer = await _complete(server, body | {"cache_salt": salt})
    except TimeoutError as error:
        if state.salt != salt or state.transfers.barred:
            raise changed from error
        late = f"nothing from {ticket.machine} in {FETCH_S:g} s"
        raise InfrastructureError(doing, got=late, expected="its KV", fix="See that server's log.") from error
    if state.salt != salt:
        raise changed
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    found = int(details.get("cached_tokens") or 0)
    return ImportedKV(len(tokens), len(tokens) - found, found * server.facts.kv_token_bytes)


def _require_reach(ticket: Ticket, server: Server, doing: str) -> None:
    """InfrastructureError where the source's connector is found by its own machine alone, or its clock is another."""
    where = str(ticket.export.params.get("remote_host", ""))
    if is_loopback(where) and ticket.machine != server.machine:
        raise InfrastructureError(
            doing, got=f"a connector on {where} of {ticket.machine}", expected=f"one that {server.machine} reaches",
            fix="Start that server with its machine's address in VLLM_NIXL_SIDE_CHANNEL_HOST; leave `host` in [engine] "
            "empty for those that Gyre starts.",
        )  # fmt: skip
    ahead = ticket.export.taken_at - time.time()
    if ahead > CLOCKS_S:
        raise InfrastructureError(
            doing, got=f"an export of {ahead:.0f} s from now, by the clock of {ticket.machine}",
            expected=f"clocks at most {CLOCKS_S:g} s apart", fix="Synchronise the machines' clocks.",
        )  # fmt: skip


def connected(state: EngineState, doing: str) -> Server:
    """The server; CapabilityError when it was started without a KV connector."""
    server = state.ready(doing)
    if not server.facts.connector:
        raise CapabilityError(doing, got="a server without a KV connector", expected="`transfers = true` in [engine]")
    return server


async def _complete(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    content = await server.client.ask("POST", COMPLETIONS, body=body)
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InfrastructureError(
            f"asking {server.client.url} for a session's KV", got=f"{content[:120]!r}", expected="an object"
        ) from error
