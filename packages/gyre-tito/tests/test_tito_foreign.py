"""Rollout files of others, in the shapes that their public code writes today: every token where it was, no guesses."""

from __future__ import annotations

import asyncio
import json
import pickle
import zipfile
from collections import OrderedDict

import msgspec
import numpy as np
import pytest
from gyre_tito.check_files import check_path, reader_of
from gyre_tito.foreign import ForeignFileError, read_rollouts
from gyre_tito.importing import import_file
from gyre_tito.records import Status
from gyre_tito.store import Store
from gyre_tito.testing import tiny_format

# -- verifiers v1, which prime-rl writes too -----------------------------------------------------------------------


def message(parent, ids, sampled=0, logprobs=None, **more):
    """A message that adds `ids`, of which the last `sampled` ones were sampled."""
    node = {
        "message": {"role": "assistant" if sampled else "user", "content": "x"},
        "sampled": bool(sampled),
        "token_ids": ids,
        "mask": [False] * (len(ids) - sampled) + [True] * sampled,
        "logprobs": [-0.5] * sampled if logprobs is None else logprobs,
    }
    return node | ({} if parent is None else {"parent": parent}) | more


def call(node, reason="stop", **more):
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "cached_input_tokens": 3}
    return {"node": node, "finish_reason": reason, "usage": usage, "time": {"start": 1.0, "end": 2.0}} | more


def trace(**more):
    """Two turns, and a third below a history that was encoded again."""
    nodes = [
        message(None, [1, 2, 3, 4]),
        message(0, [5, 6, 7], sampled=2),
        message(1, [8, 9]),
        message(2, [5, 10], sampled=1),
        message(0, [5, 6, 70]),
        message(4, [8, 9, 5, 11], sampled=1),
    ]
    return {
        "id": "t",
        "task": {"type": "T", "data": {}, "key": "task-3"},
        "agent": {"name": "agent", "trainable": True},
        "nodes": nodes,
        "calls": [call(1, "tool_calls"), call(3), call(5)],
        "rewards": {"main": {"score": 1.0, "weight": 0.5}, "other": {"score": 2.0}, "none": None},
        "is_completed": True,
        "ok": True,
        "stop_condition": "agent_completed",
        "errors": [],
    } | more


def episode(*traces, name="e", start=5, end=5, kind="train", **more):
    work = {"type": kind, "step": 7, "policy": {"start": start, "end": end}}
    return {
        "id": name,
        "task": {"type": "T", "data": {}, "key": "task-3"},
        "group": {"id": "g"},
        "run": {"type": "train", "id": "r", "work": work},
        "ok": True,
        "errors": [],
        "traces": list(traces),
    } | more


def written(tmp_path, *rows):
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def one(tmp_path, *rows):
    (found,) = read_rollouts(written(tmp_path, *rows))[1]
    return found


def test_a_graph_of_messages_becomes_the_calls_that_ran(tmp_path):
    path = written(tmp_path, episode(trace()))
    name, (rollout,) = read_rollouts(path)
    assert name == "verifiers"
    assert read_rollouts(path, "prime-rl")[1][0].turns[1].sampled == [10]
    assert (rollout.execution, rollout.group, rollout.task, rollout.step) == ("e", "g", "task-3", 7)
    assert (rollout.status, rollout.score, rollout.purpose) == (Status.COMPLETED, 2.5, "train")
    assert [(t.prompt, t.sampled, t.parent, t.continues) for t in rollout.turns] == [
        ([1, 2, 3, 4, 5], [6, 7], None, 0),
        ([8, 9, 5], [10], 0, 7),
        ([1, 2, 3, 4, 5, 6, 70, 8, 9, 5], [11], None, 0),
    ]
    assert [(t.logprobs, t.versions, t.stop_after, t.cached, t.started_at) for t in rollout.turns] == [
        ([-0.5, -0.5], [5, 5], "stop", 3, 1.0),
        ([-0.5], [5], "stop", 3, 1.0),
        ([-0.5], [5], "stop", 3, 1.0),
    ]
    assert check_path(path).findings == ()
    with Store.open(tmp_path / "s.db", writable=True) as store:
        assert asyncio.run(import_file(path, store)) == 1
        tree = store.load_tree("e")
        assert tree.path_ids(1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 10]
        assert tree.path_ids(2).tolist() == [1, 2, 3, 4, 5, 6, 70, 8, 9, 5, 11]
        assert (len(tree.leaves()), tree.sampled_count, tree.token_count) == (2, 4, 16)
        assert store.calls("e")[1].started_at == 1.0


def test_a_policy_that_changed_on_the_way_is_not_guessed_at(tmp_path):
    rollout = one(tmp_path, episode(trace(), start=5, end=6))
    assert [turn.versions for turn in rollout.turns] == [None] * 3
    assert rollout.version_span == (5, 6)
    with Store.open(tmp_path / "s.db", writable=True) as store:
        asyncio.run(import_file(tmp_path / "traces.jsonl", store))
    for path in ("traces.jsonl", "s.db"):
        (found,) = check_path(tmp_path / path).findings
        assert (found.code, found.severity) == ("version-mixed", "warning")


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"stop_condition": "context_length"}, Status.TRUNCATED),
        ({"calls": [call(1), call(3), call(5, "length")]}, Status.TRUNCATED),
        ({"calls": [call(1, "length"), call(3), call(None, None, error={"type": "x"})]}, Status.COMPLETED),
        ({"ok": False, "errors": [{"type": "HarnessError", "message": "agent timeout: 5s"}]}, Status.TIMEOUT),
        ({"ok": False, "errors": [{"type": "SandboxError", "message": "boom"}]}, Status.FAILED),
        ({"ok": False, "is_completed": False, "stop_condition": None}, None),
    ],
)
def test_how_a_trace_ended(tmp_path, more, status):
    assert one(tmp_path, episode(trace(**more))).status is status


def test_agents_of_one_episode_are_rollouts_of_their_own(tmp_path):
    judge = trace(agent={"name": "judge", "trainable": False}, rewards={})
    solver = trace(agent={"name": "solver", "trainable": True})
    _, rollouts = read_rollouts(written(tmp_path, episode(solver, judge), episode(trace(), kind="eval", name="h")))
    assert [(r.execution, r.group, r.purpose, r.score) for r in rollouts] == [
        ("e/solver", "g/solver", "train", 2.5),
        ("e/judge", "g/judge", "eval", None),
        ("h", "g", "eval", 2.5),
    ]
    assert rollouts[1].turns[0].versions is None  # a judge is not the policy whose versions the episode names


def test_an_episode_without_a_trace_is_a_failure_and_a_lone_trace_is_read(tmp_path):
    failed = one(tmp_path, episode(errors=[{"type": "EnvError", "message": "no box"}]))
    assert (failed.execution, failed.status, failed.turns, failed.score) == ("e", Status.FAILED, (), None)
    alone = one(tmp_path, trace())
    assert (alone.execution, alone.group, len(alone.turns)) == ("t", None, 3)


def test_faults_in_a_graph_are_found(tmp_path):
    nodes = trace()["nodes"]
    cases = {
        "context-trains": [nodes[0], nodes[1], message(1, [8, 9], mask=[True, False]), nodes[3]],
        "length-mismatch": [nodes[0], message(0, [5, 6, 7], sampled=2, logprobs=[-1.0])],
        "logprob-missing": [nodes[0], message(0, [5, 6, 7], sampled=2, logprobs=[])],
        "logprob-impossible": [nodes[0], message(0, [5, 6, 7], sampled=2, logprobs=[-1.0, 0.5])],
        "no-tokens": [message(None, []), message(0, [], sampled=0) | {"sampled": True}],
        "sampled-does-not-train": [nodes[0], message(0, [5, 6, 7], sampled=3, mask=[True, False, True])],
    }
    for code, broken in cases.items():
        path = written(tmp_path, episode(trace(nodes=broken, calls=[])))
        assert code in {found.code for found in check_path(path).findings}, code
    loop = [nodes[0] | {"parent": 1}, nodes[1]]
    with pytest.raises(ForeignFileError, match="message 0 has message 1 as its parent"):
        one(tmp_path, episode(trace(nodes=loop)))


# -- prime-rl ------------------------------------------------------------------------------------------------------


def micro_batch(**more):
    """Two sequences, the second with padding: the fields in prime-rl's order."""
    fields = {
        "input_ids": [1, 2, 3, 4, 5, 9, 6, 0, 0],
        "loss_mask": [False, False, True, False, True, False, True, False, False],
        "advantages": [0.5, 0.5, 0.5, 0.5, 0.5, -1.0, -1.0, 0.0, 0.0],
        "inference_logprobs": [0.0, 0.0, -0.1, 0.0, -0.2, 0.0, -0.3, 0.0, 0.0],
        "position_ids": [0, 1, 2, 3, 4, 0, 1, 2, 3],
        "sequence_lengths": [5, 4],
        "temperatures": [1.0] * 9,
        "env_names": ["env"] * 7 + [""] * 2,
        "seq_lens": [5, 4],
    }
    return list((fields | more).values())


def test_micro_batches_are_taken_apart(tmp_path):
    path = tmp_path / "rank_0.bin"
    path.write_bytes(msgspec.msgpack.encode([micro_batch(), micro_batch()]))
    name, rollouts = read_rollouts(path)
    assert (name, [one.execution for one in rollouts]) == ("prime-rl", ["0/0", "0/1", "1/0", "1/1"])
    assert [one.advantage for one in rollouts[:2]] == [0.5, -1.0]
    assert [(t.continues, t.prompt, t.sampled, t.logprobs) for t in rollouts[0].turns] == [
        (None, [1, 2], [3], [-0.1]),
        (3, [4], [5], [-0.2]),
    ]
    assert [(t.prompt, t.sampled) for t in rollouts[1].turns] == [([9], [6])]
    path.write_bytes(msgspec.msgpack.encode([micro_batch(loss_mask=[True])]))
    with pytest.raises(ForeignFileError, match="they must agree"):
        read_rollouts(path)


def export_row(**more):
    return {
        "step": 3,
        "rank": 0,
        "micro_step": 1,
        "micro_sequence_idx": 2,
        "token_ids": [1, 2, 3],
        "loss_mask": [False, True, True],
        "inference_logprobs": [0.0, -0.1, None],
        "advantages": [1.0, 1.0, 1.0],
    } | more


def test_token_exports_are_read(tmp_path):
    path = tmp_path / "rank_0.jsonl"
    path.write_text(json.dumps(export_row()) + "\n")
    name, (rollout,) = read_rollouts(path)
    assert (name, rollout.execution, rollout.step, rollout.advantage) == ("prime-rl", "3/0/1/2", 3, 1.0)
    assert [(t.prompt, t.sampled) for t in rollout.turns] == [([1], [2, 3])]
    assert "logprob-missing" in {found.code for found in check_path(path).findings}


def test_the_gap_between_engine_and_trainer_is_told(tmp_path):
    path = tmp_path / "rank_0.jsonl"
    for trainer, level, words in (
        ([9.0, -0.11, -0.2, 9.0, -0.3], "note", "mean 0.0033, largest 0.010, 0.00 % of 3 tokens"),
        ([9.0, -0.4, -0.2, 9.0, -0.3], "warning", "mean 0.1000, largest 0.300, 0.00 % of 3 tokens"),
        ([9.0, None, -0.2, 9.0, -1.4], "warning", "50.00 % of 2 tokens differ by more than 1"),
    ):
        row = export_row(
            token_ids=[1, 2, 3, 4, 5],
            loss_mask=[False, True, True, False, True],
            inference_logprobs=[0.0, -0.1, -0.2, 0.0, -0.3],
            trainer_logprobs=trainer,
        )
        path.write_text(json.dumps(row) + "\n")
        (found,) = [one for one in check_path(path).findings if one.code == "logprob-gap"]
        assert (found.severity, words in found.message) == (level, True), found.message
    path.write_text(json.dumps(export_row()) + "\n")
    assert "logprob-gap" not in {one.code for one in check_path(path).findings}


# -- slime ---------------------------------------------------------------------------------------------------------


def sample(index=0, **more):
    return {
        "group_index": 4,
        "index": index,
        "prompt": "p",
        "tokens": [1, 2, 5, 6, 7],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25],
        "weight_versions": ["3", "3"],
        "reward": float(index),
        "status": "completed",
    } | more


def test_samples_with_tensors_and_arrays_are_read_as_torch_saves_them(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = sample(
        tokens=torch.tensor([1, 2, 5, 6, 7]),
        rollout_log_probs=torch.tensor([[-0.5, 0.0, -0.25], [9.0, 9.0, 9.0]], dtype=torch.bfloat16)[0],
        rollout_routed_experts=torch.zeros(4, 2, 2, dtype=torch.int32),
        rollout_top_p_token_ids=torch.arange(12, dtype=torch.int32).reshape(3, 4).T,
        metadata=OrderedDict(a={1, 2}),
    )
    arrays = sample(1, loss_mask=np.array([1, 0, 1]), rollout_log_probs=np.array([-0.5, 0, -0.25], np.float32))
    arrays |= {"reward": 1.0, "metadata": {"n": np.float64(0.5)}}
    path = tmp_path / "rollout_2.pt"
    torch.save({"rollout_id": 2, "samples": [[tensors], [arrays]]}, path)
    name, rollouts = read_rollouts(path)
    assert (name, len(rollouts)) == ("slime", 2)
    for rollout in rollouts:
        assert [(t.prompt, t.sampled, t.logprobs) for t in rollout.turns] == [
            ([1, 2], [5], [-0.5]),
            ([6], [7], [-0.25]),
        ]
        assert rollout.step == 2


def pickled(tmp_path, content, **files):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", content)
        for name, data in files.items():
            archive.writestr(f"x/data/{name}", data)
    return path


def test_broken_and_hostile_dumps_say_why(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    with pytest.raises(ForeignFileError, match=r"print objects"):
        read_rollouts(pickled(tmp_path, pickle.dumps({"samples": [Evil()]}, protocol=2)))
    objects = sample(metadata={"n": np.array([1, Evil()], dtype=object)})
    with pytest.raises(ForeignFileError, match=r"print objects"):
        read_rollouts(pickled(tmp_path, pickle.dumps({"samples": [objects]}, protocol=2)))
    with pytest.raises(ForeignFileError, match=r"x\.pt"):
        read_rollouts(pickled(tmp_path, pickle.dumps({"samples": []}, protocol=2)[:-4]))
    with pytest.raises(ForeignFileError, match="'samples'"):
        read_rollouts(pickled(tmp_path, pickle.dumps([1], protocol=2)))


def test_a_tensor_that_reaches_past_its_numbers_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "y.pt"
    torch.save({"samples": [sample(tokens=torch.arange(5))]}, path)
    with zipfile.ZipFile(path) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    name = next(one for one in inside if one.endswith("data/0"))
    inside[name] = inside[name][:-8]
    with zipfile.ZipFile(path, "w") as archive:
        for one, data in inside.items():
            archive.writestr(one, data)
    with pytest.raises(ForeignFileError, match="does not fit its 4 stored numbers"):
        read_rollouts(path)


def test_a_status_and_a_last_token_that_contradict_each_other_are_found(tmp_path):
    chat = tiny_format()
    end = chat.stop_ids[0]
    path = tmp_path / "samples.jsonl"
    for status, last, wrong in (
        ("completed", end, False),
        ("completed", 7, True),
        ("truncated", 7, False),
        ("truncated", end, True),
    ):
        path.write_text(json.dumps(sample(tokens=[1, 2, 5, 6, last], status=status)))
        found = {one.code for one in check_path(path, reader=reader_of(chat)).findings}
        assert ("finish-mismatch" in found) == wrong, (status, last)


def test_an_execution_that_was_split_names_itself(tmp_path):
    path = tmp_path / "samples.jsonl"
    rows = [sample(0, rollout_id=9), sample(1, rollout_id=9), sample(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, rollouts = read_rollouts(path)
    assert [(one.execution, one.row) for one in rollouts] == [("9", 0), ("9", 1), ("2", 0)]
    found = [one for one in check_path(path).findings if one.code == "rows-count-twice"]
    assert [one.execution for one in found] == ["9"]
    with Store.open(tmp_path / "s.db", writable=True) as store:
        asyncio.run(import_file(path, store))
        assert [info.execution for info in store.executions()] == ["9", "9#1", "2"]
