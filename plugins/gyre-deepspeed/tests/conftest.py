from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from gyre_core import ComponentContext, WeightSource
from gyre_core.testing.rank_pool import RankPool
from gyre_core.testing.ranks import Poison
from gyre_core.testing.support import environment_python, load_module
from gyre_deepspeed.trainer import ENVIRONMENT, DeepSpeedTrainer

LOCAL = Path(__file__).resolve().parents[2] / "gyre-local" / "tests"
"""Tiny models and trees are the embedded trainer's own: both are compared on the same data."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pooled() -> Any:
    """`pooled(options, context)`: a trainer whose ranks are kept for the module's next one."""
    pool = RankPool(DeepSpeedTrainer)
    yield pool.trainer
    await pool.close()


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of DeepSpeed's environment, built if need be."""
    return environment_python(ENVIRONMENT)


@pytest.fixture(scope="session")
def batches() -> Callable[..., Any]:
    """`batches(seed, count)`: micro-batches of step 1."""
    return load_module(LOCAL / "tree_batches.py").make_batches  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def oracle() -> Callable[..., Any]:
    """`oracle(model, batches)`: the gradient, branch by branch."""
    return load_module(LOCAL / "tree_batches.py").gradient  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def expert_oracle(oracle: Callable[..., Any]) -> Callable[..., Any]:
    """`oracle` under the names that files have for experts."""
    return lambda model, work: load_module(LOCAL / "tiny_models.py").per_expert(oracle(model, work))


@pytest.fixture(scope="session")
def told_logprobs() -> Callable[..., Any]:
    """`told_logprobs(model, batch)`, branch by branch."""
    return load_module(LOCAL / "tree_batches.py").logprobs  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model by (kind, seed); made once."""
    root = tmp_path_factory.mktemp("models")

    def find(kind: str = "qwen3", seed: int = 0) -> Path:
        folder = root / f"{kind}-{seed}"
        if not folder.exists():
            load_module(LOCAL / "tiny_models.py").save(kind, folder, seed)
        return folder

    return find


@pytest.fixture
def poison(folder_of: Callable[..., Path], batches: Callable[..., Any], tmp_path: Path) -> Poison:
    """NaN in the embedding of a token that one execution alone has."""
    batch, execution, token = load_module(LOCAL / "tree_batches.py").only_in_one(batches(count=8))
    healthy = folder_of("qwen3-untied")
    poisoned = load_module(LOCAL / "tiny_models.py").poison(healthy, tmp_path / "poisoned", token)
    return Poison(WeightSource(0, str(healthy)), WeightSource(0, str(poisoned)), batch, execution)


@pytest.fixture
def context(tmp_path: Path) -> ComponentContext:
    return ComponentContext(str(tmp_path / "run"), "cell-0", seed=7)
