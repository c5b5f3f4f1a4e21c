"""pytest fixtures that the suites of every trainer with ranks need; a conftest imports them all.

It gives two itself: `library` (a `Library`), and `pooled`, which makes trainers that share ranks (`rank_pool`), at the
scope that its tests' event loop has. Tiny models and trees are the embedded trainer's own (`tiny_models.py` and
`tree_batches.py` in its tests folder): all trainers are compared on the same data. Not here: what is checked (`ranks`,
`trainers`, `publishing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gyre_core.engine import WeightSource
from gyre_core.registration import ComponentContext
from gyre_core.testing.ranks import Poison
from gyre_core.testing.support import environment_python, load_module

__all__ = [
    "batches",
    "context",
    "expert_oracle",
    "folder_of",
    "oracle",
    "poison",
    "python",
    "told_logprobs",
]
"""What `from gyre_core.testing.rank_fixtures import *` brings into a conftest."""


@dataclass(frozen=True, slots=True)
class Library:
    """A trainer with ranks."""

    trainer: type[Any]
    environment: Path
    """Its environment.toml."""
    helpers: Path
    """The folder of `tiny_models.py` and `tree_batches.py`."""

    @property
    def models(self) -> ModuleType:
        """`tiny_models.py`."""
        return load_module(self.helpers / "tiny_models.py")

    @property
    def trees(self) -> ModuleType:
        """`tree_batches.py`."""
        return load_module(self.helpers / "tree_batches.py")


@pytest.fixture(scope="session")
def python(library: Library) -> str:
    """The interpreter of the library's environment, built if need be."""
    return environment_python(library.environment)


@pytest.fixture(scope="session")
def batches(library: Library) -> Callable[..., Any]:
    """`batches(seed, count)`: micro-batches of step 1."""
    found: Callable[..., Any] = library.trees.make_batches
    return found


@pytest.fixture(scope="session")
def oracle(library: Library) -> Callable[..., Any]:
    """`oracle(model, batches)`: the gradient, branch by branch."""
    found: Callable[..., Any] = library.trees.gradient
    return found


@pytest.fixture(scope="session")
def expert_oracle(library: Library, oracle: Callable[..., Any]) -> Callable[..., Any]:
    """`oracle` under the names that files have for experts."""
    return lambda model, work: library.models.per_expert(oracle(model, work))


@pytest.fixture(scope="session")
def told_logprobs(library: Library) -> Callable[..., Any]:
    """`told_logprobs(model, batch)`, branch by branch."""
    found: Callable[..., Any] = library.trees.logprobs
    return found


@pytest.fixture(scope="session")
def folder_of(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model by (kind, seed, layers); made once."""
    root = tmp_path_factory.mktemp("models")

    def find(kind: str = "qwen3", seed: int = 0, layers: int = 3) -> Path:
        folder = root / f"{kind}-{seed}-{layers}"
        if not folder.exists():
            library.models.save(kind, folder, seed, num_hidden_layers=layers)
        return folder

    return find


@pytest.fixture
def poison(library: Library, folder_of: Callable[..., Path], batches: Callable[..., Any], tmp_path: Path) -> Poison:
    """NaN in the embedding of a token that one execution alone has."""
    batch, execution, token = library.trees.only_in_one(batches(count=8))
    healthy = folder_of("qwen3-untied")
    poisoned = library.models.poison(healthy, tmp_path / "poisoned", token)
    return Poison(WeightSource(0, str(healthy)), WeightSource(0, str(poisoned)), batch, execution)


@pytest.fixture
def context(tmp_path: Path) -> ComponentContext:
    """Of one cell."""
    return ComponentContext(str(tmp_path / "run"), "cell-0", seed=7)
