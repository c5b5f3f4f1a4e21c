"""The engine suite fails where it should: each mutant has a fault that some engine has."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_core import ComponentContext, FinishReason, GenerateChunk, GenerateRequest, WeightSource
from gyre_core.testing.engines import EngineConformance, EngineRig
from gyre_local.options import LocalEngineOptions
from gyre_local.serve import passes
from gyre_local.serve.core import EngineCore
from gyre_local.serve.engine import LocalEngine
from gyre_local.serve.sessions import Sessions


class Rewriting(LocalEngine):
    """Changes chunks on their way out."""

    def rewrite(self, chunk: GenerateChunk) -> GenerateChunk:
        return chunk

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        async for chunk in super().generate(request):
            yield self.rewrite(chunk)


class SwallowsStop(Rewriting):
    def rewrite(self, chunk: GenerateChunk) -> GenerateChunk:
        if chunk.finish is not FinishReason.STOP:
            return chunk
        return dataclasses.replace(
            chunk, token_ids=chunk.token_ids[:-1], logprobs=chunk.logprobs[:-1], versions=chunk.versions[:-1]
        )


class NamesThePresentVersion(Rewriting):
    def rewrite(self, chunk: GenerateChunk) -> GenerateChunk:
        return dataclasses.replace(chunk, versions=(self.version + 1,) * len(chunk.token_ids))


class DropsTheLastChunkOnAbort(Rewriting):
    def rewrite(self, chunk: GenerateChunk) -> GenerateChunk:
        if chunk.finish is not FinishReason.ABORT:
            return chunk
        return GenerateChunk((1,), (-1.0,), (0,), FinishReason.ABORT, chunk.cached_tokens)


class SaysNothingOfTheCache(Rewriting):
    def rewrite(self, chunk: GenerateChunk) -> GenerateChunk:
        return dataclasses.replace(chunk, cached_tokens=None)


class KeepsOldPrefixes(LocalEngine):
    """Its cache ignores the policy version, as caches keyed by tokens alone do."""


def keep_old_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(core: EngineCore, weights: Any, version: int) -> None:
        core.weights, core.version = weights, version
        core.tree.version = version

    monkeypatch.setattr(EngineCore, "swap_weights", swap)


def raw_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = passes.sample

    def sample(logits: torch.Tensor, rows: Any) -> tuple[list[int], list[float]]:
        ids, _ = real(logits, rows)
        return ids, torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()

    monkeypatch.setattr(passes, "sample", sample)


def forget_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sessions, "cancel", lambda self, session: self._reserved.pop(session, []) and None)


def trust_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: Sessions, session: str, tokens: Any, blocks: Any) -> None:
        self._tree.insert(tokens, list(blocks), partial=True)

    monkeypatch.setattr(Sessions, "commit", commit)


def ignore_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    real = passes.sampling_rows
    monkeypatch.setattr(
        passes, "sampling_rows", lambda calls: dataclasses.replace(real(calls), top_k=real(calls).top_k * 0)
    )


def ignore_top_p(monkeypatch: pytest.MonkeyPatch) -> None:
    real = passes.sampling_rows
    monkeypatch.setattr(
        passes, "sampling_rows", lambda calls: dataclasses.replace(real(calls), top_p=real(calls).top_p ** 0)
    )


def neighbours_share_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    real = passes.sampling_rows
    monkeypatch.setattr(
        passes, "sampling_rows", lambda calls: dataclasses.replace(real(calls), seed=real(calls).seed * 0)
    )


MUTANTS = [
    (SwallowsStop, None, "test_a_stop_token_ends_the_call_and_is_its_last_token"),
    (NamesThePresentVersion, None, "test_chunks_are_well_formed"),
    (NamesThePresentVersion, None, "test_an_update_in_mid_call_marks_each_token_with_its_version"),
    (DropsTheLastChunkOnAbort, None, "test_an_abort_loses_no_token"),
    (SaysNothingOfTheCache, None, "test_a_turn_finds_its_session_in_the_cache"),
    (LocalEngine, keep_old_prefixes, "test_no_cached_prefix_survives_an_update"),
    (LocalEngine, keep_old_prefixes, "test_going_back_to_an_older_version_finds_nothing_old"),
    (LocalEngine, raw_logits, "test_logprobs_are_of_the_tempered_distribution_over_the_whole_vocabulary"),
    (LocalEngine, forget_to_release, "test_reservations_are_bounded_and_given_back"),
    (LocalEngine, trust_any_block, "test_a_commit_must_be_of_the_sessions_blocks_and_of_the_present_version"),
    (LocalEngine, ignore_top_k, "test_top_k_and_top_p_cut_the_tail"),
    (LocalEngine, ignore_top_p, "test_top_k_and_top_p_cut_the_tail"),
    (LocalEngine, neighbours_share_a_number, "test_calls_without_a_seed_differ"),
    (LocalEngine, neighbours_share_a_number, "test_a_seed_fixes_the_tokens_whatever_else_runs"),
]


@pytest.mark.parametrize(("engine", "patch", "check"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
async def test_the_suite_catches(
    engine: type[LocalEngine],
    patch: Callable[[pytest.MonkeyPatch], None] | None,
    check: str,
    folder_of: Callable[..., Path],
    context: ComponentContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = LocalEngineOptions(kv_tokens=4096, max_context=256, prefill_tokens=64, chunk_tokens=1)
    sources = [WeightSource(seed, str(folder_of("qwen3", seed))) for seed in range(2)]
    rig = EngineRig(lambda: engine(options, context), sources, vocab=320, tolerance=1e-4, patience=30.0)
    if patch is not None:
        patch(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await getattr(EngineConformance(), check)(rig)
