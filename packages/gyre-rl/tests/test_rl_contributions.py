"""Contributions whose word was lost on its way: counted on the core, not committed, and their batches leased again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gyre_core import BatchStats, CellId, Contribution, InfrastructureError, StepResult, WeightSource
from gyre_rl.cell.host import CellHost
from gyre_rl.cell.messages import AddContribution, Added, ApplyStep, LeaseDone
from gyre_rl.config import load
from gyre_rl.procs.child import ChildSpec
from gyre_rl.run.directory import RunDirectory
from gyre_rl.run.training import Training
from gyre_sched import CellId as SchedCell
from gyre_sched import events as sched

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
CELL = CellId("cell-1", 1)


def contribution(name: str, *batches: str) -> Contribution:
    return Contribution(name, 0, 0, batches, f"{name}.safetensors", BatchStats(1.0, 10 * len(batches), 5, 0.1))


class Trainer:
    """A core's trainer that counts, and refuses as the contract says."""

    def __init__(self) -> None:
        self.version, self.added = 0, []

    async def add_contribution(self, new: Contribution) -> None:
        if {batch for other in self.added for batch in other.batch_ids} & set(new.batch_ids):
            raise ValueError("got micro-batches that were counted already")
        if new.id == "spoilt":
            raise ValueError("it is spoilt")
        self.added.append(new)

    async def step(self, divisor: float) -> StepResult:
        self.version += 1
        self.added.clear()
        return StepResult(self.version, 1.0, 0.1, 0.0)

    async def publish(self, folder: str) -> WeightSource:
        return WeightSource(self.version, folder)


def core(trainer: Trainer) -> CellHost:
    engine: Any = SimpleNamespace(capabilities=frozenset())
    counting: Any = trainer
    source = WeightSource(0, ".")
    body: Any = SimpleNamespace(kv=None, core=True, source=source)
    moves: Any = SimpleNamespace()
    return CellHost(ChildSpec("h", "cell-0", 1, "", "t", ".", {}), body, engine, counting, moves)


async def test_the_core_tells_what_counted_batches_that_come_again() -> None:
    trainer = Trainer()
    host = core(trainer)
    first, second = contribution("a", "b0", "b1"), contribution("b", "b2")
    assert await host.add(AddContribution(first)) == Added((first,))
    assert await host.add(AddContribution(second)) == Added((second,))
    assert await host.add(AddContribution(first)) == Added((first,)), "asked twice, counted once"
    assert await host.add(AddContribution(contribution("c", "b1", "b2", "b3"))) == Added((first, second))
    assert trainer.added == [first, second]
    with pytest.raises(ValueError, match="spoilt"):
        await host.add(AddContribution(contribution("spoilt", "b3")))
    third = contribution("d", "b3")
    assert await host.add(AddContribution(third)) == Added((third,)), "what was refused is not in the sum"
    await host.apply(ApplyStep(0, 1.0, "weights", None))
    again = contribution("e", "b0")
    assert await host.add(AddContribution(again)) == Added((again,)), "the next step has a sum of its own"


class Case:
    """A step's training over a core; the word of a contribution may be lost."""

    def __init__(self, folder: Path) -> None:
        self.trainer, self.lose = Trainer(), False
        self.host = core(self.trainer)
        self.posted: list[Any] = []
        self.events: list[Any] = []
        bus: Any = SimpleNamespace(emit=self.events.append)
        none: Any = None
        self.directory = RunDirectory(folder)
        self.directory.contributions(0).mkdir(parents=True)
        cells: Any = SimpleNamespace(add=self.add, infos={})
        self.training = Training(load(QUICKSTART), self.directory, cells, none, none, self.posted.append, bus)

    async def add(self, new: Contribution) -> tuple[Contribution, ...]:
        added = await self.host.add(AddContribution(new))
        if self.lose:
            raise InfrastructureError("asking cell-0#1 for /add", got="no answer in 600 s")
        return added.counted

    async def done(self, lease: int, made: Contribution, *leased: str) -> Any:
        self.training._leases[lease] = (CELL, 0, leased or made.batch_ids)
        await self.training.lease_done(CELL, LeaseDone(lease, made, seconds=2.0))
        return self.posted[-1]

    @property
    def counted(self) -> list[Contribution]:
        return [item for _, item in self.training._steps[0].contributions]


async def test_batches_whose_word_was_lost_are_committed_with_what_counted_them(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.lose = True
    first = contribution("000000.000001.cell-1", "b0", "b1")
    assert isinstance(await case.done(1, first), sched.LeaseFailed)
    case.lose = False
    told = await case.done(2, contribution("000000.000002.cell-1", "b1", "b2"))
    assert isinstance(told, sched.ContributionCommitted)
    assert (told.cell, told.lease, told.batches, told.seconds) == (SchedCell(*CELL), 2, ("b1",), 2.0)
    assert case.counted == [first], "the second is not in the sum: b2 goes back to the ledger"
    told = await case.done(3, contribution("000000.000003.cell-1", "b0"))
    assert told.batches == ("b0",)
    third = contribution("000000.000004.cell-1", "b2")
    told = await case.done(4, third)
    assert told.batches == ("b2",)
    assert case.counted == case.trainer.added == [first, third], "each once"
    assert case.training.trained_tokens == 30
    assert [event.batches for event in case.events] == [2, 1]
    assert sorted(path.name for path in case.directory.contributions(0).iterdir()) == [
        "000000.000001.cell-1.contribution.json",
        "000000.000004.cell-1.contribution.json",
    ]
