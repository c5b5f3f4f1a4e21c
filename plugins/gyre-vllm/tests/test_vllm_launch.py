"""The launch plan, the keeper, a server of ours from start to end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gyre_core import (
    ComponentContext,
    ConfigError,
    EngineCapability,
    FinishReason,
    InfrastructureError,
    Kind,
    PluginManager,
    WeightSource,
)
from gyre_core.environments import read_spec
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.launch import ENVIRONMENT, Place, degrees, interpreter, launch_plan, memory_share, seed_of
from gyre_vllm.metrics import PrefillSpeed, ServerLoad, read_metrics
from gyre_vllm.options import VLLMOptions
from gyre_vllm.process import KEEPER
from gyre_vllm.server import _sleeps, warn_of_version

CPU = Place("127.0.0.1", 8000, 0, 2, 5)
FAKE = Path(__file__).with_name("vllm_fake.py")


def value(argv: tuple[str, ...], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


def test_a_cpu_plan() -> None:
    plan = launch_plan(VLLMOptions(dtype="float32", max_context=512), "/model", ("python", "serve"), CPU)
    assert plan.argv[:3] == ("python", "serve", "/model")
    assert "--enforce-eager" in plan.argv
    assert "--enable-sleep-mode" not in plan.argv
    assert value(plan.argv, "--kv-cache-memory-bytes") == str(1 << 30)
    assert value(plan.argv, "--max-model-len") == "512"
    assert value(plan.argv, "--logprobs-mode") == "raw_logprobs"
    env = dict(plan.env)
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["OMP_NUM_THREADS"] == "2"
    assert (Path(env["PYTHONPATH"]) / "gyre_vllm_worker.py").exists()
    assert plan.url == "http://127.0.0.1:8000"


def test_an_accelerator_plan_uses_all_of_the_cell_and_leaves_room_for_training() -> None:
    options = VLLMOptions(
        pipeline_parallel=2, expert_parallel=True, resident_gb=14.0, device_memory_gb=140.0, routed_experts=True,
        arguments=("--foo",), environment={"HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    plan = launch_plan(options, "/model", ("vllm", "serve"), Place("10.0.0.1", 9000, accelerators=8))
    assert value(plan.argv, "--tensor-parallel-size") == "4"
    assert value(plan.argv, "--pipeline-parallel-size") == "2"
    assert value(plan.argv, "--data-parallel-size") is None
    assert value(plan.argv, "--gpu-memory-utilization") == "0.8"
    assert {"--enable-sleep-mode", "--enable-expert-parallel", "--enable-return-routed-experts"} <= set(plan.argv)
    assert "--enforce-eager" not in plan.argv
    assert plan.argv[-1] == "--foo"
    assert dict(plan.env)["HF_HUB_OFFLINE"] == "0"


@pytest.mark.parametrize(
    ("given", "accelerators", "want"),
    [
        ({}, 0, (1, 1, 1)), ({}, 1, (1, 1, 1)), ({}, 8, (8, 1, 1)), ({"data_parallel": 4}, 8, (2, 1, 4)),
        ({"tensor_parallel": 2}, 0, (2, 1, 1)),
        ({"tensor_parallel": 3}, 8, None), ({"pipeline_parallel": 3}, 8, None), ({"data_parallel": 16}, 8, None),
    ],
)  # fmt: skip
def test_degrees(given: dict[str, int], accelerators: int, want: tuple[int, int, int] | None) -> None:
    if want is None:
        with pytest.raises(ConfigError, match="accelerators"):
            degrees(VLLMOptions(**given), accelerators)  # type: ignore[arg-type]
        return
    found = degrees(VLLMOptions(**given), accelerators)  # type: ignore[arg-type]
    assert (found.tensor, found.pipeline, found.data) == want


def test_replicas_have_one_interface_so_that_an_abort_reaches_every_call() -> None:
    plan = launch_plan(VLLMOptions(data_parallel=2), "/model", ("vllm", "serve"), Place("a", 1, accelerators=4))
    assert value(plan.argv, "--data-parallel-size") == "2"
    assert value(plan.argv, "--api-server-count") == "1"


async def test_slots_are_those_of_all_replicas(served: Any, sources: list[WeightSource]) -> None:
    server, engine = await served(start=False)
    server.replicas = 3
    await engine.start(sources[0])
    assert (await engine.load()).slots_total == 12


async def test_a_running_server_is_asked_what_it_can_do_before_a_run(served: Any, context: ComponentContext) -> None:
    server, engine = await served({"routed_experts": True, "transfers": True}, start=False)
    kinds = EngineCapability
    assert {kinds.ROUTED_EXPERTS, kinds.KV_HANDOVER} <= engine.capabilities, "as long as nobody has asked"
    assert await engine.look() == {kinds.PAUSE, kinds.SEED, kinds.SLEEP}
    server.experts = True
    server.faults.add("connector")
    assert await engine.look() == {kinds.PAUSE, kinds.SEED, kinds.ROUTED_EXPERTS, kinds.KV_HANDOVER}
    assert server.log == ["gyre_prepare"] * 2, "and nothing else is done to it"
    ours = VLLMEngine(VLLMOptions(), context)
    assert await ours.look() == ours.capabilities
    with pytest.raises(InfrastructureError, match=r"127\.0\.0\.1:9"):
        await VLLMEngine(VLLMOptions(url="http://127.0.0.1:9"), context).look()


def test_a_server_with_a_connector_keeps_its_blocks_where_others_look_for_them() -> None:
    """NIXL has told their addresses; sleep would unmap them."""
    plan = launch_plan(VLLMOptions(transfers=True), "/model", ("vllm", "serve"), Place("a", 1, accelerators=1))
    assert "--enable-sleep-mode" not in plan.argv
    told = {"device": "cuda:0", "sleep_mode": True}
    assert _sleeps(told, frozenset({"/sleep"}), ours=True)
    assert not _sleeps(told | {"connector": True}, frozenset({"/sleep"}), ours=True)
    assert not _sleeps({"device": "cpu", "connector": True}, frozenset(), ours=True)


def test_cells_that_started_with_different_versions_pass_each_others_handshake() -> None:
    """NIXL's own check has the folder that a server was started with in its hash."""
    plan = launch_plan(VLLMOptions(transfers=True), "/run/v7", ("vllm", "serve"), Place("127.0.0.1", 1))
    config = json.loads(value(plan.argv, "--kv-transfer-config") or "")
    assert config["kv_connector_extra_config"] == {"enforce_handshake_compat": False}


@pytest.mark.parametrize("given", [{"tensor_parallel": 3}, {"resident_gb": 90.0, "device_memory_gb": 96.0}])
def test_a_plan_that_cannot_be_is_refused_before_anything_starts(given: dict[str, Any], tmp_path: Path) -> None:
    context = ComponentContext(str(tmp_path), "check", device="cuda", accelerators=4)
    with pytest.raises(ConfigError, match="planning the vLLM server"):
        VLLMEngine(VLLMOptions(**given), context)
    VLLMEngine(VLLMOptions(url="http://node7:8000", **given), context)


def test_no_memory_left_is_said() -> None:
    with pytest.raises(ConfigError, match="kept by training"):
        memory_share(VLLMOptions(gpu_memory_utilization=0.5, resident_gb=60.0, device_memory_gb=80.0))


@pytest.mark.parametrize(
    "given",
    [
        {"python": "p", "url": "http://x"}, {"url": "x:80"}, {"dtype": "int8"}, {"stream_tokens": 0},
        {"on_update": "?"}, {"max_context": -1}, {"sleep": "restart", "url": "http://x"}, {"resident_gb": 1.0},
        {"sleep": "memory", "transfers": True},
        {"gpu_memory_utilization": 1.5},
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given)) if "max_context" not in given else "sizes"):
        VLLMOptions(**given)


def test_the_interpreter_is_found_or_the_way_to_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="engine_env"):
        interpreter(VLLMOptions())
    assert interpreter(VLLMOptions(python=sys.executable))[0] == sys.executable
    here, name = Path(sys.executable).parent, Path(sys.executable).name
    assert interpreter(VLLMOptions(python=name), str(here))[0] == str(here / name)
    assert interpreter(VLLMOptions(command=("docker", "run"))) == ("docker", "run")
    assert read_spec(ENVIRONMENT).name == "vllm"


def test_cells_and_lives_sample_apart() -> None:
    assert len({seed_of(seed, f"{name} {life}") for seed in (0, 1) for name in "ab" for life in (0, 1)}) == 8
    assert all(0 <= seed_of(seed, "x") < 2**31 for seed in range(50))


def test_versions() -> None:
    assert not warn_of_version("0.32.4")
    assert warn_of_version("0.33.0")
    assert warn_of_version("")


def test_metrics_of_several_engines_are_added() -> None:
    text = "\n".join(
        f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="{i}",model_name="m"}} {i + 1}.0
vllm:kv_cache_usage_perc{{engine="{i}",model_name="m"}} 0.{i + 1}
vllm:prompt_tokens_by_source_total{{engine="{i}",model_name="m",source="external_kv_transfer"}} 3.0
vllm:generation_tokens_total{{engine="{i}",model_name="m"}} 1e3
vllm:generation_tokens_created{{engine="{i}",model_name="m"}} 1.7e9
vllm:cache_config_info{{block_size="16",engine="{i}",num_gpu_blocks="10",kv_offloading_backend="a,b"}} 1.0"""
        for i in range(2)
    )
    load = read_metrics(text)
    assert (load.running, load.received, load.sampled, load.kv_tokens, load.block_tokens) == (3, 6, 2000, 320, 16)
    assert load.usage == pytest.approx(0.15)


def told(calls: int, tokens: int, seconds: float) -> ServerLoad:
    """What a server says that has prefilled so much since its start."""
    return read_metrics(
        f"""vllm:request_prefill_time_seconds_sum{{engine="0"}} {seconds}
vllm:request_prefill_time_seconds_count{{engine="0"}} {calls}.0
vllm:request_prefill_time_seconds_bucket{{engine="0",le="0.3"}} 77.0
vllm:request_prefill_kv_computed_tokens_sum{{engine="0"}} {tokens}.0
vllm:request_prefill_kv_computed_tokens_count{{engine="0"}} {calls}.0"""
    )


def test_the_prefill_speed_is_that_of_calls_that_computed_enough_since_the_last_reading() -> None:
    speed = PrefillSpeed()
    assert speed.of(told(0, 0, 0.0)) is None
    assert speed.of(told(2, 2000, 0.5)) == pytest.approx(4000)
    assert speed.of(told(2, 2000, 0.5)) == pytest.approx(4000)
    assert speed.of(told(12, 2010, 0.9)) == pytest.approx(4000), "ten calls of one token each tell nothing"
    assert speed.of(told(13, 3010, 1.4)) == pytest.approx(2000)
    assert speed.of(told(1, 100, 0.2)) == pytest.approx(500), "another server, which counts from 0"


def test_the_plugin_is_found_and_light() -> None:
    script = (
        "import sys, gyre_vllm.plugin, gyre_vllm.options; sys.exit(any(m in sys.modules for m in ('aiohttp', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert PluginManager.installed().find(Kind.ENGINE, "vllm").registration.options == "gyre_vllm.options:VLLMOptions"


def _exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_keeper_ends_a_stubborn_command_when_its_owner_dies(tmp_path: Path) -> None:
    """The command ignores SIGTERM and has a child; the owner is killed, not asked."""
    pids = tmp_path / "pids"
    command = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(100)"
    )
    owner = (
        "import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, {str(KEEPER)!r}, '0.3', sys.executable, '-c', {command!r}], "
        "stdin=subprocess.PIPE, start_new_session=True); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", owner])
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = [int(pid) for pid in pids.read_text().split()]
    assert all(map(_exists, found))
    process.kill()
    process.wait()
    while any(map(_exists, found)) and time.monotonic() < deadline + 60:
        time.sleep(0.05)
    assert not any(map(_exists, found))


async def load_error(engine: VLLMEngine) -> str:
    """What a question ends with, or nothing."""
    try:
        await engine.load()
    except InfrastructureError as error:
        return str(error)
    return ""


def options(*more: str) -> VLLMOptions:
    return VLLMOptions(command=(sys.executable, str(FAKE)), arguments=more, sleep="restart")


async def test_a_server_of_ours_lives_and_dies(
    fake: ModuleType, context: ComponentContext, sources: list[WeightSource], ask: Any
) -> None:
    engine = VLLMEngine(options(), context)
    await engine.start(sources[0])
    assert (await ask(engine, [1], 4)).ids[0] == fake.token_after([1], 10)
    chunks: list[Any] = []
    running = asyncio.create_task(ask(engine, [2], 200, into=chunks))
    while not chunks:
        await asyncio.sleep(0.005)
    await engine.sleep()
    assert (await running).finish is FinishReason.ABORT
    await engine.wake(sources[1])
    result = await ask(engine, [1], 4)
    assert result.ids[0] == fake.token_after([1], 11)
    assert result.versions == [1] * 4
    process = engine._state.server.process  # type: ignore[union-attr]
    children = Path(f"/proc/{process._process.pid}/task/{process._process.pid}/children").read_text().split()  # type: ignore[union-attr]
    chunks.clear()
    running = asyncio.create_task(ask(engine, [2], 250, name="doomed", into=chunks))
    while not chunks:
        await asyncio.sleep(0.005)
    os.kill(int(children[0]), signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="doomed"):
        await asyncio.wait_for(running, 60)
    while not (message := await load_error(engine)) or "exit status 137" not in message:
        await asyncio.sleep(0.02)
    await engine.sleep()
    await engine.wake(sources[2])
    assert (await ask(engine, [1], 4)).versions == [2] * 4
    await engine.close()
    assert not list(Path("/proc").glob(f"{process._process.pid}/stat"))  # type: ignore[union-attr]


async def test_a_server_that_does_not_start_says_why(context: ComponentContext, sources: list[WeightSource]) -> None:
    engine = VLLMEngine(options("--die"), context)
    with pytest.raises(InfrastructureError, match="out of memory"):
        await engine.start(sources[0])
    engine = VLLMEngine(VLLMOptions(command=("/no/such/program",)), context)
    with pytest.raises(InfrastructureError):
        await engine.start(sources[0])
