"""An engine in a process on another machine: `There` in the test, the rest of this file as the program there.

Commands are JSON lines on the program's standard input, answers lines on its output, in order; the engine ends with
the input. Errors come back as text. Not here: how a program is started on a machine (`machines`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gyre_core import (
    ComponentContext,
    Engine,
    GenerateRequest,
    GyreError,
    Kind,
    PluginManager,
    SamplingParams,
    WeightSource,
)


class There:
    """One engine. `name` is its plugin's, `context` what its cell would tell it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def make(
        cls, words: Sequence[str], name: str, options: dict[str, Any], context: dict[str, Any], log: Path
    ) -> There:
        """Start the program; `words` run one on that machine."""
        told = json.dumps({"name": name, "options": options, "context": context})
        with log.open("ab") as errors:
            return cls(
                await asyncio.create_subprocess_exec(
                    *words, sys.executable, __file__, told, stdin=PIPE, stdout=PIPE, stderr=errors
                )
            )

    async def ask(self, do: str, **how: Any) -> Any:
        """The answer; AssertionError with the error that came instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **how}).encode() + b"\n")
        line = await self._process.stdout.readline()
        assert line, "the engine's process has ended; see its log"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    async def start(self, source: WeightSource) -> None:
        """See `Engine.start`."""
        await self.ask("start", version=source.version, location=source.location, kind=source.kind)

    async def call(self, prompt: Sequence[int], tokens: int, session: str) -> tuple[list[int], int]:
        """Greedy tokens, and how many of the prompt were cached."""
        answer = await self.ask("call", prompt=list(prompt), tokens=tokens, session=session)
        return answer["ids"], answer["cached"]

    async def end(self) -> None:
        """Close the engine; returns when its process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def _do(engine: Engine, do: str, how: dict[str, Any]) -> dict[str, Any]:
    if do == "start":
        await engine.start(WeightSource(**how))
        return {}
    assert do == "call", do
    sampling = SamplingParams(how["tokens"], temperature=0.0)
    ids: list[int] = []
    cached = 0
    async for chunk in engine.generate(GenerateRequest("call", how["session"], how["prompt"], sampling)):
        ids += chunk.token_ids
        cached = max(cached, chunk.cached_tokens or 0)
    return {"ids": ids, "cached": cached}


async def _serve(name: str, options: dict[str, Any], context: dict[str, Any]) -> None:
    engine: Engine = PluginManager.installed().create(Kind.ENGINE, name, options, ComponentContext(**context))
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            how = json.loads(line)
            try:
                answer = await _do(engine, how.pop("do"), how)
            except GyreError as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(_serve(**json.loads(sys.argv[1])))
