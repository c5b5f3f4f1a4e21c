"""A proxy with a scripted engine behind raw HTTP, for the tests of its dialects."""

from __future__ import annotations

import json

import aiohttp
from gyre_tito import ExecutionSpec, ProxyServer, Store, TitoService
from gyre_tito.records import Link
from gyre_tito.testing import BookkeepingEngine, scripted, tiny_format

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
ANTHROPIC_TOOLS = [{"name": "read_file", "description": "Read.", "input_schema": SCHEMA}]
RESPONSE_TOOLS = [{"type": "function", "name": "read_file", "description": "Read.", "parameters": SCHEMA}]


class Bench:
    def __init__(self, tmp_path, *texts, chunk=1, delay=0.0):
        self.chat = tiny_format()
        self.engine = BookkeepingEngine(scripted(self.chat, *texts), chunk=chunk, delay=delay)
        self.store = Store.open(tmp_path / "s.db", writable=True, durability="process")
        self.service = TitoService(self.engine, self.store, self.chat)
        self.server = ProxyServer(self.service)

    async def __aenter__(self):
        await self.server.start()
        self.http = aiohttp.ClientSession()
        self.key = (await self.service.open_execution(ExecutionSpec("e"))).api_key
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        await self.server.stop()
        self.store.close()

    async def post(self, path, body):
        url, headers = self.server.base_url + path, {"x-api-key": self.key}
        async with self.http.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def events(self, path, body):
        url, headers = self.server.base_url + path, {"x-api-key": self.key}
        async with self.http.post(url, json={**body, "stream": True}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            text = await answer.text()
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def one_path(self):
        tree = self.store.load_tree("e")
        for entry in self.engine.books:
            index = int(entry.call.call_id.rpartition("#")[2])
            assert tree.path_ids(index).tolist() == entry.prompt.tolist() + entry.sampled
        assert len(tree.leaves()) == 1
        assert {call.link for call in self.store.calls("e")} == {Link.START, Link.EXTEND}
