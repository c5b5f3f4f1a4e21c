"""Objectives by name, and batches cut into a number of shares."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gyre_loss import TreeBatch
from gyre_loss.named import SURROGATES, make_objective
from gyre_loss.objective import EntryLoss, TokenTerms
from gyre_loss.ratios import Truncated
from gyre_loss.shares import shares
from gyre_loss.surrogates import Clip, SequenceClip

NAN = float("nan")


def comb(branches: int) -> TreeBatch:
    """A prompt of three tokens and as many branches of two sampled tokens."""
    tokens = 3 + 2 * branches
    return TreeBatch.from_arrays(
        node_parent=[-1] + [0] * branches,
        node_start=[0, *range(3, tokens + 1, 2)],
        token_ids=list(range(tokens)),
        sampled=[False] * 3 + [True] * (tokens - 3),
        logprobs=[NAN] * 3 + [-1.0] * (tokens - 3),
        versions=[-1] * 3 + [0] * (tokens - 3),
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_shares_hold_every_entry_once_and_are_about_equal(count: int) -> None:
    batch = comb(6)
    found = shares(batch, count)
    assert -(-6 // -(-6 // count)) <= len(found) <= min(count, 6)
    tokens = sorted(int(share.token_ids[t]) for share in found for t in share.entry_token)
    assert tokens == batch.token_ids[batch.entry_token].tolist()
    assert sum(float(share.entry_weight.sum()) for share in found) == pytest.approx(1.0)
    assert max(share.tokens for share in found) <= 3 + 2 * -(-6 // count)


def test_whole_executions_are_not_cut() -> None:
    batch = comb(4)
    assert shares(batch, 3, whole=True) == (batch,)
    with pytest.raises(ValueError, match="count = 0"):
        shares(batch, 0)
    assert np.array_equal(shares(batch, 1)[0].token_ids, batch.token_ids)


def test_objectives_by_name() -> None:
    assert make_objective("ppo", {"low": 0.1, "high": 0.3}).surrogate == Clip(0.1, 0.3, None)
    assert isinstance(make_objective("gspo", {}).surrogate, SequenceClip)
    made = make_objective("ppo", {"proximal": "current", "correction": "truncated", "kl": "k3", "kl_coefficient": 0.1})
    assert isinstance(made.correction, Truncated)
    assert made.kl is not None
    for name in SURROGATES:
        make_objective(name, {})


@dataclass(frozen=True)
class Plain:
    """An objective of one's own: -advantage * logp, scaled."""

    scale: float = 1.0
    needs_entropy: bool = False
    whole_executions: bool = False

    def __call__(self, terms: TokenTerms) -> EntryLoss:
        return EntryLoss(-self.scale * terms.advantage * terms.logp)


def test_an_objective_of_ones_own_is_named_by_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    own = types.ModuleType("own_objectives")
    own.Plain, own.Number = Plain, int
    monkeypatch.setitem(sys.modules, "own_objectives", own)
    assert make_objective("own_objectives:Plain", {"scale": 0.5}) == Plain(0.5)
    for path, options, said in (
        ("own_objectives:Plane", {}, "Plane"),
        ("own_objectives:Plain", {"scael": 1}, "scael"),
        ("own_objectives:Number", {}, "needs_entropy"),
        ("no_such_module:Plain", {}, "no_such_module"),
    ):
        with pytest.raises(ValueError, match=said):
            make_objective(path, options)


@pytest.mark.parametrize(
    ("text", "said"), [("x = (", "SyntaxError"), ("x = y", "NameError: name 'y'"), ("1 / 0", "Zero")]
)
def test_a_module_that_fails_while_it_is_imported_is_a_wrong_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "broken_objectives.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=said):
        make_objective("broken_objectives:Plain", {})


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("pop", {}, "ppo"),
        ("ppo", {"hgih": 0.3}, "high"),
        ("ppo", {"kl": "k1"}, "kl_coefficient"),
        ("ppo", {"proximal": "recoded"}, "recorded"),
        ("reinforce", {"low": 0.2}, "reinforce"),
    ],
)
def test_a_wrong_key_names_the_nearest(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_objective(name, options)
