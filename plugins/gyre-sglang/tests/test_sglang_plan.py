"""Plans, options, wire format: pure parts."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_core import (
    ComponentContext,
    ConfigError,
    GenerateRequest,
    InfrastructureError,
    Kind,
    PluginManager,
    SamplingParams,
)
from gyre_sglang.calls import Call, Segment
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.facts import LOADER, ModelFacts, read_server, version_warning
from gyre_sglang.options import SGLangOptions
from gyre_sglang.plan import SERVER_SIDE, launch_plan
from gyre_sglang.wire import Span, StreamReader, generate_body
from hypothesis import given
from hypothesis import strategies as st

MODEL = ModelFacts(vocab=320, positions=1024, layers=3, experts_per_token=0, tied=True)


def plan(device: str = "cuda", accelerators: int = 8, **options: Any) -> Any:
    return launch_plan(
        SGLangOptions(**options), MODEL, python="/env/python", location="/m", version=3, port=1234, device=device,
        accelerators=accelerators, threads=2, seed=5, orders="/o",
    )  # fmt: skip


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    words = [word for word in argv if word.startswith("--")]
    return {w: (argv[argv.index(w) + 1] if argv.index(w) + 1 < len(argv) else "") for w in words}


def test_a_plan_for_accelerators() -> None:
    made = plan(dp=2, ep=4, mem_fraction_static=0.6, context_length=512, routed_experts=True, arguments=("--x", "1"))
    found = flags(made.argv)
    assert made.argv[:3] == ("/env/python", "-m", "sglang.launch_server")
    assert (found["--tp-size"], found["--dp-size"], found["--ep-size"]) == ("4", "2", "4")
    assert (found["--mem-fraction-static"], found["--context-length"]) == ("0.6", "520")
    assert {"--enable-memory-saver", "--disable-overlap-schedule", "--enable-return-routed-experts"} <= set(made.argv)
    assert made.argv[-2:] == ("--x", "1")
    assert not {"--device", "--max-total-tokens", "--max-running-requests"} & set(made.argv)
    assert "SGLANG_PLATFORM" not in made.env
    assert made.spare_argv == ()
    assert made.env["PYTHONPATH"] == str(SERVER_SIDE)
    assert made.env["GYRE_SGLANG_ORDERS"] == "/o"
    assert "--custom-weight-loader" not in found, "it gives tensors to no replicas: they load from disk"
    assert flags(plan(tp=8).argv)["--custom-weight-loader"] == LOADER


def test_a_plan_for_a_cpu() -> None:
    made = plan("cpu", 0, kv_tokens=1000)
    found = flags(made.argv)
    assert made.argv[2] == "gyre_sglang_server.serve"
    assert (found["--device"], found["--attention-backend"]) == ("cpu", "torch_native")
    assert "--sleep-on-idle" in made.argv
    assert (found["--max-total-tokens"], found["--max-running-requests"]) == ("1008", "32")
    assert made.env["SGLANG_PLATFORM"] == "gyre_cpu"
    assert made.env["OMP_NUM_THREADS"] == "2"
    assert "--enable-memory-saver" not in made.argv
    assert made.spare_argv == (*made.argv[:3], "--spare")
    assert made.argv == (*made.argv[:3], *made.flags)
    assert plan("cpu", 0, cpu_spare=False).spare_argv == plan("cpu", 0, command=("x",)).spare_argv == ()


def test_the_context_never_exceeds_the_model() -> None:
    assert flags(plan(context_length=1024).argv)["--context-length"] == "1024"


def test_shared_pages_are_asked_for_on_a_cpu_only() -> None:
    found = flags(plan("cpu", 0, kv_share_gb=1.5).argv)
    config = json.loads(found["--unified-cache-external-linker-config"])
    assert config["linker_extra_config"] == {"folder": "", "limit_bytes": 3 * 2**29}
    with pytest.raises(ConfigError, match="kv_share_gb"):
        plan(kv_share_gb=1.0)


def test_a_command_replaces_the_start() -> None:
    argv = plan(command=("docker", "run", "img")).argv
    assert argv[:3] == ("docker", "run", "img")
    assert "--custom-weight-loader" not in argv


@pytest.mark.parametrize("wrong", [{"tp": 16}, {"dp": 3}, {"kv_share_gb": 1.0}])
def test_a_plan_that_cannot_be_is_refused_before_anything_starts(wrong: Any, tmp_path: Path) -> None:
    context = ComponentContext(str(tmp_path), "check", device="cuda", accelerators=8)
    with pytest.raises(ConfigError, match="planning the launch of SGLang"):
        SGLangEngine(SGLangOptions(**wrong), context)
    SGLangEngine(SGLangOptions(url="http://node7:30000"), context)


@pytest.mark.parametrize("sizes", [{"tp": 16}, {"tp": 4, "dp": 4}, {"dp": 3}, {"ep": 3}])
def test_sizes_that_do_not_fit_the_cell(sizes: Any) -> None:
    with pytest.raises(ConfigError, match="planning the launch"):
        plan(**sizes)


@pytest.mark.parametrize(
    "bad",
    [
        {"url": "http://x", "python": "y"}, {"dtype": "int4"}, {"on_update": "hope"}, {"overlap": True},
        {"chunk_s": 5.0, "stall_s": 4.0},
        {"mem_fraction_static": 1.0}, {"context_length": -1}, {"page_size": 0}, {"stall_s": 0.0},
    ],
)  # fmt: skip
def test_options_that_cannot_work(bad: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SGLangOptions(**bad)


def test_the_server_side_is_found_as_a_plugin_of_sglang() -> None:
    from importlib.metadata import distributions

    (found,) = distributions(path=[str(SERVER_SIDE)])
    (point,) = found.entry_points.select(group="sglang.srt.platforms")
    assert (point.name, point.value) == ("gyre_cpu", "gyre_sglang_server.activation:activate")
    assert (SERVER_SIDE / "gyre_sglang_server" / "activation.py").is_file()


def test_the_plugin_names_the_engine() -> None:
    component = PluginManager.installed().find(Kind.ENGINE, "sglang")
    assert component.missing == ()


INFO = {
    "version": "0.5.23", "page_size": 16, "max_req_input_len": 1018, "incremental_streaming_output": True,
    "internal_states": [{"effective_max_running_requests_per_dp": 8, "memory_usage": {"token_capacity": 64}}] * 2,
    "dp_size": 2, "disable_overlap_schedule": True,
}  # fmt: skip


def test_facts_of_a_server() -> None:
    facts = read_server(INFO, "u")
    assert (facts.slots, facts.kv_tokens, facts.max_prompt, facts.max_total) == (16, 128, 1017, 1022)
    assert not facts.overlap
    assert read_server(INFO | {"disable_overlap_schedule": False}, "u").overlap
    for key in ("version", "page_size", "max_req_input_len", "internal_states"):
        with pytest.raises(InfrastructureError, match=key):
            read_server({k: v for k, v in INFO.items() if k != key}, "u")
    assert version_warning("0.5.23") is None
    assert version_warning("0.5.23+cu129") is None
    assert "0.5.24" in str(version_warning("0.5.24"))


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", "s", [1, 2, 3], SamplingParams(9, **sampling))


def body_of(**sampling: Any) -> dict[str, Any]:
    return generate_body(
        request(**sampling),
        rid="x" * 24,
        prompt=[1, 2, 3],
        max_tokens=5,
        cache_key="k",
        seeded=True,
        version=4,
    )


def test_bodies() -> None:
    body = body_of(temperature=0.5, top_k=7, top_p=0.9, stop_token_ids=(4,), seed=2**40 + 3)
    how = body["sampling_params"]
    assert json.loads(json.dumps(body)) == body
    assert (how["temperature"], how["top_k"], how["top_p"], how["max_new_tokens"]) == (0.5, 7, 0.9, 5)
    assert (how["stop_token_ids"], how["ignore_eos"], how["no_stop_trim"]) == ([4], False, True)
    assert 0 <= how["sampling_seed"] < 2**31
    assert body["session_id"] == "s@4"
    assert (body["extra_key"], body["return_logprob"], body["stream"]) == ("k", True, True)
    plain = body_of()["sampling_params"]
    assert (plain["top_k"], plain["ignore_eos"]) == (-1, True)
    assert "sampling_seed" not in plain


def event(ids: list[Any], total: int, finish: Any = None, **meta: Any) -> bytes:
    pairs = [[-0.5, token, None] for token in ids]
    info = {"completion_tokens": total, "output_token_logprobs": pairs, "finish_reason": finish} | meta
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": info}).encode()


@given(
    st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=5), min_size=1, max_size=8), st.booleans(),
    st.integers(1, 4),
)  # fmt: skip
def test_events_add_up_however_they_are_cut(groups: list[list[int]], incremental: bool, together: int) -> None:
    """Into events of one or more tokens, and into blocks of one or more events."""
    reader = StreamReader("x", 320, 3, incremental=incremental)
    flat: list[int] = []
    events: list[bytes] = []
    for group in groups:
        flat += group
        events.append(event(group if incremental else list(flat), len(flat)))
    found: list[int] = []
    for at in range(0, len(events), together):
        piece = reader.feed(b"\n\n".join(events[at : at + together]))
        assert piece is not None
        assert len(piece.logprobs) == len(piece.token_ids)
        found += piece.token_ids
    assert found == flat


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"data: {not json", "cannot be read"),
        (b"<html>", "server-sent events"),
        (b"data: [1]", "events that are objects"),
        (b'data: {"text": "a"}', "output_ids and meta_info"),
        (event([5], 2), "1 tokens by now"),
        (event([320], 1), "token 320"),
        (event(["a"], 1), "cannot be read"),
        (event([True], 1), "cannot be read"),
        (event([5], 1, output_token_logprobs=[]), "0 logprobs for 1 tokens"),
        (event([5], 1, output_token_logprobs=[[-1.0, 6, None]]), "logprob of 6"),
        (event([5], 1, output_token_logprobs=[[None, 5, None]]), "logprob None"),
        (
            b'data: {"output_ids": [5], "meta_info": {"output_token_logprobs": [[-Infinity, 5, null]]}}',
            "cannot be read",
        ),
        (b'data: {"output_ids": [5], "meta_info": {"output_token_logprobs": [[-1e999, 5, null]]}}', "cannot be read"),
        (event([5], 1, {"type": "stop", "matched": "NaN happened"}), "not numbers"),
        (event([5], 1, output_token_logprobs=[3]), "cannot be read"),
        (event([5], 1, {"type": "length"}, weight_versions=[{"start": 0}]), "cannot be read"),
        (event([5], 1, {"type": "length"}, routed_experts="A"), "cannot be read"),
        (b'data: {"error": {"message": "too long", "code": 400}}', "too long"),
    ],
)
def test_events_that_are_not_whole(line: bytes, said: str) -> None:
    with pytest.raises(InfrastructureError, match=said):
        StreamReader("sampling", 320, 3, incremental=True).feed(line)


def test_the_last_event_tells_more() -> None:
    reader = StreamReader("x", 320, 3, incremental=True, experts_per_token=2)
    assert reader.feed(b"") is None
    assert reader.feed(b"data: [DONE]") is None
    rows = np.arange(4 * 6, dtype=np.int32)
    piece = reader.feed(
        event([5, 6], 2, {"type": "stop", "matched": 6}, cached_tokens=2,
              weight_versions=[{"version": "3", "start": 0, "end": 2}],
              routed_experts=base64.b64encode(rows.tobytes()).decode())
    )  # fmt: skip
    assert piece is not None
    assert (piece.finish, piece.matched, piece.cached_tokens) == ("stop", 6, 2)
    assert piece.spans == (Span("3", 0, 2),)
    assert piece.routed is not None
    assert piece.routed.shape == (4, 3, 2)
    with pytest.raises(InfrastructureError, match="24 routed experts for 5 positions"):
        reader.feed(event([7], 3, {"type": "length"}, routed_experts=base64.b64encode(rows.tobytes()).decode()))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_the_account_of_versions(lengths: list[int]) -> None:
    """Ours agrees with the server's; any shifted border is found."""
    call = Call(request(), 100)
    call.segment = Segment("x", 0, [(0, 0)])
    spans, at = [], 0
    for version, length in enumerate(lengths):
        call.turn(version)
        call.add(tuple(range(length)), (-1.0,) * length)
        spans.append(Span(str(version), at, at + length))
        at += length
    call.check(spans)
    for i in range(len(spans) - 1):
        shifted = [*spans]
        shifted[i] = Span(spans[i].version, spans[i].start, spans[i].end + 1)
        with pytest.raises(InfrastructureError, match="account"):
            call.check(shifted)
