from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from gyre_core.testing.rank_fixtures import *  # noqa: F403 - fixtures are found by their names
from gyre_core.testing.rank_fixtures import Library
from gyre_core.testing.rank_pool import RankPool
from gyre_megatron.trainer import ENVIRONMENT, MegatronTrainer


@pytest.fixture(scope="session")
def library() -> Library:
    """Its tiny models and trees are the embedded trainer's own."""
    return Library(MegatronTrainer, ENVIRONMENT, Path(__file__).resolve().parents[2] / "gyre-local" / "tests")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pooled(library: Library) -> AsyncIterator[Callable[..., Any]]:
    """`pooled(options, context)`: a trainer whose ranks are kept for the module's next one."""
    pool = RankPool(library.trainer)
    yield pool.trainer
    await pool.close()
