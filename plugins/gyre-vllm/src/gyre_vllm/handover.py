"""Handing a session's KV from one vLLM to another, with gyre-kvxfer's checks in front of vLLM's NIXL connector.

vLLM checks nothing: it takes blocks for a prompt they do not belong to, and poisons its prefix cache with them. So what
is exported bears the digest of its tokens, the policy version and its age, and is imported only for a context that
begins with these tokens under the same version. Both servers need `transfers`. Importing computes one token and throws
it away; what came is then in the destination's prefix cache under its present salt, where the session's next call finds
it. Invariant: an import that is refused leaves the destination as it was. Not here: ending the calls at the source.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from gyre_core import CapabilityError, InfrastructureError
from gyre_kvxfer.errors import MoveRefused, VerificationFailed
from gyre_kvxfer.vllm import Export, export_request, exported, import_request

from gyre_vllm.server import Server
from gyre_vllm.state import EngineState

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What an import brought: of `tokens` context tokens `found` were not computed at the destination (from the source
    or its own cache); the rest was. `seconds` is the import alone."""

    tokens: int
    found: int
    seconds: float


async def export_session(state: EngineState, session: str, token_ids: Sequence[int]) -> Export:
    """Let the source keep the KV of this context for another server to fetch; InfrastructureError if it gives none."""
    doing = f"exporting the KV of {session!r}"
    server = _connected(state, doing)
    tokens = np.asarray(token_ids, np.int32)
    body = export_request(server.facts.model, tokens, state.version) | {"cache_salt": state.salt}
    answer = await _complete(server, body)
    try:
        return exported(answer, session, tokens, state.version, time.time())
    except MoveRefused as error:
        raise InfrastructureError(doing, got=str(error), expected="an export") from error


async def import_session(state: EngineState, export: Export, token_ids: Sequence[int]) -> HandedOver:
    """Fetch what was exported for this context. InfrastructureError when it does not fit: another version, other
    tokens, too old; the session's next call is then prefilled."""
    doing = f"importing the KV of {export.session!r}"
    server = _connected(state, doing)
    tokens = np.asarray(token_ids, np.int32)
    try:
        body = import_request(
            export, server.facts.model, tokens, state.version, time.time(), max_tokens=1, temperature=0
        )
    except (MoveRefused, VerificationFailed) as error:
        raise InfrastructureError(doing, got=str(error), expected="an export that fits") from error
    began = time.perf_counter()
    answer = await _complete(server, body | {"cache_salt": state.salt})
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return HandedOver(len(tokens), int(details.get("cached_tokens") or 0), time.perf_counter() - began)


def _connected(state: EngineState, doing: str) -> Server:
    server = state.ready(doing)
    if not server.facts.connector:
        raise CapabilityError(doing, got="a server without a KV connector", expected="`transfers = true` in [engine]")
    return server


async def _complete(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    content = await server.client.ask("POST", COMPLETIONS, body=body)
    return dict(msgspec.json.decode(content))
