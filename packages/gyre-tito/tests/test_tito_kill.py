"""`kill -9` of the proxy under load: every answered call is in the store, whole, and none is answered twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys

import aiohttp
import pytest
from gyre_tito.store import Store
from gyre_tito.testing import tiny_format

SERVER = """
import asyncio, sys
from gyre_tito import ExecutionSpec, ProxyServer, Store, TitoService
from gyre_tito.testing import BookkeepingEngine, rambling, tiny_format

async def main(path, port, seed):
    chat = tiny_format()
    engine = BookkeepingEngine(rambling(chat, seed), chunk=2, delay=0.001)
    store = Store.open(path, writable=True)
    server = ProxyServer(TitoService(engine, store, chat), port=port, admin_token="admin")
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


class Proxy:
    def __init__(self, path, seed, port=0):
        command = [sys.executable, "-c", SERVER, str(path), str(port), str(seed)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


class Life:
    """An agent as it goes on over the proxy's lives: its key, its history, the request that it waits for."""

    def __init__(self, name, key):
        self.name, self.key = name, key
        self.history = [{"role": "user", "content": "go"}]
        self.asked = 0


async def agent(http, where, life, answers):
    """Talks until the proxy dies; notes every answer that arrived whole. What was asked last is asked again first,
    under the same name."""
    while True:
        headers = {"Authorization": f"Bearer {life.key}", "Idempotency-Key": str(life.asked)}
        body = {"messages": life.history, "max_tokens": 16}
        try:
            async with http.post(f"{where}/v1/chat/completions", json=body, headers=headers) as answer:
                said = await answer.json()
                assert answer.status == 200, said
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            return
        message = said["choices"][0]["message"]
        answers.append((life.name, said["id"], message["content"], said["usage"]["completion_tokens"]))
        life.history += [message, {"role": "user", "content": "go on"}]
        life.asked += 1


async def one_life(path, seed, lives, port=0):
    """Start the proxy, let agents talk, kill it at a random moment after it has answered some calls."""
    rng = random.Random(seed)
    proxy = Proxy(path, seed, port)
    where = f"http://127.0.0.1:{proxy.port}"
    answers = []
    async with aiohttp.ClientSession() as http:
        for number in range(6 - len(lives)):
            name = f"{seed}-{number}"
            async with http.post(
                f"{where}/admin/v1/executions", json={"execution": name}, headers={"Authorization": "Bearer admin"}
            ) as opened:
                lives[name] = Life(name, (await opened.json())["api_key"])
        talks = [asyncio.create_task(agent(http, where, life, answers)) for life in lives.values()]
        some = rng.randint(1, 12)
        while len(answers) < some and not all(talk.done() for talk in talks):
            await asyncio.sleep(0.001)
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        proxy.kill()
        await asyncio.gather(*talks)
    return answers


def run(path, rounds):
    chat = tiny_format()
    lives, answers = {}, []
    for seed in range(rounds):
        answers += asyncio.run(one_life(path, seed, lives))
        with Store.open(path) as store:
            trees = {name: store.load_tree(name) for name in lives}
            calls = {(name, one.index): one for name in lives for one in store.calls(name)}
        for name, life in lives.items():  # a request whose call the killed proxy had recorded is not sampled again
            mine = sum(one == name for one, _ in calls)
            assert life.asked <= mine <= life.asked + 1
        seen = set()
        for name, answer_id, content, size in answers:
            index = int(answer_id.rpartition("-")[2])
            assert (name, index) in calls, f"answered call {answer_id} is not in the store"
            assert (name, index) not in seen, f"call {answer_id} was answered twice"
            seen.add((name, index))
            call = calls[name, index]
            assert len(call.sampled_ids) == size
            parsed = chat.parse(call.sampled_ids.tolist(), tools=(), prompt_tail=[], call_id="x", read_calls=False)
            assert parsed.content == content
            trees[name].path(index)
    return answers


def test_a_killed_proxy_loses_no_answered_call(tmp_path):
    answers = run(tmp_path / "s.db", 2)
    assert answers
    names = {name for name, *_ in answers}
    assert len(names) <= 6


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_kills(tmp_path):
    assert run(tmp_path / "s.db", 200)
