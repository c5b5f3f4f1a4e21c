"""The gyre-local half of kv_vs_prefill.py: two processes with the embedded engine, moved by gyre-kvxfer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import torch
from gyre_core import ComponentContext, FinishReason, WeightSource
from gyre_kvxfer import MigrationServer, MovePolicy, migrate
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.engine import LocalEngine
from gyre_rl.cell.kv import EngineKV
from kv_prefill_support import Moved, nothing_yet, prompt_of, sample, shape_of, summary

KEY = b"benchmark"


async def start_engine(folder: str, longest: int) -> LocalEngine:
    """An engine with room for a few sessions, handing out every token at once."""
    room = 2 * longest + 8192
    options = LocalEngineOptions(kv_tokens=room, max_running=4, max_context=longest + 1024, chunk_tokens=1)
    engine = LocalEngine(options, ComponentContext(".", "bench", threads=1))
    await engine.start(WeightSource(0, folder))
    return engine


async def serve(folder: str, longest: int) -> None:
    """The source's process. Obeys JSON lines: run a call to its end, or start one and tell when it has sampled some."""
    engine = await start_engine(folder, longest)
    async with MigrationServer(EngineKV(engine), key=KEY, lease_s=30.0) as server:
        say({"endpoint": server.endpoint})
        loop = asyncio.get_running_loop()
        running: asyncio.Task[dict[str, Any]] | None = None
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            told = json.loads(line)
            prompt = prompt_of(told.get("prompt", ""), told.get("n", 0))
            if told["do"] == "run":
                say(await sample(engine, told["session"], prompt, told["count"]))
            elif told["do"] == "start":
                so_far = nothing_yet()
                running = asyncio.ensure_future(sample(engine, told["session"], prompt, told["count"], so_far))
                while len(so_far["ids"]) < told["after"]:
                    await asyncio.sleep(0.005)
                say({})
            elif told["do"] == "ended" and running is not None:
                say(await running)
            elif told["do"] == "nothing":
                say({})
    await engine.close()


def say(what: dict[str, Any]) -> None:
    print("SAID" + json.dumps(what), flush=True)


class LocalPair:
    """A source in a process of its own; the destination is in this one."""

    name = "gyre-local"
    short = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    model = live_model = shape_of(256, 4)
    """14 million parameters, KV of 2 KB a token in float32; a token every 4 ms."""

    def __init__(self, folder: str, run_dir: str, longest: int) -> None:
        self._folder, self._longest = folder, longest
        command = [sys.executable, __file__, folder, str(longest)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def start(self) -> None:
        """Both engines."""
        torch.set_num_threads(1)
        self._endpoint = (await asyncio.to_thread(self._read))["endpoint"]
        self._engine = await start_engine(self._folder, self._longest)

    async def close(self) -> None:
        """End both."""
        await self._engine.close()
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        while not (line := self._process.stdout.readline()).startswith("SAID"):
            if not line:
                raise RuntimeError("the source's process ended")
        return json.loads(line[4:])

    async def _ask(self, **what: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return await asyncio.to_thread(self._read)

    async def wake(self) -> None:
        """Engines of this kind do not sleep."""

    async def fill(self, session: str, n: int) -> list[int]:
        """Compute the session at the source; its context."""
        there = await self._ask(do="run", session=session, prompt=session, n=n, count=1)
        return prompt_of(session, n) + there["ids"]

    async def move(self, session: str, policy: MovePolicy | None = None) -> Moved:
        """Bring it to the destination."""
        report = await migrate(session, self._endpoint, EngineKV(self._engine), key=KEY, policy=policy)
        if not report.carried:
            raise RuntimeError(str(report))
        return Moved(report.bytes, report.tokens, report.seconds)

    async def next_token(self, session: str, context: list[int]) -> dict[str, Any]:
        """One token at the destination."""
        return await sample(self._engine, session, context, 1)

    async def forget(self) -> None:
        """Nothing is found in the destination's cache any more."""
        await self._engine.flush_cache()

    async def live(self, n: int) -> dict[str, Any]:
        """Move a session while it decodes, and compare with the same call left alone."""
        name = f"live-{n}"
        await self._ask(do="start", session=name, prompt=name, n=n, count=900, after=60)
        await self.move(name, MovePolicy(freeze_below=0))
        part = await self._ask(do="ended")
        if part["finish"] != str(FinishReason.ABORT):
            raise RuntimeError(f"the call ended with {part['finish']} before it was moved")
        rest = await sample(self._engine, name, prompt_of(name, n) + part["ids"], 40)
        alone = await self._ask(do="run", session="alone", prompt=name, n=n, count=len(part["ids"]) + 40)
        await self.forget()
        return summary(part, rest, alone) | {"round_trip_ms": await self._round_trip()}

    async def _round_trip(self) -> float:
        """Milliseconds of the smallest question to the source's process."""
        took = []
        for _ in range(15):
            began = time.monotonic()
            await self._ask(do="nothing")
            took.append(time.monotonic() - began)
        return round(1e3 * sorted(took)[7], 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
