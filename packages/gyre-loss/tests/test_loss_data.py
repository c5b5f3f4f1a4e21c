"""The numpy side: tree arrays, forests, partitions, blobs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from gyre_loss import TrainedTree, TreeArrays, TreeBatch, from_bytes, merge, partition, prune, to_bytes
from gyre_loss.layout import Layout, paths, segments
from hypothesis import given, settings
from hypothesis import strategies as st

NAN = float("nan")


def random_tree(rng: np.random.Generator, nodes: int, vocab: int = 7, prompt: int = 3) -> TreeArrays:
    """A random tree in preorder; nodes alternate context and sampled tokens at random."""
    parent = [-1]
    path = [0]
    for node in range(1, nodes):
        path = path[: rng.integers(1, len(path) + 1)]
        parent.append(path[-1])
        path.append(node)
    length = rng.integers(1, 6, nodes)
    length[0] = max(prompt, 1)
    start = np.concatenate([[0], np.cumsum(length)])
    size = int(start[-1])
    sampled = rng.random(size) < 0.6
    sampled[: length[0]] = False
    ids = rng.integers(0, vocab, size)
    ids[: length[0]] = np.arange(length[0]) % vocab
    return TreeArrays(
        parent,
        start,
        ids,
        sampled,
        np.where(sampled, -rng.random(size) * 3, NAN),
        np.where(sampled, rng.integers(0, 3, size), -1),
    )


def random_forest(seed: int, executions: int = 3, nodes: int = 6, vocab: int = 7) -> TreeBatch:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, int(rng.integers(1, nodes + 1)), vocab) for _ in range(executions)]
    weights = rng.random(executions)
    advantages = rng.normal(size=executions)
    return merge(
        [
            TrainedTree(f"e{i}", tree, tree.sampled, float(weights[i]), float(advantages[i]))
            for i, tree in enumerate(trees)
        ]
    )


def path_strings(tree: TreeArrays | TreeBatch) -> set[tuple[int, ...]]:
    """Token prefixes that end at each token."""
    found = set()
    parent, start = tree.node_parent, tree.node_start
    prefix: dict[int, tuple[int, ...]] = {}
    for node in range(parent.shape[0]):
        above = prefix[int(parent[node])] if parent[node] >= 0 else ()
        for token in range(start[node], start[node + 1]):
            above = (*above, int(tree.token_ids[token]))
            found.add(above)
        prefix[node] = above
    return found


def prefixes_by_token(batch: TreeBatch | TreeArrays) -> list[tuple[int, ...]]:
    parent, start = batch.node_parent, batch.node_start
    ends: dict[int, tuple[int, ...]] = {}
    out: list[tuple[int, ...]] = []
    for node in range(parent.shape[0]):
        above = ends[int(parent[node])] if parent[node] >= 0 else ()
        for token in range(start[node], start[node + 1]):
            above = (*above, int(batch.token_ids[token]))
            out.append(above)
        ends[node] = above
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 9))
def test_forest_keeps_every_path_and_every_entry(seed, executions, nodes):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, int(rng.integers(1, nodes + 1)), vocab=3) for _ in range(executions)]
    batch = merge([TrainedTree(f"e{i}", t, t.sampled, 1.0 / (i + 1), float(i)) for i, t in enumerate(trees)])
    assert path_strings(batch) == set().union(*(path_strings(t) for t in trees))
    assert len(set(prefixes_by_token(batch))) == batch.tokens, "a prefix is stored once"
    got = prefixes_by_token(batch)
    found = sorted(
        (got[t], int(e), float(lp), int(v))
        for t, e, lp, v in zip(
            batch.entry_token, batch.entry_execution, batch.entry_logprob, batch.entry_version, strict=True
        )
    )
    wanted = []
    for i, tree in enumerate(trees):
        names = prefixes_by_token(tree)
        wanted += [(names[t], i, float(tree.logprobs[t]), int(tree.versions[t])) for t in np.flatnonzero(tree.sampled)]
    assert found == sorted(wanted)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 12), st.integers(0, 40))
def test_partition_holds_every_entry_once_and_fits(seed, executions, nodes, slack):
    batch = random_forest(seed, executions, nodes)
    lean = prune(batch)
    longest = Layout.of(lean).longest_path if lean.tokens else 2
    budget = max(longest, 2) + slack
    result = partition(batch, budget)
    assert all(part.tokens <= budget for part in result.parts)
    assert result.repeated_tokens == sum(p.tokens for p in result.parts) - lean.tokens

    def keys(some: TreeBatch) -> list[tuple[object, ...]]:
        names = prefixes_by_token(some)
        return [
            (names[t], int(e), float(w), float(lp))
            for t, e, w, lp in zip(
                some.entry_token, some.entry_execution, some.entry_weight, some.entry_logprob, strict=True
            )
        ]

    assert sorted(k for part in result.parts for k in keys(part)) == sorted(keys(batch))


def brute_runs(path_tokens, shared, budget):
    """Fewest tokens over all ways to cut the leaves into runs."""
    count = len(path_tokens)
    best = None
    for cuts in range(1 << (count - 1)):
        runs, begin = [], 0
        for i in range(count):
            if i == count - 1 or cuts >> i & 1:
                runs.append((begin, i))
                begin = i + 1
        sizes = [sum(path_tokens[a : b + 1]) - sum(shared[a + 1 : b + 1]) for a, b in runs]
        if max(sizes) <= budget:
            option = (sum(sizes), len(runs))
            best = option if best is None or option < best else best
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_runs_are_the_best_ones(seed):
    from gyre_loss.partitioner import _best_runs, _leaves

    lean = prune(random_forest(seed, 3, 6))
    if not lean.entries:
        return
    _, path_tokens, shared = _leaves(lean)
    budget = int(path_tokens.max()) + seed % 20
    runs = _best_runs(path_tokens.tolist(), shared.tolist(), budget)
    tokens = sum(int(path_tokens[a : b + 1].sum() - shared[a + 1 : b + 1].sum()) for a, b in runs)
    assert (tokens, len(runs)) == brute_runs(path_tokens.tolist(), shared.tolist(), budget)


def test_partition_of_a_path_over_budget_is_an_error_or_stands_alone():
    tree = TreeArrays([-1], [0, 9], range(9), [False] + [True] * 8, [NAN] + [-1.0] * 8, [-1] + [0] * 8)
    batch = TreeBatch.from_arrays(tree)
    with pytest.raises(ValueError, match="a path of 9 tokens"):
        partition(batch, 8)
    result = partition(batch, 8, oversize="alone")
    assert result.over_budget == 1
    assert result.parts[0].tokens == 9


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_segments_tile_the_tokens(seed):
    batch = random_forest(seed)
    place = Layout.of(batch)
    found = segments(batch)
    assert [s.start for s in found][1:] == [s.stop for s in found][:-1]
    assert found[-1].stop == batch.tokens
    for s in found:
        assert place.subtree_end[s.start] == s.end
        assert place.position[s.start] == s.depth
        above = found[s.parent].stop - 1 if s.parent >= 0 else -1
        assert place.previous[s.start] == above
        visible = [k for k in range(batch.tokens) if k <= s.stop - 1 < place.subtree_end[k]]
        path = next(p for p in paths(batch) if s.stop - 1 in p)
        assert visible == path[path < s.stop].tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_blob_round_trip(seed):
    batch = random_forest(seed)
    again = from_bytes(to_bytes(batch))
    for name in TreeBatch.__dataclass_fields__:
        a, b = getattr(batch, name), getattr(again, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def test_damaged_blobs_are_refused():
    blob = bytearray(to_bytes(random_forest(1)))
    blob[100] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        from_bytes(blob)
    with pytest.raises(ValueError, match="checksum"):
        from_bytes(to_bytes(random_forest(1))[:-8])
    with pytest.raises(ValueError, match="begin"):
        from_bytes(b"something else entirely")


GOOD = {
    "node_parent": [-1, 0],
    "node_start": [0, 2, 4],
    "token_ids": [1, 2, 3, 4],
    "sampled": [False, False, True, True],
    "logprobs": [NAN, NAN, -1.0, -2.0],
    "versions": [-1, -1, 0, 0],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_parent": [-1, 1]}, r"node_parent\[1\] = 1"),
        ({"node_start": [0, 2, 5]}, "node_start runs from 0 to 5"),
        ({"node_start": [0, 4, 4]}, "node 1 has 0 tokens"),
        ({"node_start": [0, 2]}, "node_start has 2 entries; expected 3"),
        ({"token_ids": [1, 2, -3, 4]}, r"token_ids\[2\] = -3"),
        ({"token_ids": [[1, 2, 3, 4]]}, r"token_ids has shape \(1, 4\)"),
        ({"token_ids": [1.5, 2, 3, 4]}, "token_ids has dtype float64"),
        ({"sampled": [True, False, True, True]}, r"sampled\[0\] is true at the first token of a root"),
        ({"logprobs": [NAN, NAN, NAN, -2.0]}, r"logprobs\[2\] = nan at a sampled token"),
        ({"logprobs": [NAN, NAN, -1.0, 2.0]}, r"logprobs\[3\] = 2.0; expected a log-probability"),
        ({"logprobs": [NAN, NAN, -1.0]}, "logprobs has 3 entries; expected 4"),
        ({"versions": [-1, -1, 0, -1]}, r"versions\[3\] = -1 at a sampled token"),
        ({"versions": [-1, 3, 0, 0]}, r"versions\[1\] = 3 at a context token"),
    ],
)
def test_malformed_arrays_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        TreeArrays.from_any({**GOOD, **change})


def test_missing_array_is_named():
    with pytest.raises(ValueError, match="no array named 'versions'"):
        TreeArrays.from_any({k: v for k, v in GOOD.items() if k != "versions"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry_weight": [0.5, -0.5]}, r"entry_weight\[1\] = -0.5"),
        ({"entry_advantage": [0.5, NAN]}, r"entry_advantage\[1\] = nan"),
        ({"entry_version": [0, -1]}, r"entry_version\[1\] = -1"),
        ({"entry_token": [2, 7]}, r"entry_token\[1\] = 7"),
        ({"entry_token": [3, 2]}, "entry_token falls"),
        ({"entry_token": [0, 2]}, r"entry_token\[0\] is the first token of a root"),
        ({"entry_execution": [0, 1]}, r"entry_execution\[1\] = 1"),
        ({"execution_tokens": [1]}, "has 2 entries; expected at most"),
        ({"execution_tokens": [-1]}, r"execution_tokens\[0\] = -1"),
        ({"entry_proximal": [0.5, NAN]}, r"entry_proximal\[0\] = 0.5"),
        ({"routed_experts": np.zeros((2, 1, 1), np.int16)}, "routed_experts has shape"),
        ({"routed_experts": [[1]]}, "routed_experts has dtype int64; expected int16"),
    ],
)
def test_malformed_entries_are_named(change, message):
    good = TreeBatch.from_arrays(GOOD)
    fields = {name: getattr(good, name) for name in TreeBatch.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        TreeBatch(**{**fields, **change})


def test_routed_experts_follow_their_tokens():
    tree = TreeArrays.from_any(GOOD)
    other = TreeArrays.from_any({**GOOD, "token_ids": [1, 2, 9, 4]})
    experts = np.arange(4, dtype=np.int16).reshape(4, 1, 1)
    batch = merge(
        [
            TrainedTree("a", tree, tree.sampled, 1.0, 1.0, experts),
            TrainedTree("b", other, other.sampled, 1.0, 1.0, experts + 10),
        ]
    )
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 9, 4]
    assert batch.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 12, 13]
    part = partition(batch, 4).parts[1]
    assert part.routed_experts[:, 0, 0].tolist() == [0, 1, 12, 13]


def test_numpy_side_does_not_load_torch():
    code = "import gyre_loss, sys; gyre_loss.assemble_group; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
