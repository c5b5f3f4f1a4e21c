"""The tree against a naive oracle: a list of whole token paths."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gyre_tito.records import CallRecord
from gyre_tito.tree import TrajectoryTree
from hypothesis import given, settings
from hypothesis import strategies as st


def record(index, parent, prefix_len, context, sampled, version=0):
    return CallRecord(
        index=index,
        session="main",
        parent=parent,
        prefix_len=prefix_len,
        context_ids=np.array(context, dtype=np.int32),
        sampled_ids=np.array(sampled, dtype=np.int32),
        logprobs=-np.arange(1, len(sampled) + 1, dtype=np.float32) - index,
        versions=np.full(len(sampled), version, dtype=np.int32),
        finish="stop",
    )


@st.composite
def histories(draw):
    """Random calls over a tiny alphabet, so that shared prefixes, twins and splits are common."""
    ids = st.lists(st.integers(0, 2), max_size=6)
    calls, paths = [], []
    for index in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, index - 1))
        prefix_len = 0 if parent < 0 else draw(st.integers(0, len(paths[parent])))
        context = draw(ids.filter(len) if prefix_len == 0 else ids)
        sampled = draw(ids)
        base = [] if parent < 0 else paths[parent][:prefix_len]
        calls.append(record(index, parent, prefix_len, context, sampled, version=index))
        paths.append([*base, *context, *sampled])
    return calls, paths


@settings(max_examples=120, deadline=None)
@given(histories())
def test_every_path_is_what_the_engine_saw(history):
    calls, paths = history
    tree = TrajectoryTree.from_records(calls)
    for call, path in zip(calls, paths, strict=True):
        view = tree.path(call.index)
        assert view.token_ids.tolist() == path
        start = call.prompt_len
        assert view.sampled[start:].all()
        assert view.logprobs[start:].tolist() == call.logprobs.tolist()
        assert view.versions[start:].tolist() == call.versions.tolist()
        assert np.isnan(view.logprobs[~view.sampled]).all()
        assert tree.path_ids(call.index, len(path) // 2).tolist() == path[: len(path) // 2]


@settings(max_examples=120, deadline=None)
@given(histories())
def test_sampled_tokens_are_owned_once_and_none_is_lost(history):
    calls, _ = history
    arrays = TrajectoryTree.from_records(calls).to_arrays()
    for call in calls:
        mine = arrays.sampled & (arrays.call_id == call.index)
        assert sorted(arrays.logprobs[mine].tolist()) == sorted(call.logprobs.tolist())
        assert sorted(arrays.token_ids[mine].tolist()) == sorted(call.sampled_ids.tolist())
    assert int(arrays.sampled.sum()) == sum(len(call.sampled_ids) for call in calls)


@settings(max_examples=120, deadline=None)
@given(histories())
def test_arrays_are_preorder_and_hold_every_path(history):
    calls, paths = history
    arrays = TrajectoryTree.from_records(calls).to_arrays()
    for index, parent in enumerate(arrays.node_parent):
        assert parent < index
        assert parent == -1 or index <= _subtree_end(arrays.node_parent, parent)
    whole = {tuple(_walk_up(arrays, node)) for node in range(len(arrays.node_parent))}
    for path in paths:
        assert not path or any(seen[: len(path)] == tuple(path) for seen in whole)


def _subtree_end(parents, root):
    end = root
    for index in range(root + 1, len(parents)):
        if parents[index] < root:
            break
        end = index
    return end


def _walk_up(arrays, node):
    out = []
    while node >= 0:
        out = arrays.token_ids[arrays.node_start[node] : arrays.node_start[node + 1]].tolist() + out
        node = arrays.node_parent[node]
    return out


@settings(max_examples=120, deadline=None)
@given(histories(), st.lists(st.integers(0, 2), max_size=10))
def test_longest_prefix_is_the_longest(history, probe):
    calls, paths = history
    tree = TrajectoryTree.from_records(calls)
    expected = max(_shared(path, probe) for path in paths)
    call, length = tree.longest_prefix(np.array(probe, dtype=np.int32))
    assert length == expected
    if length:
        assert paths[call][:length] == probe[:length]


def _shared(a, b):
    size = 0
    while size < min(len(a), len(b)) and a[size] == b[size]:
        size += 1
    return size


def test_shared_context_is_stored_once_and_twins_are_not_merged():
    tree = TrajectoryTree.from_records(
        [record(0, -1, 0, [1, 2, 3], [7, 8]), record(1, -1, 0, [1, 2, 3], [7, 8]), record(2, 1, 5, [4], [9])]
    )
    assert tree.token_count == 3 + 2 + 2 + 2
    assert tree.longest_prefix(np.array([1, 2, 3, 7, 8, 4, 9], dtype=np.int32)) == (2, 7)
    assert len(tree.branch_points()) == 1


def test_routed_experts_follow_their_tokens_through_splits():
    first = record(0, -1, 0, [1, 2, 3, 4], [7, 8])
    routed = np.arange(6, dtype=np.int16).reshape(6, 1, 1)
    tree = TrajectoryTree()
    tree.insert(CallRecord(**{name: getattr(first, name) for name in first.__slots__} | {"routed_experts": routed}))
    tree.insert(record(1, 0, 2, [5], [6]))
    arrays = tree.to_arrays()
    rows = arrays.routed_experts[:, 0, 0]
    by_token = dict(zip(arrays.token_ids.tolist(), rows.tolist(), strict=True))
    assert by_token == {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 5: -1, 6: -1}


def test_the_row_of_a_calls_last_token_comes_with_the_first_call_below_that_read_it():
    def told(call: CallRecord, first: int, *rows: int) -> CallRecord:
        experts = np.array(rows, np.int16).reshape(-1, 1, 1)
        return dataclasses.replace(call, routed_experts=experts, routed_from=first)

    tree = TrajectoryTree.from_records(
        [
            told(record(0, -1, 0, [1, 2], [3, 4]), 0, 10, 11, 12),
            told(record(1, 0, 3, [5], [6]), 2, 99, 14),  # branches before 4: what it read of 3 was known
            told(record(2, 0, 4, [7], [8]), 3, 13, 15),
            told(record(3, 0, 4, [9], [0]), 2, 98, 97, 16),  # comes later
        ]
    )
    arrays = tree.to_arrays()
    by_token = dict(zip(arrays.token_ids.tolist(), arrays.routed_experts[:, 0, 0].tolist(), strict=True))
    assert by_token == {1: 10, 2: 11, 3: 12, 4: 13, 5: 14, 6: -1, 7: 15, 8: -1, 9: 16, 0: -1}


def test_bad_calls_are_refused_with_a_reason():
    tree = TrajectoryTree.from_records([record(0, -1, 0, [1], [2])])
    with pytest.raises(ValueError, match="already has"):
        tree.insert(record(0, -1, 0, [1], [2]))
    with pytest.raises(ValueError, match="no such call"):
        tree.insert(record(1, 5, 1, [1], [2]))
    with pytest.raises(ValueError, match="only 2"):
        tree.insert(record(1, 0, 3, [1], [2]))
    broken = record(1, 0, 2, [1], [2])
    with pytest.raises(ValueError, match="one of each"):
        tree.insert(
            CallRecord(**{n: getattr(broken, n) for n in broken.__slots__} | {"versions": np.zeros(3, np.int32)})
        )
