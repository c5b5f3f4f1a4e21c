"""Bookkeeping of a run: the task stream, the feed of groups, micro-batches, contributions at rest, resuming."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gyre_core import BatchStats, ConfigError, Contribution, ExecutionStatus, InfrastructureError, ScorerSpec, Task
from gyre_loss.groups import Status as LossStatus
from gyre_loss.serial import from_bytes
from gyre_rl.agents.host import AgentEvents
from gyre_rl.agents.rests import Rests
from gyre_rl.config.schema import LossConfig
from gyre_rl.run.atrest import contributions_at_rest, keep_record
from gyre_rl.run.batches import Member, build_group
from gyre_rl.run.bus import EventBus
from gyre_rl.run.directory import RunDirectory
from gyre_rl.run.feed import Feed
from gyre_rl.run.metrics import summarise
from gyre_rl.run.parity import Parity, measure, require
from gyre_rl.run.resume import read_past
from gyre_rl.run.rollout import seed_of
from gyre_rl.run.stream import TaskStream, group_index, group_name
from gyre_rl.views import events as ev
from gyre_sched import EndStatus
from gyre_tito import CallRecord, ExecutionSpec, Score, Status, Store
from hypothesis import given
from hypothesis import strategies as st


def tasks(count: int) -> list[Task]:
    return [Task(f"t{i}", "do", ScorerSpec("files")) for i in range(count)]


@given(st.integers(1, 20), st.integers(0, 5), st.integers(0, 3))
def test_every_task_comes_once_before_any_comes_again(count, seed, epoch):
    stream = TaskStream(tasks(count), seed)
    drawn = [stream.task(epoch * count + i).id for i in range(count)]
    assert sorted(drawn) == sorted(f"t{i}" for i in range(count))
    assert drawn == [TaskStream(tasks(count), seed).task(epoch * count + i).id for i in range(count)]


def test_seeds_differ_and_an_empty_split_is_an_error():
    first = [TaskStream(tasks(30), 0).task(i).id for i in range(30)]
    assert first != [TaskStream(tasks(30), 1).task(i).id for i in range(30)]
    assert first != [f"t{i}" for i in range(30)]
    with pytest.raises(ConfigError, match="at least one task"):
        TaskStream([], 0)
    assert group_index(group_name(17)) == 17


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2), st.lists(st.booleans(), max_size=40))
def test_exactly_the_wanted_number_of_groups_trains(steps, per_step, staleness, fates):
    feed = Feed(steps * per_step, (staleness + 1) * per_step)
    trained, fate = 0, iter(fates)
    for _ in range(10_000):
        for _ in range(feed.due()):
            feed.take(group_name(feed.next_index))
        if not feed.open:
            break
        assert len(feed.open) <= (staleness + 1) * per_step
        if next(fate, True):
            chosen = tuple(sorted(feed.open)[:per_step])
            feed.trained(chosen)
            trained += len(chosen)
        else:
            feed.left(min(feed.open))
    assert trained == steps * per_step


def tree(sampled: int = 3):
    """prompt of 2, then two branches with `sampled` and 1 sampled tokens."""
    n = 2 + sampled + 1
    on = np.array([False, False] + [True] * (sampled + 1))
    return {
        "node_parent": np.array([-1, 0, 0], np.int32),
        "node_start": np.array([0, 2, 2 + sampled, n], np.int64),
        "token_ids": np.arange(1, n + 1, dtype=np.int32),
        "sampled": on,
        "logprobs": np.where(on, -0.5, np.nan).astype(np.float32),
        "versions": np.where(on, 0, -1).astype(np.int32),
    }


def test_a_groups_batches_hold_every_trained_token_once_with_its_weight():
    members = [Member("a", "completed", 1.0, tree(3)), Member("b", "timeout", 0.0, tree(5))]
    members.append(Member("c", "failed", math.nan, None))
    built = build_group("g000001", 0, members, LossConfig(micro_batch_tokens=7), trainer_version=0)
    batches = [from_bytes(b.blob) for b in built.batches]
    assert [b.id for b in built.batches] == [f"g000001.{i}" for i in range(len(batches))]
    assert sum(b.entries for b in batches) == 4 + 6
    total = sum(float(b.entry_weight.sum()) for b in batches)
    assert total == pytest.approx(1.0)  # 1/K per execution, K = 2: the failed one is in no denominator
    assert built.scores == (1.0, 0.0)
    assert built.group.divisor == 1.0


def test_building_a_group_again_gives_the_same_batches():
    members = [Member("a", "completed", 1.0, tree(3)), Member("b", "completed", 0.0, tree(5))]
    one, two = (build_group("g", 0, members, LossConfig(), trainer_version=0) for _ in range(2))
    assert one.batches == two.batches


def test_equal_scores_make_no_batches_but_a_seat():
    members = [Member("a", "completed", 0.5, tree(3)), Member("b", "completed", 0.5, tree(5))]
    built = build_group("g", 0, members, LossConfig(), trainer_version=0)
    assert built.batches == ()
    assert built.group.divisor == 1.0
    assert built.group.advantages.note.value == "equal"


def test_every_attempt_has_a_seed_of_its_own():
    names = [f"g{i:06d}.{j}{r}" for i in range(20) for j in range(8) for r in ("", ".r1")]
    seeds = {seed_of(run, name) for name in names for run in (1, 2)}
    assert len(seeds) == 2 * len(names)
    assert max(seeds) < 2**31
    assert seed_of(1, names[0]) == seed_of(1, names[0])


def test_means_are_divided_once_however_the_step_was_split():
    whole = {"ratio": 6.0, "ratio:count": 4.0, "gap:max": 0.5, "entries": 4.0}
    parts = [
        {"ratio": 1.0, "ratio:count": 3.0, "gap:max": -0.5, "entries": 3.0},
        {"ratio": 5.0, "ratio:count": 1.0, "gap:max": 0.5, "entries": 1.0},
    ]
    assert summarise([whole]) == summarise(parts) == {"ratio": 1.5, "entries": 4.0, "gap_max": 0.5}
    assert summarise([]) == {}


def contribution(folder: Path, number: int = 1) -> Contribution:
    folder.mkdir(parents=True, exist_ok=True)
    location = folder / f"{number}.safetensors"
    location.write_bytes(b"x")
    return Contribution(f"{number}", 2, 2, ("g000004.0",), str(location), BatchStats(0.5, 10, 5, 0.1))


def test_contributions_at_rest_are_read_back_and_a_missing_tensor_file_drops_one(tmp_path):
    directory = RunDirectory(tmp_path)
    one, two = (contribution(directory.contributions(2), i) for i in (1, 2))
    for item in (one, two):
        keep_record(directory.contributions(2), item)
    assert contributions_at_rest(directory, 2) == [one, two]
    Path(one.location).unlink()
    assert contributions_at_rest(directory, 2) == [two]
    assert contributions_at_rest(directory, 3) == []


def test_a_run_directory_takes_one_run_at_a_time(tmp_path):
    held = RunDirectory(tmp_path).lock()
    with pytest.raises(InfrastructureError, match="another run is working"):
        RunDirectory(tmp_path).lock()
    held.close()
    RunDirectory(tmp_path).lock().close()


class Still:
    """A workspace of one number."""

    def __init__(self, number=0, fails=False):
        self.number, self.fails = number, fails

    async def snapshot(self, location):
        if self.fails:
            raise OSError("no space left")
        Path(location).write_text(str(self.number))


async def test_a_rest_is_whole_or_the_one_before(tmp_path):
    rests = Rests(tmp_path / "rests", "shell")
    assert rests.find("e/1") is None
    for number in range(3):
        await rests.keep("e/1", Still(number), bytes([number]))
        found = rests.find("e/1")
        assert (found.state, Path(rests.snapshot(found)).read_text()) == (bytes([number]), str(number))
    with pytest.raises(OSError, match="no space"):
        await rests.keep("e/1", Still(3, fails=True), b"later")
    found = rests.find("e/1")
    assert (found.state, Path(rests.snapshot(found)).read_text()) == (b"\x02", "2")
    assert len(list((tmp_path / "rests").iterdir())) == 2
    assert Rests(tmp_path / "rests", "other").find("e/1") is None, "the state of one harness is none for another"
    for left in ("e_1.9.snapshot.17.partial", "e_1.rest.tmp"):
        (tmp_path / "rests" / left).write_bytes(b"of a process that was killed")
    rests.forget("e/1")
    rests.forget("e/1")
    assert list((tmp_path / "rests").iterdir()) == []


async def test_a_record_that_cannot_be_read_is_none(tmp_path):
    rests = Rests(tmp_path, "shell")
    await rests.keep("e.1", Still(), b"state")
    await rests.keep("e.10", Still(), b"state")
    (record,) = tmp_path.glob("e.1.rest.json")
    record.write_bytes(record.read_bytes()[:20])
    assert rests.find("e.1") is None
    rests.forget("e.1")
    assert rests.find("e.10") is not None, "another execution whose name begins alike"
    Path(rests.snapshot(rests.find("e.10"))).unlink()
    assert rests.find("e.10") is None, "its snapshot is gone"
    for name in ("e.2", "e.20", "e.3"):
        await rests.keep(name, Still(), b"state")
    rests.keep_only({"e.2", "e.3"})
    assert [rests.find(name) is not None for name in ("e.2", "e.20", "e.3")] == [True, False, True]


async def test_an_execution_is_put_at_rest_when_it_is_time_and_trouble_with_that_is_no_end():
    kept = []

    async def keep(state):
        kept.append(state)
        if state == b"b":
            raise InfrastructureError("saving a snapshot")

    events = AgentEvents(keep, 0.0)
    for state in (b"a", b"b", b"c"):
        await events.resting(lambda state=state: state)
    await AgentEvents(keep, 60.0).resting(lambda: pytest.fail("asked too early"))
    assert kept == [b"a", b"b", b"c"]


async def test_what_ended_is_kept_what_rests_goes_on_and_the_rest_starts_again(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.checkpoint(1).mkdir(parents=True)
    bus = EventBus(directory.events, [])
    empty = np.zeros(0, np.int32)
    with Store.open(directory.store, writable=True) as store:
        for name in ("g000000.0", "g000001.0", "g000001.1", "g000001.1.r1", "g000002.0", "g000002.1"):
            group = name.split(".")[0]
            await store.add_execution(ExecutionSpec(name, "t", group))
            attempt = 1 if name.endswith(".r1") else 0
            bus.emit(ev.ExecutionStarted(name, "t", group, 0, "train", attempt))
            record = CallRecord(0, "main", -1, 0, empty, empty, np.zeros(0, np.float32), empty, "stop")
            await store.add_call(name, record)
        await store.close_execution("g000000.0", Status.COMPLETED, Score(1.0))
        await store.close_execution("g000001.0", Status.TIMEOUT, Score(0.25))
        await store.close_execution("g000001.1", Status.FAILED)
    rests = Rests(directory.rests, "shell")
    for name in ("g000001.1", "g000002.1"):  # the first one's attempt failed: its rest is of no use
        await rests.keep(name, Still(), b"state")
    bus.emit(ev.GroupReady("g000000", 0, 1))
    bus.emit(ev.StepApplied(0, 1, 1.0, 1.0))
    bus.emit(ev.Evaluated("heldout", 0, 0, 0.2, 1, 1))
    bus.close()
    with Store.open(directory.store) as store:
        past = read_past(directory, ev.read_log(directory.events), store, Rests(directory.rests, "shell"))
    assert past.version == 1
    assert [group.name for group in past.groups] == ["g000001", "g000002"]
    kept = past.groups[0]
    assert {name: (f.recorded, f.score, f.partial) for name, f in kept.finished.items()} == {
        "g000001.0": ("g000001.0", 0.25, True)
    }
    assert kept.attempts == {"g000001.1": 2}
    assert past.groups[1].attempts == {"g000002.0": 1, "g000002.1": 0}
    assert (kept.at_rest, past.groups[1].at_rest) == (frozenset(), {"g000002.1"})
    assert past.next_group == 3
    assert past.score_before == 0.2


def test_a_log_ahead_of_its_checkpoints_is_an_error(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.checkpoint(1).mkdir(parents=True)
    with Store.open(directory.store, writable=True):
        pass
    log = [ev.StepApplied(4, 5, 1.0, 1.0).at(0.0)]
    with Store.open(directory.store) as store, pytest.raises(InfrastructureError, match="step 4 is applied"):
        read_past(directory, log, store, Rests(directory.rests, "shell"))


def test_a_full_disk_stops_the_log_with_a_clear_error(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this kernel has no /dev/full")
    bus = EventBus(full, [])
    with pytest.raises(InfrastructureError, match="No space left"):
        bus.emit(ev.Notice("hello"))


def test_a_broken_sink_is_dropped_and_the_others_go_on(tmp_path):
    seen = []

    class Broken:
        def emit(self, event):
            raise RuntimeError("no")

        def close(self):
            raise RuntimeError("no")

    class Good(Broken):
        def emit(self, event):
            seen.append(event.kind)

    bus = EventBus(tmp_path / "events.jsonl", [Broken(), Good()])
    bus.notice("one")
    bus.notice("two")
    bus.close()
    assert seen == ["notice", "notice"]
    assert [e.data["text"] for e in ev.read_log(tmp_path / "events.jsonl")] == ["one", "two"]


def test_parity_is_the_same_however_the_step_was_split():
    whole = {"gap_abs": 0.6, "gap_abs:count": 3.0, "gap_abs:max": 0.4}
    parts = [
        {"gap_abs": 0.4, "gap_abs:count": 1.0, "gap_abs:max": 0.4},
        {"gap_abs": 0.2, "gap_abs:count": 2.0, "gap_abs:max": 0.15},
    ]
    for found in (measure([whole]), measure(parts)):
        assert found == Parity(pytest.approx(0.2), 0.4, 3)
    assert measure([{"loss": 1.0}]) is None, "a trainer that does not report the gap cannot be compared"


@pytest.mark.parametrize("mean", [0.11, math.inf, math.nan])
def test_a_trainer_that_is_another_model_stops_the_run(mean):
    require(Parity(0.1, 3.0, 10), 0.1)
    with pytest.raises(InfrastructureError, match=r"max_logprob_gap.*rope"):
        require(Parity(mean, 3.0, 10), 0.1)


def test_experts_that_engines_recorded_reach_the_micro_batches():
    """Where one execution of a group has none, its rows are -1: the router's own choice."""

    def tree(experts):
        arrays = SimpleNamespace(
            node_parent=[-1, 0],
            node_start=[0, 2, 4],
            token_ids=[1, 2, 3, 4 if experts is None else 5],
            sampled=[False, False, True, True],
            logprobs=[np.nan, np.nan, -1.0, -1.0],
            versions=[-1, -1, 0, 0],
        )
        if experts is not None:
            arrays.routed_experts = np.array(experts, np.int16).reshape(4, 1, 1)
        return arrays

    members = [
        Member("g.0", "completed", 1.0, tree([7, 8, 9, -1])),
        Member("g.1", "completed", 0.0, tree(None)),
    ]
    built = build_group("g", 0, members, LossConfig(), trainer_version=0)
    (batch,) = [from_bytes(bytearray(b.blob)) for b in built.batches]
    rows = dict(zip(batch.token_ids.tolist(), batch.routed_experts[:, 0, 0].tolist(), strict=True))
    assert rows == {1: 7, 2: 8, 3: 9, 5: -1, 4: -1}
    without = [Member(m.execution, m.status, m.score, tree(None)) for m in members]
    (plain,) = build_group("g", 0, without, LossConfig(), trainer_version=0).batches
    assert from_bytes(bytearray(plain.blob)).routed_experts is None


@pytest.mark.parametrize("status", ExecutionStatus)
def test_every_part_means_the_same_by_a_status(status):
    trains = status in (ExecutionStatus.COMPLETED, ExecutionStatus.TIMEOUT, ExecutionStatus.TRUNCATED)
    assert status.trains == EndStatus(status.value).trains == LossStatus(status.value).trains == trains
    assert Status(status.value).value == status.value
