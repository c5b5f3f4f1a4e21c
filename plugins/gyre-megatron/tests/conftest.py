from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import gyre_loss as gl
import pytest
import pytest_asyncio
from gyre_core import ComponentContext, ConfigError, MicroBatch
from gyre_core.ranks import RankGroup
from gyre_core.ranks.places import interpreter
from gyre_megatron.options import MegatronTrainerOptions
from gyre_megatron.trainer import ENVIRONMENT, MegatronTrainer

_SHARED = Path(__file__).resolve().parents[2] / "gyre-local" / "tests"


def _module(name: str) -> ModuleType:
    """Tiny models and trees are the embedded trainer's own: both are compared on the same data."""
    spec = importlib.util.spec_from_file_location(f"gyre_megatron_{name}", _SHARED / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Pool:
    """Ranks that outlive their trainer: importing Megatron-Core takes longer than any test."""

    def __init__(self) -> None:
        self.idle: dict[str, list[RankGroup]] = {}

    def take(self, trainer: Pooled) -> RankGroup | None:
        kept = [group for group in self.idle.pop(trainer.key, []) if group.alive]
        found = kept.pop() if kept else None
        self.idle[trainer.key] = kept
        return found

    async def close(self) -> None:
        for groups in self.idle.values():
            for group in groups:
                await group.close()


class Pooled(MegatronTrainer):
    """A trainer that takes its ranks from a pool and gives them back."""

    def __init__(self, options: MegatronTrainerOptions, context: ComponentContext, pool: Pool) -> None:
        super().__init__(options, context)
        self.pool, self.key = pool, repr(options)

    async def _ranks(self) -> None:
        if self._group is None:
            self._group = self.pool.take(self)
        await super()._ranks()

    async def close(self) -> None:
        if self._group is not None and self._group.alive:
            self.pool.idle.setdefault(self.key, []).append(self._group)
            self._group = None
        await super().close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pooled() -> Any:
    """`pooled(options, context)`: a trainer whose ranks are kept for the module's next one."""
    pool = Pool()
    yield lambda options, context: Pooled(options, context, pool)
    await pool.close()


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of Megatron's environment; the test is skipped without one."""
    try:
        return str(interpreter("megatron", ENVIRONMENT, "", "."))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def batches() -> Callable[..., Any]:
    """`batches(seed, count)`: micro-batches of step 1."""
    return _module("tree_batches").make_batches  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model by (kind, seed); made once."""
    root = tmp_path_factory.mktemp("models")

    def find(kind: str = "qwen3", seed: int = 0) -> Path:
        folder = root / f"{kind}-{seed}"
        if not folder.exists():
            _module("tiny_models").save(kind, folder, seed)
        return folder

    return find


@pytest.fixture
def context(tmp_path: Path) -> ComponentContext:
    return ComponentContext(str(tmp_path / "run"), "cell-0", seed=7)


@pytest.fixture(scope="session")
def oracle() -> Callable[[Any, Sequence[MicroBatch]], Mapping[str, Any]]:
    """Branch by branch through the model's own attention."""

    def gradient(model: Any, work: Sequence[MicroBatch]) -> Mapping[str, Any]:
        model.zero_grad()
        for batch in work:
            tree = gl.from_bytes(bytearray(batch.blob))
            gl.tree_loss(model, tree, gl.PolicyLoss(), method="branches").loss.backward()
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        return found

    return gradient
