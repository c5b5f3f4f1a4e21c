"""Ranks that outlive their trainer, for tests: importing and initialising their library takes longer than any test.

A trainer of the pool takes living ranks with its options if there are any, and gives them back when it is closed. Ranks
that have the wanted model already are set back to its first state (weights, zero moments, no steps) as a checkpoint
would; only others build it. Invariant: what a test finds is what a new trainer would have, and at most `keep` rank
processes lie idle. Not here: ranks that died; they are never taken back.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_core.engine import WeightSource
from gyre_core.facts import ModelFacts
from gyre_core.ranks import RankGroup
from gyre_core.ranks.tensorfile import files_of
from gyre_core.registration import ComponentContext


@dataclass(frozen=True, slots=True)
class Built:
    """What ranks have built, and the files of its first state."""

    location: str
    core: bool
    shapes: Mapping[str, tuple[int, ...]]
    facts: ModelFacts | None
    files: tuple[str, ...]
    optimizer: str = ""

    def serves(self, location: str, core: bool) -> bool:
        """Whether it can be set back to what is wanted; a core's ranks do for a satellite."""
        return self.location == location and (self.core or not core)


@dataclass(frozen=True, slots=True)
class Idle:
    """Ranks that wait for a trainer with these options."""

    options: str
    group: RankGroup
    built: Built | None


class RankPool:
    """The idle ranks of one class of trainers, oldest first."""

    def __init__(self, trainer: type[Any], keep: int = 8) -> None:
        self._keep = keep
        self._idle: list[Idle] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="gyre-ranks-")
        self._pooled = _pooled(trainer, self)

    def trainer(self, options: object, context: ComponentContext) -> Any:
        """A trainer that takes its ranks from the pool and gives them back."""
        return self._pooled(options, context)

    def folder(self) -> Path:
        """A new folder that lives as long as the pool."""
        return Path(tempfile.mkdtemp(dir=self._scratch.name))

    def take(self, options: str, source: WeightSource | None, core: bool) -> Idle | None:
        """Living ranks with these options, best those that need not build."""
        found = [idle for idle in self._idle if idle.options == options and idle.group.alive]
        if not found:
            return None
        ready = [
            idle for idle in found if source and idle.built is not None and idle.built.serves(source.location, core)
        ]
        exact = [idle for idle in ready if idle.built is not None and idle.built.core is core]
        best = (exact or ready or found)[-1]
        self._idle.remove(best)
        return best

    async def give(self, idle: Idle) -> None:
        """Take ranks back; the oldest beyond `keep` processes end."""
        self._idle.append(idle)
        await self.make_room(0)

    async def make_room(self, ranks: int) -> None:
        """End the oldest idle ranks until so many more stay within `keep`."""
        while self._idle and sum(idle.group.plan.world for idle in self._idle) + ranks > self._keep:
            await self._idle.pop(0).group.close()

    async def close(self) -> None:
        """End all ranks."""
        while self._idle:
            await self._idle.pop().group.close()
        self._scratch.cleanup()


def _key(options: Any) -> str:
    """Options that ranks cannot tell apart have one: how versions travel is the cell's affair, and so is the rate of
    each step."""
    return repr(dataclasses.replace(options, publish="disk", full_every=1, learning_rate=1.0))


def _pooled(trainer: type[Any], pool: RankPool) -> type[Any]:
    class Pooled(trainer):  # type: ignore[misc]
        _group: RankGroup | None
        _built: Built | None = None

        async def _ranks(self) -> None:
            if self._group is None:
                found = pool.take(_key(self.options), self._source, self._core)
                if found is not None:
                    self._group, self._built = found.group, found.built
                else:
                    await pool.make_room(self.plan.world)
            elif not self._group.alive:
                self._built = None
            await super()._ranks()

        async def _build(self, source: WeightSource) -> None:
            built, self._built = self._built, None
            if built is not None and built.serves(source.location, self._core):
                self._shapes, self.facts = dict(built.shapes), built.facts
                await self._set_back(built, source)
            else:
                await super()._build(source)
                built = await self._first_state(source)
            self._built = built

        async def _set_back(self, built: Built, source: WeightSource) -> None:
            await self._ask("discard")
            if self._core:
                await self._ask("restore", {"files": built.files, "optimizer": built.optimizer, "steps": 0})
            else:
                await self._ask("load", {"files": list(map(str, files_of(Path(source.location))))})

        async def _first_state(self, source: WeightSource) -> Built:
            location, shapes, facts = source.location, dict(self._shapes), self.facts
            if not self._core:
                return Built(location, False, shapes, facts, ())
            files, optimizer = await self._save_into(pool.folder())
            return Built(location, True, shapes, facts, tuple(files), optimizer)

        async def offload(self) -> None:
            self._built = None  # ranks that are away cannot be set back
            await super().offload()

        async def close(self) -> None:
            if self._group is not None and self._group.alive:
                await pool.give(Idle(_key(self.options), self._group, self._built))
                self._group = None
            await super().close()

    return Pooled
