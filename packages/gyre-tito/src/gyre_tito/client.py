"""The admin API from another process: open, reopen, label and close executions on one proxy or on several workers.

The same calls as `TitoService`, over HTTP; each goes to the worker that serves the execution. Keeps one HTTP session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from gyre_tito.records import ExecutionSpec, OpenedExecution, Score, SessionKind, Status
from gyre_tito.shard import worker_of


class AdminError(RuntimeError):
    """The proxy refused; `status` is the HTTP status, the message is the proxy's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdminClient:
    """`async with AdminClient(urls, token) as admin: ...`; `urls` in the order of the workers."""

    def __init__(self, urls: str | Sequence[str], token: str) -> None:
        self.urls = [urls] if isinstance(urls, str) else list(urls)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AdminClient:
        self._http = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def open_execution(self, spec: ExecutionSpec) -> OpenedExecution:
        """Open an execution; returns what its agent needs."""
        body = {
            "execution": spec.execution,
            "task": spec.task,
            "group": spec.group,
            "step": spec.step,
            "purpose": spec.purpose,
            "metadata": dict(spec.metadata),
            "prescribed": None if spec.prescribed is None else dataclasses.asdict(spec.prescribed),
        }
        return OpenedExecution(**await self._post(spec.execution, "", body))

    async def reopen_execution(self, execution: str) -> OpenedExecution:
        """A new way in to an execution that is still open; the old key is refused."""
        return OpenedExecution(**await self._post(execution, f"/{execution}/reopen", {}))

    async def open_session(
        self, execution: str, session: str, kind: SessionKind = "main", parent: str | None = None
    ) -> None:
        """Name a session."""
        await self._post(execution, f"/{execution}/sessions", {"session": session, "kind": kind, "parent": parent})

    async def close_execution(
        self, execution: str, status: Status, score: Score | None = None, cause: str = ""
    ) -> Mapping[str, Any]:
        """End an execution; returns its record as JSON."""
        verdict = None if score is None else {"value": score.value, "milestones": dict(score.milestones)}
        body = {"status": str(status), "score": verdict, "cause": cause}
        return await self._post(execution, f"/{execution}/close", body)

    async def _post(self, execution: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._http is None:
            raise RuntimeError("AdminClient is used outside 'async with'")
        url = self.urls[worker_of(execution, len(self.urls))]
        async with self._http.post(
            f"{url}/admin/v1/executions{path}",
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
        ) as answer:
            said: dict[str, Any] = await answer.json(content_type=None)
            if answer.status != 200:
                raise AdminError(answer.status, str(said.get("error", {}).get("message", said)))
            return said
