"""The proxy as processes: two workers share a store, each serves its own executions; the admin client finds them."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest
from gyre_tito import ExecutionSpec, Score, Status, Store, load_format
from gyre_tito.client import AdminClient, AdminError
from gyre_tito.serve import load_backend
from gyre_tito.shard import worker_of
from gyre_tito.testing import save_tiny_model


def free_port_pair():
    """Two neighbouring ports below those that connections are given, so that none takes one before the workers do."""
    for _ in range(50):
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    pytest.skip("no two neighbouring free ports")


@pytest.fixture
def workers(tmp_path):
    save_tiny_model(tmp_path / "model")
    (tmp_path / "token").write_text("secret\n")
    port = free_port_pair()
    command = [
        *(sys.executable, "-m", "gyre_tito", "serve", "--backend", "gyre_tito.testing:rambling_engine"),
        *("--store", str(tmp_path / "s.db"), "--model-dir", str(tmp_path / "model"), "--family", "qwen3"),
        *("--admin-token-file", str(tmp_path / "token"), "--port", str(port), "--workers", "2"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in range(2):
        assert "worker" in process.stdout.readline()
    yield [f"http://127.0.0.1:{port + number}" for number in range(2)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0
    process.stdout.close()


async def test_two_workers(workers, tmp_path):
    names = [f"e{number}" for number in range(6)]
    assert {worker_of(name, 2) for name in names} == {0, 1}

    async def attempt(admin, http, name):
        opened = await admin.open_execution(ExecutionSpec(name, "t", "g"))
        await admin.open_session(name, "main")
        body = {"messages": [{"role": "user", "content": name}], "max_tokens": 8}
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        assert opened.base_url.startswith(workers[worker_of(name, 2)])
        async with http.post(opened.base_url + "/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
        wrong = workers[1 - worker_of(name, 2)]
        async with http.post(wrong + "/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 421
            assert workers[worker_of(name, 2)] in (await answer.json())["error"]["message"]
        return await admin.close_execution(name, Status.COMPLETED, Score(1.0))

    async with AdminClient(workers, "secret") as admin, aiohttp.ClientSession() as http:
        ended = await asyncio.gather(*(attempt(admin, http, name) for name in names))
        assert [one["calls"] for one in ended] == [1] * 6
        with pytest.raises(AdminError, match="one of that name exists"):
            await admin.open_execution(ExecutionSpec(names[0]))
    async with AdminClient(workers, "wrong") as admin:
        with pytest.raises(AdminError, match="admin token"):
            await admin.open_execution(ExecutionSpec("x"))
    with Store.open(tmp_path / "s.db") as store:
        assert sorted(one.execution for one in store.executions(status=Status.COMPLETED)) == names


def test_a_model_folder_loads_without_torch_or_transformers(tmp_path):
    save_tiny_model(tmp_path)
    assert load_format(tmp_path).family == "default"
    script = (
        f"import sys, gyre_tito; from gyre_tito import *; load_format({str(tmp_path)!r}, family='qwen3'); "
        "import gyre_tito.server; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_backend_names_are_checked():
    for name in ("nothing", "gyre_tito.testing:missing", "no.such.module:x"):
        with pytest.raises(ValueError, match="loading backend"):
            load_backend(name)
