"""Faults that users of agentic RL systems met in the field; each with its right value worked out by hand."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import gyre_loss as gl
import numpy as np
import pytest
import torch
from gyre_loss.aggregate import Constant, group_token_mean, sequence_mean, token_mean, two_level
from gyre_loss.groups import GroupNote
from gyre_loss.kl import k3
from gyre_loss.objective import KLPenalty, TokenTerms
from gyre_loss.ratios import (
    ExecutionMasked,
    Masked,
    Truncated,
    behaviour_is_proximal,
    current_is_proximal,
    recorded_proximal,
)
from gyre_loss.surrogates import Clip, ClippedWeight, Reinforce, SequenceClip

NAN = float("nan")


def tree(*nodes, versions=None):
    """Arrays from (parent, text) nodes; in the text lower case is context, upper case is sampled."""
    text = "".join(part for _, part in nodes)
    sampled = np.array([letter.isupper() for letter in text])
    start = np.cumsum([0] + [len(part) for _, part in nodes])
    version = np.zeros(len(text), int) if versions is None else np.array(versions)
    return {
        "node_parent": [parent for parent, _ in nodes],
        "node_start": start,
        "token_ids": [ord(letter.lower()) - ord("a") for letter in text],
        "sampled": sampled,
        "logprobs": np.where(sampled, -1.0, NAN),
        "versions": np.where(sampled, version, -1),
    }


def record(name, status, score, *nodes, **more):
    return gl.ExecutionRecord(name, status, score, tree(*nodes, **more))


def terms(logp, **more):
    """TokenTerms of one execution from log-probabilities; everything else as given or neutral."""
    size = len(logp)
    values = {
        "behaviour": [-1.0] * size,
        "recorded_proximal": [NAN] * size,
        "reference": [NAN] * size,
        "advantage": [1.0] * size,
        **more,
    }
    return TokenTerms(
        logp=torch.tensor(logp, dtype=torch.float64, requires_grad=True),
        entropy=None,
        execution=torch.tensor(more.pop("execution", [0] * size)),
        execution_tokens=torch.tensor(more.pop("execution_tokens", [size])),
        execution_ids=tuple(more.pop("ids", ("e",))),
        **{
            name: torch.tensor(values[name], dtype=torch.float64)
            for name in ("behaviour", "recorded_proximal", "reference", "advantage")
        },
    )


# 6. Which tokens carry loss


def test_6_context_and_tool_tokens_carry_no_loss():
    group = gl.assemble_group(
        [record("e", "completed", 1.0, (-1, "sysABtoolCD"))], trainer_version=0, single="raw", gate=None
    )
    batch = group.batch
    letters = [chr(int(batch.token_ids[t]) + ord("a")) for t in batch.entry_token]
    assert letters == ["a", "b", "c", "d"]
    assert batch.entry_weight.tolist() == [0.25] * 4


# 8. One execution, three policy versions


def test_8_mixed_versions_are_counted_and_masked_before_the_denominators():
    nodes = (-1, "pABCDEF")
    versions = [-1, 3, 3, 4, 4, 5, 5]
    free = gl.assemble_group([record("e", "completed", 1.0, nodes, versions=versions)], trainer_version=5)
    assert free.staleness == {2: 2, 1: 2, 0: 2}
    assert free.masked_tokens == 0
    assert free.batch.entry_weight.tolist() == pytest.approx([1 / 6] * 6)
    bound = gl.assemble_group(
        [record("e", "completed", 1.0, nodes, versions=versions)],
        trainer_version=5,
        age=gl.StalenessPolicy(max_staleness=1),
    )
    assert bound.masked_tokens == 2
    assert bound.staleness == {1: 2, 0: 2}
    assert bound.batch.entry_weight.tolist() == [0.25] * 4
    assert bound.batch.entry_version.tolist() == [4, 4, 5, 5]


def test_8_a_wholly_stale_execution_is_in_neither_baseline_nor_loss():
    group = gl.assemble_group(
        [
            record("old", "completed", 1.0, (-1, "pA"), versions=[-1, 1]),
            record("x", "completed", 0.5, (-1, "pB"), versions=[-1, 5]),
            record("y", "completed", 0.0, (-1, "pC"), versions=[-1, 5]),
        ],
        trainer_version=5,
        age=gl.StalenessPolicy(max_staleness=2),
        estimator=gl.centre,
    )
    assert group.executions == {"stale": 1, "completed": 2}
    assert group.advantages.baseline == 0.25
    assert group.advantages.advantage.tolist() == [0.0, 0.25, -0.25]
    assert group.batch.entry_weight.tolist() == [0.5, 0.5]


def test_8_versions_from_the_future_are_an_error():
    with pytest.raises(ValueError, match=r"versions\[0\] = 7; expected at most the trainer's version, 5"):
        gl.assemble_group([record("e", "completed", 1.0, (-1, "pA"), versions=[-1, 7])], trainer_version=5)


# 9. A correction that is configured and does nothing


def test_9_a_correction_that_cannot_act_is_refused():
    with pytest.raises(ValueError, match="behaviour policy is its own proximal policy"):
        gl.PolicyLoss(correction=Truncated(2.0), proximal=behaviour_is_proximal)


def test_9_a_missing_log_probability_is_an_error_not_a_ratio_of_one():
    with pytest.raises(ValueError, match=r"entry_proximal\[0\] is NaN"):
        gl.PolicyLoss(proximal=recorded_proximal)(terms([-1.0]))
    with pytest.raises(ValueError, match=r"entry_reference\[1\] is NaN"):
        gl.PolicyLoss(kl=KLPenalty(k3, 0.1))(terms([-1.0, -1.0], reference=[-1.0, NAN]))


@pytest.mark.parametrize("surrogate", [Clip(), ClippedWeight(), Reinforce(), SequenceClip()])
def test_9_every_surrogate_is_corrected(surrogate):
    """log proximal/behaviour = ln 3 and -ln 4: truncated at 2 the weights are 2 and 1/4; masked to [0.5, 5] 3 and 0."""
    behaviour = [-1.0 - math.log(3), -1.0 + math.log(4)]

    def gradient(correction):
        given = terms([-1.0, -1.0], behaviour=behaviour, execution_tokens=[2])
        loss = gl.PolicyLoss(surrogate, current_is_proximal, correction)(given)
        return torch.autograd.grad(loss.loss.sum(), given.logp)[0].tolist(), loss.seen

    assert gradient(None)[0] == pytest.approx([-1.0, -1.0])
    truncated, seen = gradient(Truncated(2.0))
    assert truncated == pytest.approx([-2.0, -0.25])
    assert seen["correction_cut"].tolist() == [1.0, 0.0]
    masked, seen = gradient(Masked(0.5, 5.0))
    assert masked == pytest.approx([-3.0, 0.0])
    assert seen["correction_masked"].tolist() == [0.0, 1.0]
    # geometric mean sqrt(3/4) = 0.866: inside [0.8, 1.2], outside [0.9, 1.1]
    assert gradient(ExecutionMasked(0.8, 1.2))[0] == pytest.approx([-1.0, -1.0])
    assert gradient(ExecutionMasked(0.9, 1.1))[0] == pytest.approx([0.0, 0.0])


# 12. Fan-out counts once


def test_12_a_rollout_of_many_rows_is_one_vote():
    """A with three branches scores 1, B and C with one row score 0: the mean is 1/3, not 3/5."""
    group = gl.assemble_group(
        [
            record("A", "completed", 1.0, (-1, "pA"), (0, "xB"), (0, "yC"), (0, "zD")),
            record("B", "completed", 0.0, (-1, "pE")),
            record("C", "completed", 0.0, (-1, "pF")),
        ],
        trainer_version=0,
        estimator=gl.centre,
    )
    assert group.advantages.baseline == pytest.approx(1 / 3)
    assert group.advantages.advantage.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    weight_of_a = group.batch.entry_weight[group.batch.entry_execution == 0]
    assert weight_of_a.tolist() == pytest.approx([1 / 12] * 4)
    assert np.bincount(group.batch.entry_execution, group.batch.entry_weight).tolist() == pytest.approx([1 / 3] * 3)


# 13. Groups of uneven size


def test_13_groups_of_uneven_size_stay_apart():
    one = gl.group_advantages([1.0, 0.0], ["completed"] * 2, estimator=gl.centre)
    other = gl.group_advantages([4.0, 4.0, 1.0], ["completed"] * 3, estimator=gl.centre)
    assert one.advantage.tolist() == [0.5, -0.5]
    assert other.advantage.tolist() == [1.0, 1.0, -2.0]
    together = gl.group_advantages([1.0, 0.0, 4.0, 4.0, 1.0], ["completed"] * 5, estimator=gl.centre)
    assert together.advantage.tolist() == [-1.0, -2.0, 2.0, 2.0, -1.0], "what a global group would have said"


def test_13_grpo_and_leave_one_out_by_hand():
    """Scores 1, 1, 4: mean 2, sum of squares 6, sample std sqrt(3); others' means 2.5, 2.5, 1."""
    statuses = ["completed"] * 3
    got = gl.group_advantages([1.0, 1.0, 4.0], statuses).advantage
    assert got.tolist() == pytest.approx([-1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5], rel=1e-5)
    got = gl.group_advantages([1.0, 1.0, 4.0], statuses, estimator=gl.leave_one_out).advantage
    assert got.tolist() == pytest.approx([-1.5, -1.5, 3.0])


# 14. A group of one


def test_14_a_group_of_one_gets_no_advantage_unless_asked():
    zero = gl.group_advantages([0.7], ["completed"])
    assert (zero.advantage.tolist(), zero.note) == ([0.0], GroupNote.SINGLE)
    raw = gl.group_advantages([0.7], ["completed"], single="raw")
    assert (raw.advantage.tolist(), raw.note) == ([0.7], GroupNote.TRAINS)
    left_alone = gl.group_advantages([0.7, 0.1], ["completed", "failed"])
    assert left_alone.note is GroupNote.SINGLE


# 15. The loss and the micro-batch split (the gradient's part is in test_loss_methods.py)


def test_15_weights_are_the_same_in_every_split():
    """|T| of 1 and 3 in a group of two: 1/2 and 1/6 each, whatever the parts; a mean of means would give 1/2, 1/4."""
    records = [
        record("a", "completed", 1.0, (-1, "pA")),
        record("b", "completed", 0.0, (-1, "pB"), (0, "xC"), (0, "yD")),
    ]
    batch = gl.assemble_group(records, trainer_version=0).batch
    for budget in (4, 5, 100):
        parts = gl.partition(batch, budget).parts
        weights = sorted(w for part in parts for w in part.entry_weight.tolist())
        assert weights == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert len(gl.partition(batch, 4).parts) > 1


def test_15_every_reduction_by_hand():
    """Two groups: |T| = (1, 3) and (2,). Per-token losses 1: every reduction of ones is one."""
    for reduction, weights, divisors in [
        (two_level, ([1 / 2, 1 / 6], [1 / 2]), (1, 1)),
        (sequence_mean, ([1, 1 / 3], [1 / 2]), (2, 1)),
        (token_mean, ([1, 1], [1]), (4, 2)),
        (group_token_mean, ([1 / 4, 1 / 4], [1 / 2]), (1, 1)),
    ]:
        total = 0.0
        for counts, weight, divisor in zip(([1, 3], [2]), weights, divisors, strict=True):
            got = reduction(np.array(counts))
            assert got.weight.tolist() == pytest.approx(weight)
            assert got.divisor == divisor
            total += float((got.weight * counts).sum())
        assert total / sum(divisors) == pytest.approx(1.0), reduction
    for reduction in (two_level, sequence_mean, token_mean, group_token_mean, Constant(10.0)):
        with pytest.raises(ValueError, match="no members; expected at least one"):
            reduction(np.array([], int))
        with pytest.raises(ValueError, match=r"tokens\[1\] = -2; expected one trained token or more"):
            reduction(np.array([1, -2]))
    constant = Constant(10.0)(np.array([1, 3]))
    assert (constant.weight.tolist(), constant.divisor) == ([0.1, 0.1], 2.0)


# 16. Infrastructure failures


def test_16_a_failed_execution_is_in_no_baseline():
    """Scores 1, 0 and a sandbox crash: the mean is 1/2 (a zero would make it 1/3), K is 2."""
    group = gl.assemble_group(
        [
            record("a", "completed", 1.0, (-1, "pA")),
            record("b", "completed", 0.0, (-1, "pB")),
            gl.ExecutionRecord("c", "failed", NAN, None),
            record("d", "failed", 0.0, (-1, "pC")),
        ],
        trainer_version=0,
        estimator=gl.centre,
    )
    assert group.advantages.advantage.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert group.advantages.members == 2
    assert group.batch.execution_ids == ("a", "b")
    assert group.batch.entry_weight.tolist() == [0.5, 0.5]
    assert group.executions == {"completed": 2, "failed": 2}


def test_16_a_group_of_failures_takes_no_part_in_the_step():
    group = gl.assemble_group([gl.ExecutionRecord("a", "failed", NAN, None)], trainer_version=0)
    assert (group.batch, group.divisor, group.advantages.note) == (None, 0.0, GroupNote.EMPTY)


# 17. Cut executions: baseline and mask agree


def test_17_cut_executions_are_in_both_or_in_neither():
    records = [
        record("a", "completed", 1.0, (-1, "pA")),
        record("t", "timeout", 0.25, (-1, "pB")),
        record("c", "truncated", 0.25, (-1, "pC")),
        record("f", "failed", 0.25, (-1, "pD")),
    ]
    group = gl.assemble_group(records, trainer_version=0, estimator=gl.centre)
    assert group.advantages.baseline == 0.5
    trained = {group.batch.execution_ids[i] for i in group.batch.entry_execution}
    assert trained == {"a", "t", "c"}
    assert group.advantages.member.tolist() == [True, True, True, False]


# 18. Out of context is not finished


def test_18_truncated_is_marked_as_such():
    group = gl.assemble_group(
        [record("a", "completed", 1.0, (-1, "pA")), record("b", "truncated", 0.0, (-1, "pB"))], trainer_version=0
    )
    assert group.executions == {"completed": 1, "truncated": 1}
    with pytest.raises(ValueError, match="status 'done' of 'a'; expected one of"):
        gl.assemble_group([record("a", "done", 1.0, (-1, "pA"))], trainer_version=0)


# 19. All-failed groups with shaped scores


def test_19_shaped_scores_of_an_all_failed_group_invent_no_direction():
    shaped = [-0.1, -0.3, -0.2]
    statuses = ["completed"] * 3
    gated = gl.group_advantages(shaped, statuses)
    assert (gated.advantage.tolist(), gated.note) == ([0.0] * 3, GroupNote.GATED)
    opened = gl.group_advantages(shaped, statuses, gate=None, estimator=gl.centre)
    assert opened.advantage.tolist() == pytest.approx([0.1, -0.1, 0.0])
    outcomes = gl.group_advantages([0.4, 0.2, 0.3], statuses, solved=[False] * 3)
    assert outcomes.note is GroupNote.GATED
    one_solved = gl.group_advantages([0.4, 0.2, 0.3], statuses, solved=[False, True, False], estimator=gl.centre)
    assert one_solved.advantage.tolist() == pytest.approx([0.1, -0.1, 0.0])
    milestones = gl.group_advantages([0.5, 0.0], statuses[:2], estimator=gl.centre)
    assert milestones.advantage.tolist() == [0.25, -0.25], "verified partial credit trains by default"
    strict = gl.group_advantages([0.5, 0.0], statuses[:2], gate=0.99)
    assert strict.note is GroupNote.GATED


def test_19_a_failed_member_does_not_open_the_gate():
    group = gl.group_advantages([-0.1, -0.2, 1.0], ["completed", "completed", "failed"])
    assert group.note is GroupNote.GATED


def test_equal_groups_have_no_direction_and_still_count():
    group = gl.assemble_group(
        [record("a", "completed", 1.0, (-1, "pA")), record("b", "completed", 1.0, (-1, "pB"))], trainer_version=0
    )
    assert (group.advantages.note, group.divisor) == (GroupNote.EQUAL, 1.0)
    assert not group.batch.entry_advantage.any()
    dropped = gl.assemble_group(
        [record("a", "completed", 1.0, (-1, "pA")), record("b", "completed", 1.0, (-1, "pB"))],
        trainer_version=0,
        drop_zero_advantage=True,
    )
    assert (dropped.batch, dropped.divisor) == (None, 1.0)


# 10 and 20 (the gap is reported; no logits for rows that do not train)


def test_10_the_gap_between_engine_and_trainer_is_reported():
    from gyre_loss.metrics import gather

    logp = torch.tensor([-1.0, -2.0, -1.5])
    got = gather({}, logp, torch.tensor([-1.0, -1.0, -1.75]), None, torch.tensor([3, 4, 4])).summary(trainer_version=5)
    assert got["gap_mean"] == pytest.approx(-0.25)
    assert got["gap_abs_mean"] == pytest.approx(1.25 / 3)
    assert got["gap_abs_max"] == pytest.approx(1.0)
    assert got["gap_beyond_mean"] == pytest.approx(1 / 3)
    assert got["staleness_mean"] == pytest.approx(4 / 3)
    assert (got["staleness_1"], got["staleness_2"], got["staleness_max"]) == (2.0, 1.0, 2.0)


def test_20_only_rows_that_train_reach_the_output_head(monkeypatch):
    path = Path(__file__).with_name("conftest.py")
    spec = importlib.util.spec_from_file_location("loss_conftest_faults", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.build_model(vocab=26)
    import gyre_loss.packed as packed

    rows = []
    plain = packed.linear_logprob
    monkeypatch.setattr(
        packed, "linear_logprob", lambda hidden, *a, **k: (rows.append(hidden.shape[0]), plain(hidden, *a, **k))[1]
    )
    batch = gl.TreeBatch.from_arrays(tree((-1, "a" * 50 + "BCD" + "e" * 20)))
    gl.tree_loss(model, batch, gl.PolicyLoss())
    assert rows == [3]


# Objectives by hand


def test_objectives_by_hand():
    """Ratios 1/2 and 3/2 to the behaviour policy, advantage +1 and -1."""
    low, high = -1.0 + math.log(0.5), -1.0 + math.log(1.5)
    for advantage, clip, cispo in [
        ([1.0, 1.0], [-0.5, -1.2], [-0.8 * low, -1.2 * high]),
        ([-1.0, -1.0], [0.8, 1.5], [0.8 * low, 1.2 * high]),
    ]:
        given = terms([low, high], advantage=advantage)
        assert gl.PolicyLoss(Clip(0.2, 0.2))(given).loss.tolist() == pytest.approx(clip)
        assert gl.PolicyLoss(ClippedWeight(0.2, 0.2))(given).loss.tolist() == pytest.approx(cispo)
    dual = gl.PolicyLoss(Clip(0.2, 0.2, dual=1.25))(terms([low, high], advantage=[-1.0, -1.0]))
    assert dual.loss.tolist() == pytest.approx([0.8, 1.25])


def test_gradients_of_the_kl_estimators_are_what_the_docs_say():
    """Exact expectations over five tokens: k1 nothing, k2 that of KL(policy || ref), k3 that of KL(ref || policy)."""
    from gyre_loss.kl import k1, k2

    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    policy, reference = torch.log_softmax(logits, 0), torch.log_softmax(torch.randn(5, dtype=torch.float64), 0)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def expected(estimator):
        return gradient((policy.exp().detach() * estimator(policy, reference)).sum())

    forward = gradient((policy.exp() * (policy - reference)).sum())
    reverse = gradient((reference.exp() * (reference - policy)).sum())
    torch.testing.assert_close(expected(k1), torch.zeros_like(logits))
    torch.testing.assert_close(expected(k2), forward)
    torch.testing.assert_close(expected(k3), reverse)


def test_gspo_by_hand():
    """Ratios 1/2 and 2 within an execution: geometric mean 1, so nothing is clipped and both tokens push alike."""
    given = terms([-1.0 + math.log(0.5), -1.0 + math.log(2.0)])
    loss = gl.PolicyLoss(SequenceClip(0.1, 0.1))(given).loss
    assert loss.tolist() == pytest.approx([-1.0, -1.0])
    assert torch.autograd.grad(loss.sum(), given.logp)[0].tolist() == pytest.approx([-1.0, -1.0])


def test_a_parted_execution_is_refused_where_its_ratio_is_needed():
    given = terms([-1.0, -1.0], execution_tokens=[3], ids=("long one",))
    with pytest.raises(ValueError, match="2 of the 3 trained tokens of 'long one'"):
        gl.PolicyLoss(SequenceClip())(given)


def test_a_token_that_executions_share_counts_with_each_ones_weight_and_advantage():
    """Both sampled A after p; the one won with weight 1/4 * +1, the other lost with 1/2 * -1."""
    batch = gl.assemble_group(
        [record("w", "completed", 1.0, (-1, "pAB")), record("l", "completed", 0.0, (-1, "pA"))],
        trainer_version=0,
        estimator=gl.centre,
    ).batch
    assert batch.tokens == 3
    pairs = zip(batch.entry_token, batch.entry_weight, batch.entry_advantage, strict=True)
    assert [(int(t), float(w), float(a)) for t, w, a in pairs] == [(1, 0.25, 0.5), (1, 0.5, -0.5), (2, 0.25, 0.5)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "a group without executions"),
        (([1.0], ["completed", "failed"]), "2 statuses for 1 scores"),
        (([1.0], ["finished"]), r"statuses\[0\] = 'finished'"),
        (([NAN, 1.0], ["completed", "completed"]), r"scores\[0\] = nan of a completed execution"),
    ],
)
def test_malformed_groups_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        gl.group_advantages(*arguments)


def test_negative_counts_and_bounds_are_named():
    with pytest.raises(ValueError, match=r"trained_tokens\[0\] = -1"):
        gl.group_advantages([1.0], ["completed"], trained_tokens=[-1])
    with pytest.raises(ValueError, match=r"tokens\[1\] = 0; expected one trained token or more"):
        two_level(np.array([1, 0]))
    with pytest.raises(ValueError, match="max_staleness = -1"):
        gl.StalenessPolicy(max_staleness=-1)
    with pytest.raises(ValueError, match="without executions"):
        gl.assemble_group([], trainer_version=0)
