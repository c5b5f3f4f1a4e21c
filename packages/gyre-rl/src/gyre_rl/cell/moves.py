"""A session's KV read in place by another cell (`KV_MOVE`): how this cell offers its own and takes others'.

Invariant: a move that fails leaves both sides as they were, with the reason; the destination then prefills. Not here:
the protocol (gyre-kvxfer), and what moves when (the scheduler).
"""

from __future__ import annotations

from typing import Any

from gyre_core import ComponentContext, Engine, Kind, PluginManager
from gyre_kvxfer import MigrationServer, MovePolicy, Transport, migrate

from gyre_rl.cell.kv import EngineKV
from gyre_rl.cell.messages import KVSettings, Pulled, PullSession
from gyre_rl.procs.address import in_url
from gyre_rl.procs.child import ChildSpec


class Moves:
    """The source's server and the destination's client of one cell."""

    def __init__(self, spec: ChildSpec, settings: KVSettings, extra: tuple[Transport, ...] = ()) -> None:
        self._spec, self._settings, self._extra = spec, settings, extra
        self._server: MigrationServer | None = None

    async def serve(self, engine: Engine) -> str:
        """Offer the engine's KV; returns where."""
        offered = None if self._settings.transport == "auto" else (self._settings.transport,)
        source = EngineKV(engine, self._settings.digest)
        await source.keep_digests()
        listen = f"tcp://{in_url(self._spec.address)}:0"
        self._server = MigrationServer(
            source, key=self._spec.token.encode(), listen=listen, transports=offered, extra=self._extra
        )
        await self._server.start()
        return self._server.endpoint

    async def pull(self, engine: Engine, message: PullSession) -> Pulled:
        """Fetch a session from the cell that has it."""
        settings = self._settings
        report = await migrate(
            message.session,
            message.endpoint,
            EngineKV(engine),
            key=self._spec.token.encode(),
            transport=settings.transport,
            destination=str(self._spec.cell),
            policy=MovePolicy(version=engine.version, digest=settings.digest, finite=settings.finite),
            extra=self._extra,
        )
        return Pulled(
            report.carried,
            report.bytes,
            report.tokens,
            report.seconds,
            report.pause_seconds,
            report.transport,
            report.reason,
        )

    async def close(self) -> None:
        """Offer nothing any more."""
        if self._server is not None:
            await self._server.close()


def installed_transports(plugins: PluginManager, context: ComponentContext, wanted: str) -> tuple[Transport, ...]:
    """Those that plugins bring and the run may use, ready to be tried before gyre-kvxfer's own."""
    usable = [c.registration.name for c in plugins.components(Kind.TRANSPORT) if not c.missing]
    usable = [name for name in usable if wanted in ("auto", name)]
    made: list[Any] = [plugins.create(Kind.TRANSPORT, name, None, context) for name in usable]
    return tuple(made)
