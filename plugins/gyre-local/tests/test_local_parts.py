"""The parts alone, under random use: pool and tree, sampling, options, the plugin's module."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gyre_core import ComponentContext, Kind, PluginManager
from gyre_local import plugin
from gyre_local.kv.pool import BlockPool
from gyre_local.kv.prefix import PrefixTree
from gyre_local.model.architecture import Architecture, Rope
from gyre_local.options import LocalEngineOptions, LocalTrainerOptions
from gyre_local.serve.sampling import SamplingRows, sample, uniforms
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

ARCH = Architecture("X", 1, 4, 1, 1, 4, 4, 9, 1e-6, 64, True, Rope(1e4))
SIZE = 4


class Cache(RuleBasedStateMachine):
    """Pool and tree against a plain model: `truth` says which token prefix each block was filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(ARCH, 12, SIZE, torch.float32, torch.device("cpu"))
        self.tree = PrefixTree(self.pool, 0)
        self.held: list[tuple[list[int], np.ndarray]] = []
        self.truth: dict[int, bytes] = {}
        self.version = 0

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=22))
    def start(self, tokens: list[int]) -> None:
        """A call starts: its cached prefix is right, it takes what it lacks, fills it and names it."""
        ids = np.array(tokens, np.int32)
        match = self.tree.match(ids, len(ids) - 1)
        for index, block in enumerate([*match.blocks, *([] if match.tail is None else [match.tail])]):
            end = min((index + 1) * SIZE, match.tokens)
            assert self.truth[block].startswith(ids[:end].tobytes())
        best = max((common(self.truth[b], ids[:-1].tobytes()) for b in self.tree._nodes if b in self.truth), default=0)
        assert match.tokens >= best
        self.pool.hold(match.blocks)
        fresh = self.pool.take(-(-len(ids) // SIZE) - len(match.blocks))
        if fresh is None:
            self.pool.release(match.blocks)
            return
        blocks = [*match.blocks, *fresh]
        for index in range(len(match.blocks), len(blocks)):
            self.truth[blocks[index]] = ids[: (index + 1) * SIZE].tobytes()
        self.held.append((blocks, ids))

    @precondition(lambda self: self.held)
    @rule(pick=st.randoms(use_true_random=False), named=st.booleans())
    def end(self, pick: random.Random, named: bool) -> None:
        blocks, ids = self.held.pop(pick.randrange(len(self.held)))
        if named:
            self.tree.insert(ids, blocks, partial=True)
        self.pool.release(blocks)

    @precondition(lambda self: self.held)
    @rule(pick=st.randoms(use_true_random=False))
    def share(self, pick: random.Random) -> None:
        """A running call names its full blocks (as after a prefill chunk)."""
        blocks, ids = self.held[pick.randrange(len(self.held))]
        whole = len(ids) // SIZE * SIZE
        self.tree.insert(ids[:whole], blocks, partial=False)

    @rule()
    def update(self) -> None:
        """New weights: nothing old is found; what runs may not be named any more."""
        self.version += 1
        self.tree.forget_all(self.version)
        for blocks, _ in self.held:
            self.pool.release(blocks)
        self.held = []
        assert len(self.tree) == 0
        assert self.pool.held == 0

    @invariant()
    def blocks_are_in_one_state(self) -> None:
        free, idle = set(self.pool._free), set(self.pool._idle)
        counts = [0] * self.pool.blocks
        for blocks, _ in self.held:
            for block in blocks:
                counts[block] += 1
        assert counts == self.pool._refs
        held = {block for block, count in enumerate(counts) if count}
        assert not free & idle
        assert free | idle | held == set(range(self.pool.blocks))
        assert len(free) == len(self.pool._free)
        assert idle == {block for block in self.tree._nodes if not counts[block]}

    @invariant()
    def names_are_true(self) -> None:
        for block, node in self.tree._nodes.items():
            path, up = node.key, node.parent
            while up is not None and up.parent is not None:
                path, up = up.key + path, up.parent
            assert self.truth[block].startswith(path)


def common(left: bytes, right: bytes) -> int:
    size = 0
    while size + 4 <= min(len(left), len(right)) and left[size : size + 4] == right[size : size + 4]:
        size += 4
    return size // 4


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def rows_of(count: int, **how: Any) -> SamplingRows:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | how
    return SamplingRows(
        np.full(count, plain["temperature"], np.float32),
        np.full(count, plain["top_p"], np.float32),
        np.full(count, plain["top_k"], np.int64),
        np.arange(count, dtype=np.uint64),
        np.zeros(count, np.uint64),
    )


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 2.0, "top_k": 5, "top_p": 0.6}]
)
def test_frequencies_are_the_distributions(how: dict[str, Any]) -> None:
    """40000 draws against the filtered distribution, written out plainly; a z-score of 5 on any token fails."""
    logits = torch.tensor([1.5, -0.3, 0.9, 0.2, -2.0, 1.1, -1.0, 0.4])
    count = 40_000
    ids, logprobs = sample(logits.expand(count, -1), rows_of(count, **how))
    full = torch.softmax(logits.double() / how.get("temperature", 1.0), -1).numpy()
    kept = full.copy()
    order = np.argsort(-kept)
    if how.get("top_k"):
        kept[order[how["top_k"] :]] = 0
    mass = np.cumsum(kept[order]) / kept.sum()
    if how.get("top_p"):
        kept[order[1:][mass[:-1] >= how["top_p"]]] = 0
    kept /= kept.sum()
    seen = np.bincount(ids, minlength=8) / count
    assert np.all(np.abs(seen - kept) <= 5 * np.sqrt(kept * (1 - kept) / count))
    assert np.allclose(logprobs[:200], np.log(full)[ids[:200]], atol=1e-5)


def test_a_rows_draw_depends_on_its_seed_and_index_alone() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    rows = rows_of(6)
    ids, _ = sample(logits, rows)
    for row in range(6):
        one = SamplingRows(*(getattr(rows, name)[row : row + 1] for name in SamplingRows.__slots__))
        assert sample(logits[row : row + 1], one)[0] == [ids[row]]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_uniforms_stay_below_one(seed: int, index: int) -> None:
    value = uniforms(np.array([seed], np.uint64), np.array([index], np.uint64))[0]
    assert 0 <= value < 1


def test_uniforms_are_uniform() -> None:
    values = uniforms(np.arange(100_000, dtype=np.uint64), np.zeros(100_000, np.uint64))
    along = uniforms(np.full(100_000, 3, np.uint64), np.arange(100_000, dtype=np.uint64))
    for found in (values, along):
        counts = np.histogram(found, 20, (0, 1))[0]
        assert np.all(np.abs(counts - 5000) < 5 * 69)
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02


def test_mixed_batches_keep_greedy_rows_greedy() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    rows = rows_of(5)
    rows.temperature[[1, 3]] = 0
    rows.top_k[2] = 1
    ids, logprobs = sample(logits, rows)
    best = logits.argmax(-1).tolist()
    assert [ids[i] for i in (1, 2, 3)] == [best[i] for i in (1, 2, 3)]
    plain = torch.log_softmax(logits, -1)
    assert logprobs == pytest.approx([float(plain[i, t]) for i, t in enumerate(ids)], abs=1e-6)


def test_options_refuse_what_cannot_work() -> None:
    for options, match in (
        (lambda: LocalEngineOptions(dtype="int8"), "dtype"),
        (lambda: LocalEngineOptions(kv_tokens=0), "kv_tokens"),
        (lambda: LocalEngineOptions(max_context=-1), "max_context"),
        (lambda: LocalTrainerOptions(method="fast"), "method"),
        (lambda: LocalTrainerOptions(learning_rate=0), "learning_rate"),
        (lambda: LocalTrainerOptions(beta1=1.0), "betas"),
        (lambda: LocalTrainerOptions(weight_decay=-1), "weight_decay"),
    ):
        with pytest.raises(ValueError, match=match):
            options()


def test_the_plugin_names_what_it_brings(context: ComponentContext) -> None:
    manager = PluginManager()
    manager.add(plugin, "gyre-local", "0")
    for kind, options in ((Kind.ENGINE, LocalEngineOptions), (Kind.TRAINER, LocalTrainerOptions)):
        assert manager.options_type(kind, "local") is options
        made = manager.create(kind, "local", {}, context)
        assert type(made) is manager.load(kind, "local")
        assert made.version == -1


def test_the_plugins_module_is_light() -> None:
    """No torch, no transformers, no numpy: listing plugins must not load them."""
    code = (
        "import sys, gyre_local.plugin as p, gyre_local.options; list(p.gyre_register()); "
        "print(sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
