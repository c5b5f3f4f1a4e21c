"""The store: what is written comes back bit for bit, readers see it while the writer works, faults stay contained."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
from gyre_tito import TitoService
from gyre_tito.dialects.chat import ChatCompletions
from gyre_tito.pack import Packer
from gyre_tito.records import CallRecord, ExecutionSpec, Link, Score, SessionInfo, Status
from gyre_tito.schema import StoreError
from gyre_tito.store import Store
from gyre_tito.testing import BookkeepingEngine, scripted, tiny_format
from hypothesis import given
from hypothesis import strategies as st


def call(index, parent=-1, prefix_len=0, context=(1, 2, 3), sampled=(4, 5), **more):
    return CallRecord(
        index=index,
        session="main",
        parent=parent,
        prefix_len=prefix_len,
        context_ids=np.array(context, dtype=np.int32),
        sampled_ids=np.array(sampled, dtype=np.int32),
        logprobs=np.linspace(-1, -0.5, len(sampled), dtype=np.float32),
        versions=np.array([3] * len(sampled), dtype=np.int32),
        finish="stop",
        **more,
    )


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packing_is_lossless(values):
    packer = Packer()
    array = np.array(values, dtype=np.int32)
    assert packer.unpack(packer.planes(array), np.int32).tolist() == values
    assert packer.unpack(packer.runs(array), np.int32).tolist() == values
    floats = array.view(np.float32)
    assert packer.unpack(packer.planes(floats), np.float32).tobytes() == floats.tobytes()


def test_damaged_blobs_are_refused():
    blob = bytearray(Packer().planes(np.arange(100, dtype=np.int32)))
    blob[len(blob) // 2] ^= 0xFF
    with pytest.raises(ValueError, match="damaged"):
        Packer().unpack(bytes(blob), np.int32)
    with pytest.raises(ValueError, match="unknown layout"):
        Packer().unpack(b"Z" + Packer().planes(np.arange(3, dtype=np.int32))[1:], np.int32)


async def test_calls_executions_and_sessions_come_back(tmp_path):
    routed = np.arange(20, dtype=np.int16).reshape(5, 2, 2)
    with Store.open(tmp_path / "s.db", writable=True) as store:
        await store.add_execution(ExecutionSpec("e", "task", "g", 7, "eval", {"k": [1]}), "secret")
        await store.add_call(
            "e",
            call(0, routed_experts=routed, link=Link.START, cached_tokens=2, meta={"dialect": "chat"}),
            b"note",
            SessionInfo("main"),
        )
        await store.add_call("e", call(1, 0, 5, (9,), ()))
        with Store.open(tmp_path / "s.db") as reader:
            back, note = reader.calls_with_match("e")[0]
            assert note == b"note"
            assert (back.link, back.cached_tokens, back.meta) == (Link.START, 2, {"dialect": "chat"})
            assert np.array_equal(back.routed_experts, routed)
            assert reader.load_tree("e").path_ids(1).tolist() == [1, 2, 3, 4, 5, 9]
            assert reader.sessions("e") == [SessionInfo("main")]
            await store.close_execution("e", Status.TIMEOUT, Score(0.5, {"a": 1.0}), "clock")
            info = reader.execution("e")
            assert (info.status, info.score, info.cause) == (Status.TIMEOUT, Score(0.5, {"a": 1.0}), "clock")
            assert (info.calls, info.context_tokens, info.sampled_tokens) == (2, 4, 2)
            assert (info.purpose, info.metadata, info.step, info.group) == ("eval", {"k": [1]}, 7, "g")
            assert reader.execution_of_key("secret") == info
            assert reader.execution_of_key("wrong") is None
            assert reader.executions(step=7, group="g", status=Status.TIMEOUT) == [info]
            assert reader.executions(step=8) == []


async def test_group_commit_isolates_the_guilty_job(tmp_path):
    with Store.open(tmp_path / "s.db", writable=True) as store:
        await store.add_execution(ExecutionSpec("e"))
        jobs = [store.add_call("e", call(index)) for index in (0, 1, 1, 2)]
        outcome = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(one) for one in outcome] == [type(None), type(None), StoreError, type(None)]
        assert [one.index for one in store.calls("e")] == [0, 1, 2]


async def test_whoever_stops_waiting_does_not_take_the_job_back(tmp_path):
    held = threading.Event()
    with Store.open(tmp_path / "s.db", writable=True) as store:
        await store.add_execution(ExecutionSpec("e"))
        store.writer.submit(lambda *_: held.wait(120) and None)
        waiting = asyncio.create_task(store.add_call("e", call(0)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert store.calls("e") == []
        held.set()
        await store.add_call("e", call(1))
        assert [one.index for one in store.calls("e")] == [0, 1]


async def test_closing_waits_for_a_call_that_was_cut_while_its_commit_ran(tmp_path):
    chat, held = tiny_format(), threading.Event()
    with Store.open(tmp_path / "s.db", writable=True) as store:
        service = TitoService(BookkeepingEngine(scripted(chat, "hi")), store, chat)
        await service.open_execution(ExecutionSpec("e"))
        execution = service._open("e")
        store.writer.submit(lambda *_: held.wait(120) and None)
        body = b'{"messages":[{"role":"user","content":"u"}]}'
        batch = await service.chat(execution, ChatCompletions().request(body, len(chat.tokenizer))[0], None)
        while not execution.tree.calls:
            await asyncio.sleep(0)
        batch.cancel()
        await asyncio.wait(batch.tasks)
        assert store.calls("e") == []
        closing = asyncio.create_task(service.close())
        await asyncio.sleep(0.02)
        assert not closing.done()
        held.set()
        await closing
        assert len(store.calls("e")) == 1


def test_a_job_outlives_the_loop_that_waited_for_it(tmp_path, recwarn, caplog):
    held = threading.Event()
    gc.collect()  # what others left behind complains now
    caplog.clear()
    recwarn.clear()

    async def give_up(store):
        store.writer.submit(lambda *_: held.wait(120) and None)
        waiting = asyncio.create_task(store.add_call("e", call(0)))
        await asyncio.sleep(0)
        waiting.cancel()

    with Store.open(tmp_path / "s.db", writable=True) as store:
        asyncio.run(store.add_execution(ExecutionSpec("e")))
        asyncio.run(give_up(store))
        held.set()
        asyncio.run(store.add_call("e", call(1)))
        assert [one.index for one in store.calls("e")] == [0, 1]
    assert not caplog.records
    assert not recwarn.list


async def test_clear_errors(tmp_path):
    with pytest.raises(StoreError, match="no such file"):
        Store.open(tmp_path / "none.db")
    (tmp_path / "text.db").write_text("hello " * 1000)
    with pytest.raises(StoreError, match=r"text\.db"):
        Store.open(tmp_path / "text.db")
    with Store.open(tmp_path / "s.db", writable=True) as store:
        with pytest.raises(StoreError, match="no such execution"):
            await store.close_execution("nobody", Status.FAILED)
        with pytest.raises(StoreError, match="no execution"):
            store.load_tree("nobody")
        store.writer.submit(lambda db, _: db.execute("UPDATE meta SET value='99'")).result()
    with pytest.raises(StoreError, match="schema version 99"):
        Store.open(tmp_path / "s.db")


def test_reader_in_another_process_sees_a_committed_call(tmp_path):
    path = tmp_path / "s.db"
    with Store.open(path, writable=True) as store:
        asyncio.run(store.add_execution(ExecutionSpec("e")))
        asyncio.run(store.add_call("e", call(0)))
        script = f"from gyre_tito.store import Store; print(Store.open({str(path)!r}).load_tree('e').token_count)"
        out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert out.stdout.strip() == "5"


def test_rows_of_experts_that_come_in_parts_are_put_where_they_belong():
    from gyre_tito.calls import _joined

    def rows(*values):
        return np.array(values, np.int32).reshape(-1, 1, 1)

    assert _joined([]) == (0, None)
    for parts, first, wanted in (
        ([(4, rows(4, 5)), (6, rows(6))], 4, [4, 5, 6]),
        ([(4, rows(4)), (6, rows(6))], 4, [4, -1, 6]),
        ([(4, rows(0, 0)), (5, rows(5))], 4, [0, 5]),
    ):
        start, joined = _joined(parts)
        assert (start, joined[:, 0, 0].tolist()) == (first, wanted)
