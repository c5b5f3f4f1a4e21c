"""The engine and trainer suites are light to import, run only through a subclass, and skip with a reason."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from gyre_core import EngineCapability, GenerateChunk, WeightSource
from gyre_core.testing import engine_rig
from gyre_core.testing.engines import EngineConformance, EngineRig
from gyre_core.testing.trainers import TrainerConformance, gap, summed


def test_importing_the_suites_loads_no_torch() -> None:
    code = (
        "import sys, gyre_core.testing.engines, gyre_core.testing.trainers; "
        "print(sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("suite", "least"), [(EngineConformance, 35), (TrainerConformance, 17)])
def test_every_check_says_what_it_is_for(suite: type, least: int) -> None:
    checks = [value for name, value in inspect.getmembers(suite) if name.startswith("test_")]
    assert len(checks) >= least
    assert all(inspect.iscoroutinefunction(check) and check.__doc__ for check in checks)
    assert not suite.__name__.startswith("Test"), "pytest must not collect the suite itself"


def test_prompts_are_repeatable_and_in_the_vocabulary() -> None:
    rig = EngineRig(make=lambda: None, sources=[WeightSource(0, "x")], vocab=7)  # type: ignore[arg-type,return-value]
    assert rig.prompt(50, 3) == rig.prompt(50, 3) != rig.prompt(50, 4)
    assert set(rig.prompt(500)) == set(range(7))


class Scripted:
    """An engine's `generate`, from a list of chunks."""

    capabilities = frozenset({EngineCapability.SEED})

    def __init__(self, chunks: list[GenerateChunk]) -> None:
        self.chunks = chunks

    async def generate(self, request: Any) -> Any:
        for chunk in self.chunks:
            await asyncio.sleep(0)
            yield chunk


async def test_a_watched_call_tells_when_tokens_are_there_or_it_is_over() -> None:
    engine: Any = Scripted([GenerateChunk((1,), (-1.0,), (0,)), GenerateChunk((2, 3), (-1.0, -2.0), (0, 1))])
    watched = engine_rig.Watched(engine, engine_rig.request_of([1], 5))
    await watched.until(2)
    assert len(watched.chunks) == 2
    await watched.until(99)
    called = await watched.task
    assert (called.ids, called.logprobs, called.versions) == ([1, 2, 3], [-1.0, -1.0, -2.0], [0, 0, 1])
    assert called.cached == 0


async def test_a_hung_call_fails_the_test_instead_of_hanging_it() -> None:
    rig = EngineRig(lambda: None, [], 7, patience=0.05)  # type: ignore[arg-type,return-value]
    with pytest.raises(TimeoutError):
        await rig.within(asyncio.Event().wait())


def test_what_is_not_offered_is_skipped_by_name() -> None:
    engine: Any = Scripted([])
    engine_rig.needs(engine, EngineCapability.SEED)
    with pytest.raises(pytest.skip.Exception, match="KV_MOVE"):
        engine_rig.needs(engine, EngineCapability.KV_MOVE)


class Number:
    """As much of a tensor as `gap` and `summed` use."""

    def __init__(self, value: float) -> None:
        self.value = value

    def double(self) -> Number:
        return self

    detach = double

    def norm(self) -> float:
        return abs(self.value)

    def __sub__(self, other: Number) -> Number:
        return Number(self.value - other.value)

    def __add__(self, other: Number) -> Number:
        return Number(self.value + other.value)


def test_the_gap_is_relative_to_the_whole_and_names_must_be_equal() -> None:
    whole = {"a": Number(3.0), "b": Number(4.0)}
    assert gap(whole, whole) == 0
    assert gap({"a": Number(3.5), "b": Number(4.0)}, whole) == pytest.approx(0.1)
    with pytest.raises(AssertionError, match="names differ"):
        gap({"a": Number(3.0)}, whole)
    total = summed([whole, whole, {"a": Number(1.0), "b": Number(-8.0)}])
    assert SimpleNamespace(**{k: v.value for k, v in total.items()}) == SimpleNamespace(a=7.0, b=0.0)
