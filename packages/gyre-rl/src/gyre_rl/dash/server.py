"""The web server behind `gyre dash`: reads the run's log and store anew when they have grown, writes nothing.

Invariant: it listens on the loopback interface unless told otherwise, needs no running run, and slows none down: the
report is made at most once for each growth of the log, in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from gyre_core.errors import ConfigError
from gyre_tito import Store, StoreError, load_format

from gyre_rl.dash.pages import Decode, execution_list, execution_page, page
from gyre_rl.run.directory import RunDirectory
from gyre_rl.views.log import read_log
from gyre_rl.views.report import render
from gyre_rl.views.timeline import timeline

REFRESH_S = 5


class Dash:
    """The pages of one run."""

    def __init__(self, directory: RunDirectory, decode: Decode | None) -> None:
        self._directory, self._decode = directory, decode
        self._report = (-1, "")

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self.run),
                web.get("/executions", self.executions),
                web.get("/executions/{name}", self.execution),
            ]
        )
        return app

    async def run(self, _: web.Request) -> web.Response:
        """The report of what there is so far, loaded again while the run goes on."""
        size = self._directory.events.stat().st_size
        if size != self._report[0]:
            self._report = (size, await asyncio.to_thread(self._make_report))
        return _html(self._report[1])

    def _make_report(self) -> str:
        line = timeline(read_log(self._directory.events))
        config = self._directory.config
        text = render(line, config.read_text(encoding="utf-8") if config.is_file() else "")
        links = '<nav><a href="/executions">executions</a></nav>'
        again = "" if line.final.ended else f'<meta http-equiv="refresh" content="{REFRESH_S}">'
        return text.replace("<head>", f"<head>{again}", 1).replace("<main>", f"<main>{links}", 1)

    async def executions(self, _: web.Request) -> web.Response:
        """The list."""
        return _html(await asyncio.to_thread(self._with_store, self._list))

    async def execution(self, request: web.Request) -> web.Response:
        """One execution with its tree; 404 for a name that the store does not have."""
        name = request.match_info["name"]
        try:
            return _html(await asyncio.to_thread(self._with_store, lambda store: self._one(store, name)))
        except StoreError as error:
            raise web.HTTPNotFound(text=f"There is no execution {name!r} in this run: {error}") from error

    def _with_store(self, make: Callable[[Store], str]) -> str:
        if not self._directory.store.is_file():
            return page("executions", "<p>No execution was recorded yet.</p>", refresh_s=REFRESH_S)
        with Store.open(self._directory.store) as store:
            return make(store)

    @staticmethod
    def _list(store: Store) -> str:
        return page("executions", execution_list(store.executions()))

    def _one(self, store: Store, name: str) -> str:
        info = store.execution(name)
        return page(name, execution_page(info, store.load_tree(name).to_arrays(), self._decode))


def make_dash(run_dir: Path, model: Path | None = None, family: str | None = None) -> Dash:
    """The dash of a run directory; with `model` tokens are shown as text. ConfigError when it is no run's."""
    directory = RunDirectory(run_dir)
    if not directory.events.is_file():
        raise ConfigError(
            f"showing the run {run_dir}",
            got=f"no {directory.events.name} in it",
            expected="the directory of a run",
            fix="Give the directory that `gyre run` printed.",
        )
    return Dash(directory, None if model is None else load_format(str(model), family=family).decode)


async def serve(dash: Dash, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until cancelled; `ready` gets the address."""
    runner = web.AppRunner(dash.app(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        taken = runner.addresses[0][1]
        ready(f"http://{host}:{taken}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html")
