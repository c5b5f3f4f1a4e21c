"""`check`: every fault that shows in data is found, in our stores and in others' files; clean data is clean."""

from __future__ import annotations

import asyncio
import json
import pickle
import zipfile

import msgspec
import numpy as np
import pytest
from gyre_tito.__main__ import main
from gyre_tito.check import check_rollouts
from gyre_tito.check_files import check_path, reader_of
from gyre_tito.findings import KINDS
from gyre_tito.foreign import ForeignFileError, read_rollouts
from gyre_tito.importing import calls_of, import_file
from gyre_tito.records import CallRecord, ExecutionSpec, Link, Score, SessionInfo, Status
from gyre_tito.rollouts import Rollout, Turn, packed_turns
from gyre_tito.store import Store
from gyre_tito.testing import save_tiny_model, tiny_format
from gyre_tito.tree import TrajectoryTree

CHAT = tiny_format()
READER = reader_of(CHAT)
END = CHAT.tokenizer.convert_tokens_to_ids("<|im_end|>")


def ids(text):
    return CHAT.tokenizer.encode(text)


def codes(*rollouts, reader=READER):
    return {finding.code for finding in check_rollouts(rollouts, reader)}


def turn(prompt, sampled, **more):
    more.setdefault("logprobs", [-0.5] * len(sampled))
    more.setdefault("versions", [1] * len(sampled))
    return Turn(prompt, sampled, **more)


PROMPT = ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
NEXT = ids("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")


def rollout(*turns, **more):
    more.setdefault("status", Status.COMPLETED)
    return Rollout(more.pop("execution", "e"), tuple(turns), **more)


def conversation(sampled_text, later_text, close=True):
    """Two turns; the second prompt has `later_text` where the first turn sampled `sampled_text`."""
    first = ids(sampled_text) + ([END] if close else [])
    later = ids(later_text) if isinstance(later_text, str) else later_text
    return rollout(turn(PROMPT, first), turn([*PROMPT, *later, *NEXT], [*ids("ok"), END]))


def test_clean_data_is_clean():
    first = [*ids("I read it."), END]
    good = rollout(turn(PROMPT, first), turn([*PROMPT, *first, *NEXT], [*ids("ok"), END]))
    assert codes(good) == set()
    assert codes(good, reader=None) == set()


def test_token_faults_are_told_apart():
    call = '<tool_call>\n{"name": "f",  "arguments": {"a":1}}\n</tool_call>'
    spaced = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    cases = {
        "tool-call-rendered": conversation(call, spaced + "<|im_end|>"),
        "tool-call-dropped": conversation("sure " + call, "sure <|im_end|>"),
        "reasoning-stripped": conversation("<think>\ndeep\n</think>\n\nyes", "yes<|im_end|>"),
        "prompt-diverges": conversation("the answer is five", "the sum is six<|im_end|>"),
        "turn-end": rollout(turn(PROMPT, [*ids("yes"), END]), turn([*PROMPT, *ids("yes\n"), *NEXT], [*ids("ok"), END])),
        "retokenized": rollout(
            turn(PROMPT, [*[t for c in "read the" for t in ids(c)], END]),
            turn([*PROMPT, *ids("read the"), END, *NEXT], [*ids("ok"), END]),
        ),
    }
    for code, broken in cases.items():
        assert codes(broken) == {code}, code


def test_faults_of_sampled_tokens():
    good = [*ids("yes indeed it is"), END]
    size = len(good)
    cases = {
        "length-mismatch": turn(PROMPT, good, logprobs=[-1.0]),
        "logprob-missing": turn(PROMPT, good, logprobs=[float("nan")] * size),
        "logprob-impossible": turn(PROMPT, good, logprobs=[0.5, *[-1.0] * (size - 1)]),
        "logprob-padding": turn(PROMPT, good, logprobs=[0.0] * size),
        "version-missing": turn(PROMPT, good, versions=None),
        "version-mixed": turn(PROMPT, good, versions=[1, *[2] * (size - 1)]),
        "version-decreases": turn(PROMPT, good, versions=[2, *[1] * (size - 1)]),
        "token-out-of-range": turn(
            PROMPT, [*good[:-1], 10**6, END], logprobs=[-1.0] * (size + 1), versions=[1] * (size + 1)
        ),
        "context-trains": turn(PROMPT, good, prompt_trains=[0] * (len(PROMPT) - 1) + [1]),
        "sampled-does-not-train": turn(PROMPT, good, trains=[0, *[1] * (size - 1)]),
        "finish-mismatch": turn(PROMPT, good[:-1], stop_after="stop"),
    }
    for code, broken in cases.items():
        assert code in codes(rollout(broken)), code
    opened = [*ids("tool says 5"), *NEXT, *ids("yes")]
    assert "context-trains" in codes(rollout(turn(PROMPT, opened)))


def test_versions_between_turns():
    first = [*ids("one"), END]
    second = [*PROMPT, *first, *NEXT]
    stale = rollout(
        turn(PROMPT, first, versions=[1] * len(first)),
        turn(second, [*ids("x"), END], versions=[2] * (len(ids("x")) + 1), cached=len(second) - 3),
    )
    assert codes(stale) == {"cache-across-versions", "version-mixed"}
    levels = {one.code: one.severity for one in check_rollouts([stale], READER)}
    assert levels == {"cache-across-versions": "warning", "version-mixed": "note"}
    untold = rollout(turn(PROMPT, first, versions=None), version_span=(1, 2))
    assert {one.severity for one in check_rollouts([untold], READER) if one.code == "version-mixed"} == {"warning"}
    back = rollout(turn(PROMPT, first, versions=[2] * len(first)), turn(second, [END], versions=[1]))
    assert "version-decreases" in codes(back)


def test_faults_of_executions_and_groups():
    good = turn(PROMPT, [*ids("y"), END])
    cut = turn(PROMPT, ids("y"), stop_after="length")

    def one(name, **more):
        more.setdefault("score", 0.5)
        return rollout(more.pop("turn", good), execution=name, **more)

    assert "truncated-as-completed" in codes(one("a", turn=cut))
    assert "failed-with-score" in codes(one("a", status=Status.FAILED, score=0.0))
    masked = turn(PROMPT, [*ids("y"), END], trains=[0] * (len(ids("y")) + 1))
    assert "cut-in-baseline" in codes(one("a", turn=masked, status=Status.TIMEOUT))
    assert "unfinished" in codes(one("a", status=Status.OPEN))
    assert "group-of-one" in codes(*(one(f"{n}", group=f"{n}", score=n) for n in range(3)))
    assert "group-mixed" in codes(*(one(f"{n}", group="g", task=f"t{n}", score=n) for n in range(3)))
    uneven = [one(f"{n}", group="a" if n else "b", score=n) for n in range(3)]
    assert "group-uneven" in codes(*uneven)
    assert "rows-count-twice" in codes(one("a", group="g", score=0), one("a", group="g", score=1))
    assert "group-flat" in codes(one("a", group="g"), one("b", group="g"))
    assert "group-missing" in codes(one("a"), one("b"))
    fewer = [
        *uneven[:2],
        one("c", group="b", status=Status.OPEN),
        one("d", group="a", status=Status.FAILED, score=None),
    ]
    assert "group-uneven" not in codes(*fewer)
    held_out = [one(f"h{n}", group=f"h{n}", task=f"h{n}", purpose="eval") for n in range(2)]
    fine = [
        *held_out,
        one("h2", purpose="eval"),
        *(one(f"{g}{n}", group=g, task=g, score=n / 2) for g in "ab" for n in range(2)),
    ]
    assert codes(*fine) == set()


def test_packed_rows_become_turns():
    turns = packed_turns([1, 2, 3, 4, 5, 6, 7], 2, [1, 1, 0, 1, 0], [-1, -2, 0, -3, 0], "row")
    assert [(t.parent, t.continues, t.prompt, t.sampled, t.logprobs) for t in turns] == [
        (None, None, [1, 2], [3, 4], [-1, -2]),
        (0, 4, [5], [6], [-3]),
    ]
    tree = TrajectoryTree.from_records(calls_of(rollout(*turns)))
    assert tree.path_ids(1).tolist() == [1, 2, 3, 4, 5, 6]
    (mismatch,) = packed_turns([1, 2, 3], 1, [1], [-1, -2], "row")
    assert "length-mismatch" in codes(rollout(mismatch))


# -- files -------------------------------------------------------------------------------------------------------


def verifiers_file(tmp_path):
    first = [*ids("I read it."), END]
    steps = []
    for prompt, sampled in ((PROMPT, first), ([*PROMPT, *first, *NEXT], [*ids("ok"), END])):
        tokens = {
            "prompt_ids": prompt,
            "prompt_mask": [0] * len(prompt),
            "completion_ids": sampled,
            "completion_mask": [1] * len(sampled),
            "completion_logprobs": [-0.25] * len(sampled),
            "is_truncated": False,
        }
        steps.append({"tokens": tokens, "trajectory_id": "t", "is_truncated": False})
    rows = [
        {"example_id": 3, "task": "x", "reward": r, "is_completed": True, "trajectory": steps, "trajectory_id": f"r{r}"}
        for r in (0.0, 1.0)
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prime_file(tmp_path):
    example = [PROMPT, [0] * len(PROMPT), [5, 6, 7], [1, 0, 1], [-0.5, 0.0, -0.25], 0.5]
    path = tmp_path / "rollouts.bin"
    path.write_bytes(msgspec.msgpack.encode([[example, example], 1.0, 2048, 9]))
    return path


def slime_sample(index=0, **more):
    sample = {
        "group_index": 4,
        "index": index,
        "prompt": "p",
        "tokens": [*PROMPT, 5, 6, 7],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25],
        "weight_versions": ["3", "3"],
        "reward": float(index),
        "status": "completed",
    }
    return sample | more


def slime_file(tmp_path, *samples):
    path = tmp_path / "rollout_2.pt"
    with zipfile.ZipFile(path, "w") as archive:
        content = {"rollout_id": 2, "samples": list(samples) or [slime_sample(0), slime_sample(1)]}
        archive.writestr("rollout_2/data.pkl", pickle.dumps(content, protocol=2))
    return path


def verl_file(tmp_path):
    path = tmp_path / "7.jsonl"
    rows = [{"input": "hi", "output": "yes", "score": float(n), "step": 7, "gts": "y"} for n in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("make", "form", "sampled"),
    [
        (verifiers_file, "verifiers", None),
        (prime_file, "prime-rl", 2),
        (slime_file, "slime", 2),
        (verl_file, "verl", 0),
    ],
)
def test_foreign_files_are_read_checked_and_imported(tmp_path, make, form, sampled):
    path = make(tmp_path)
    name, rollouts = read_rollouts(path)
    assert (name, len(rollouts)) == (form, 2)
    report = check_path(path, reader=READER)
    assert report.errors == 0, report.findings
    with Store.open(tmp_path / "out.db", writable=True) as store:
        assert asyncio.run(import_file(path, store, chat=CHAT, prefix="x/")) == 2
        info = store.executions()[0]
        assert info.execution.startswith("x/")
        assert info.metadata["format"] == form
        tree = store.load_tree(info.execution)
        arrays = tree.to_arrays()
        if sampled:
            assert tree.sampled_count == sampled
            assert len(tree.leaves()) == 1
        if form == "slime":
            assert set(arrays.versions[arrays.sampled].tolist()) == {3}
        else:
            assert set(arrays.versions[arrays.sampled].tolist()) == {-1}
        if form == "verl":
            assert info.metadata["encoded_from_text"] is True
            assert np.isnan(arrays.logprobs).all()


def test_foreign_faults_are_found(tmp_path):
    path = slime_file(
        tmp_path,
        slime_sample(0, status="failed", reward=0.0),
        slime_sample(1, weight_versions=["3", "4", "5"]),
        slime_sample(1, rollout_log_probs=[-1.0]),
        slime_sample(5, loss_mask=[0, 0, 0], status="truncated"),
    )
    found = {one.code for one in check_path(path).findings}
    assert {"failed-with-score", "version-mixed", "rows-count-twice", "length-mismatch", "cut-in-baseline"} <= found


def test_unreadable_files_say_why(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    with pytest.raises(ForeignFileError, match=r"builtin\w*\.print"):
        read_rollouts(slime_file(tmp_path, Evil()))
    (tmp_path / "odd.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ForeignFileError, match="fit none of"):
        read_rollouts(tmp_path / "odd.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"input": 1, "output": "x"}\n{"in')
    with pytest.raises(ForeignFileError, match="line 2"):
        read_rollouts(tmp_path / "bad.jsonl", "verl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ForeignFileError, match="empty"):
        read_rollouts(tmp_path / "empty.jsonl")


def test_import_branches_where_the_file_does_not_continue():
    broken = conversation("the answer is five", "the sum is six<|im_end|>")
    calls = calls_of(broken)
    assert calls[1].prefix_len < calls[0].path_len
    tree = TrajectoryTree.from_records(calls)
    assert len(tree.leaves()) == 2


def record(index, parent, prefix, context, sampled, link=Link.EXTEND, session="main"):
    size = len(sampled)
    return CallRecord(
        index,
        session,
        parent,
        prefix,
        np.array(context, np.int32),
        np.array(sampled, np.int32),
        np.full(size, -0.5, np.float32),
        np.full(size, 1, np.int32),
        "stop",
        link,
    )


async def fill(store, *calls):
    await store.add_execution(ExecutionSpec("e", "t", "g"))
    await store.add_session("e", SessionInfo("main"))
    for call in calls:
        await store.add_call("e", call)
    await store.close_execution("e", Status.COMPLETED, Score(1.0))


def test_our_store_is_checked_too(tmp_path):
    path = tmp_path / "trajectories.db"
    with Store.open(path, writable=True) as store:
        asyncio.run(fill(store, record(0, -1, 0, [1, 2], [3, END], Link.START), record(1, 0, 4, [5], [6, END])))
    assert check_path(tmp_path, reader=READER).errors == 0
    with Store.open(path, writable=True) as store:
        asyncio.run(store.add_call("e", record(2, 1, 5, [9], [7, END])))
        asyncio.run(store.add_call("e", record(3, 1, 7, [9], [7, END], session="ghost")))
    found = {one.code for one in check_path(path, reader=READER).findings}
    assert found == {"extends-too-little", "unknown-session"}
    with Store.open(path, writable=True) as store:
        asyncio.run(store.add_call("e", record(4, 77, 5, [9], [7, END])))
        store.writer.submit(lambda db, _: db.execute("UPDATE calls SET sampled=x'50aabb' WHERE idx=4")).result()
    assert {one.code for one in check_path(path).findings} == {"damaged"}


def test_commands(tmp_path, capsys):
    good, bad = prime_file(tmp_path), slime_file(tmp_path, slime_sample(0, status="failed"))
    assert main(["check", str(good)]) == 0
    assert main(["check", str(bad), "--json"]) == 1
    assert main(["check", str(tmp_path / "nothing")]) == 2
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["counts"]["failed-with-score"] == 1
    assert all(one["cause"] for one in report["findings"])
    store = str(tmp_path / "x.db")
    assert main(["import", str(good), store]) == 0
    assert main(["tree", store]) == 0
    assert main(["tree", store, "example-0"]) == 0
    assert main(["tree", store, "example-0", "--call", "1", "--last", "3"]) == 0
    assert main(["tree", store, "example-0", "--call", "0", "--diff", "1"]) == 0
    out = capsys.readouterr().out
    assert "● sampled" in out
    assert "calls 0 and 1 share" in out
    assert main(["export", store, str(tmp_path / "x.jsonl")]) == 0
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 4
    model = str(save_tiny_model(tmp_path / "model"))
    one = tmp_path / "one.jsonl"
    assert main(["tree", store, "example-0", "--export", str(one), "--model", model, "--json"]) == 0
    rows = [json.loads(line) for line in one.read_text().splitlines()]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"calls": 2, "file": str(one)}
    assert {row["execution"] for row in rows} == {"example-0"}
    assert rows[0]["sampled_text"] == CHAT.decode(rows[0]["sampled_ids"])
    assert main(["tree", store, "nobody", "--export", str(one)]) == 2
    assert main(["tree", store, "--export", str(tmp_path / "x.csv")]) == 2


def test_parquet(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    from gyre_tito.export import to_parquet

    with Store.open(tmp_path / "s.db", writable=True) as store:
        asyncio.run(import_file(prime_file(tmp_path), store))
        assert to_parquet(store, tmp_path / "x.parquet") == 4
        calls = store.calls("example-0")
    table = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert table[1]["sampled_ids"] == calls[1].sampled_ids.tolist()
    assert table[1]["prefix_len"] == calls[1].prefix_len


def test_every_kind_says_what_it_means():
    assert all(kind.cause and kind.law and kind.severity for kind in KINDS.values())
