"""Handing a session's KV from one vLLM to another, with gyre-kvxfer's checks in front of vLLM's NIXL connector.

vLLM checks nothing: it takes blocks for a prompt they do not belong to, and poisons its prefix cache with them. So what
is exported bears the digest of its tokens, the policy version and its age, and is imported only for a context that
begins with these tokens under the same version. Both servers need `transfers`. Importing computes one token and throws
it away; what came is then in the destination's prefix cache under its present salt, where the session's next call finds
it. Invariant: an import that is refused leaves the destination as it was.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from gyre_core import Array, CapabilityError, ExportedKV, ImportedKV, InfrastructureError
from gyre_kvxfer.errors import MoveRefused, VerificationFailed
from gyre_kvxfer.vllm import Export, export_request, exported, import_request

from gyre_vllm.server import Server
from gyre_vllm.state import EngineState

Tokens: TypeAlias = npt.NDArray[np.int32]

COMPLETIONS = "/v1/completions"


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


async def export_session(state: EngineState, session: str, token_ids: Tokens, *, running: bool) -> ExportedKV:
    """Let the source keep the KV of this context for another server to fetch; InfrastructureError if it gives none."""
    doing = f"exporting the KV of {session!r}"
    server = connected(state, doing)
    body = export_request(server.facts.model, token_ids, state.version) | {"cache_salt": state.salt}
    answer = await _complete(server, body)
    try:
        export = exported(answer, session, token_ids, state.version, time.time())
    except MoveRefused as error:
        raise InfrastructureError(doing, got=str(error), expected="an export") from error
    return ExportedKV(session, state.version, token_ids, msgspec.json.encode(export), running)


async def import_session(state: EngineState, given: ExportedKV) -> ImportedKV:
    """Fetch what was exported for this context. InfrastructureError when it does not fit: another version, other
    tokens, too old; the session's next call is then prefilled."""
    doing = f"importing the KV of {given.session!r}"
    server = connected(state, doing)
    tokens = np.asarray(given.token_ids, np.int32)
    try:
        export = msgspec.json.decode(given.ticket, type=Export)
        body = import_request(
            export, server.facts.model, tokens, state.version, time.time(), max_tokens=1, temperature=0
        )
    except (MoveRefused, VerificationFailed, msgspec.MsgspecError) as error:
        raise InfrastructureError(doing, got=str(error), expected="an export that fits") from error
    answer = await _complete(server, body | {"cache_salt": state.salt})
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    found = int(details.get("cached_tokens") or 0)
    return ImportedKV(len(tokens), len(tokens) - found, found * server.facts.kv_token_bytes)


def connected(state: EngineState, doing: str) -> Server:
    """The server; CapabilityError when it was started without a KV connector."""
    server = state.ready(doing)
    if not server.facts.connector:
        raise CapabilityError(doing, got="a server without a KV connector", expected="`transfers = true` in [engine]")
    return server


async def _complete(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    content = await server.client.ask("POST", COMPLETIONS, body=body)
    return dict(msgspec.json.decode(content))
