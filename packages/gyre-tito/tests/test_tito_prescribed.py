"""What an execution prescribes holds for every call of it, whatever its agent asks, in every dialect, also later."""

from __future__ import annotations

import aiohttp
import pytest
from gyre_tito import ExecutionSpec, Prescribed, ProxyServer, Store, TitoService
from gyre_tito.testing import BookkeepingEngine, rambling, tiny_format

USER = [{"role": "user", "content": "u"}]
ODD = {"temperature": 0.2, "top_p": 0.3}
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"7": 5}}
ASKED = [
    ("chat/completions", {"messages": USER, "max_tokens": 5, "seed": 3, "top_k": 4, "min_p": 0.1, **ODD, **PENALTIES}),
    ("completions", {"prompt": "u", "max_tokens": 5, "seed": 3, **ODD, **PENALTIES}),
    ("messages", {"messages": USER, "max_tokens": 5, "top_k": 4, **ODD}),
    ("responses", {"input": "u", "max_output_tokens": 16, **ODD}),
]


class Bench:
    """A proxy over a store, with one execution."""

    def __init__(self, tmp_path, prescribed):
        self.path, self.prescribed, self.chat = tmp_path / "s.db", prescribed, tiny_format()
        self.engine = BookkeepingEngine(rambling(self.chat))

    async def __aenter__(self):
        await self.up()
        self.key = (await self.service.open_execution(ExecutionSpec("e", prescribed=self.prescribed))).api_key
        return self

    async def up(self):
        self.store = Store.open(self.path, writable=True, durability="process")
        self.service = TitoService(self.engine, self.store, self.chat)
        self.server = ProxyServer(self.service)
        await self.server.start()

    async def down(self):
        await self.server.stop()
        self.store.close()

    async def __aexit__(self, *_):
        await self.down()

    async def ask(self, path, body):
        headers = {"Authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession() as http, http.post(
            f"{self.server.base_url}/v1/{path}", json=body, headers=headers
        ) as answer:  # fmt: skip
            assert answer.status == 200, await answer.text()
        return self.engine.books[-1].call.sampling


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_the_distribution_is_the_executions_and_the_rest_is_the_agents(tmp_path, path, body):
    async with Bench(tmp_path, Prescribed(1.5, 0.9)) as bench:
        for _ in range(2):
            used = await bench.ask(path, body)
            assert (used.temperature, used.top_p, used.top_k, used.min_p) == (1.5, 0.9, 0, 0.0)
            assert (used.frequency_penalty, used.presence_penalty, used.logit_bias) == (0.0, 0.0, ())
            assert used.max_tokens == body.get("max_tokens", 16)
            assert used.seed == body.get("seed")
            await bench.down()  # and again in the proxy's next life
            await bench.up()
        assert [call.sampling["temperature"] for call in bench.store.calls("e")] == [1.5, 1.5]
        assert bench.store.execution("e").prescribed == Prescribed(1.5, 0.9)


async def test_without_it_the_agent_has_its_way(tmp_path):
    async with Bench(tmp_path, None) as bench:
        used = await bench.ask(*ASKED[0])
        assert (used.temperature, used.top_p, used.top_k, used.min_p) == (0.2, 0.3, 4, 0.1)
        assert (used.frequency_penalty, used.logit_bias) == (0.5, ((7, 5.0),))
