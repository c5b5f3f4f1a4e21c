"""The harness `mini-swe`: the real agent where its package is to be had, the protocol with a stand-in everywhere."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import gyre_harnesses
import pytest
from gyre_core import ComponentContext, ExecutionJob, ExecutionStatus, InfrastructureError, Limits, ScorerSpec, Task
from gyre_core.testing.endpoint import Call, Say, ScriptedEndpoint, in_order
from gyre_core.testing.harnesses import HarnessConformance, HarnessRig, RecordedEvents
from gyre_core.testing.support import environment_python
from gyre_harnesses.command.tally import Tally
from gyre_harnesses.mini_swe.harness import MiniSweHarness
from gyre_harnesses.mini_swe.harness import _end as end_of
from gyre_harnesses.options import LocalOptions, MiniSweOptions
from gyre_harnesses.sandbox.local import LocalSandbox

ENVIRONMENT = Path(gyre_harnesses.__file__).with_name("environment.toml")


def rig(tmp_path, python):
    context = ComponentContext(str(tmp_path), "test")
    work = Say("I look.", [Call("bash", {"command": "cat in.txt > out"})])
    done = Say("I submit.", [Call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})])
    return HarnessRig(
        lambda: MiniSweHarness(MiniSweOptions(python=python), context),
        lambda: LocalSandbox(LocalOptions(), context),
        works=[work, work, done],
    )


@pytest.mark.engine
class TestMiniSwe(HarnessConformance):
    @pytest.fixture
    def rig(self, tmp_path):
        return rig(tmp_path, environment_python(ENVIRONMENT))


STAND_IN = """
    #!{python}
    import json, sys
    job = json.loads(sys.stdin.readline())
    assert job["model"] == "openai/scripted" and job["model_kwargs"]["api_base"].endswith("/v1"), job
    print(json.dumps({{"ready": True}}), flush=True)
    print(json.dumps({{"run": "echo $PWD; cat in.txt; exit 4", "cwd": "", "timeout": None}}), flush=True)
    answer = json.loads(sys.stdin.readline())
    print(json.dumps({{"end": {end}, "text": answer["output"] + str(answer["returncode"])}}), flush=True)
"""


async def run(tmp_path, end, limits=None):
    python = tmp_path / "python"
    python.write_text(textwrap.dedent(STAND_IN).lstrip().format(python=sys.executable, end=end))
    python.chmod(0o755)
    context = ComponentContext(str(tmp_path), "test")
    sandbox = LocalSandbox(LocalOptions(), context)
    try:
        workspace = await sandbox.create("w", {"in.txt": b"1\n"})
        async with ScriptedEndpoint(in_order({})) as endpoint:
            job = ExecutionJob("e", Task("t", "p", ScorerSpec("files")), endpoint.address, limits or Limits())
            harness = MiniSweHarness(MiniSweOptions(python=str(python)), context)
            return await harness.run(job, workspace, RecordedEvents())
    finally:
        await sandbox.close()


async def test_commands_go_to_the_sandbox_and_the_agents_word_is_kept(tmp_path):
    end = await run(tmp_path, "'Submitted'")
    assert (end.status, end.tool_calls) == (ExecutionStatus.COMPLETED, 1)
    assert end.evidence["final"].endswith("1\n4")


@pytest.mark.parametrize(
    ("end", "reason"), [("'LimitsExceeded'", "limit of turns"), ("'RepeatedFormatError'", "limit of unreadable")]
)
async def test_its_limits_are_statuses(tmp_path, end, reason):
    ended = await run(tmp_path, end)
    assert ended.status is ExecutionStatus.TIMEOUT
    assert ended.reason.startswith(reason)


@pytest.mark.parametrize(
    ("tally", "ended", "status"),
    [
        (Tally(refused="context"), "Submitted", ExecutionStatus.TRUNCATED),
        (Tally(refused="sampled_tokens"), "APIError", ExecutionStatus.TRUNCATED),
        (Tally(refused="turns"), "APIError", ExecutionStatus.TIMEOUT),
        (Tally(), "TimeExceeded", ExecutionStatus.TIMEOUT),
        (Tally(fault="HTTP 503"), "Submitted", ExecutionStatus.COMPLETED),
        (Tally(fault="HTTP 503"), "TimeExceeded", None),
        (Tally(fault="HTTP 503"), "APIError", None),
        (Tally(fault="HTTP 503", refused="turns"), "APIError", None),
        (Tally(fault="HTTP 503"), "LimitsExceeded", None),
        (Tally(answered=1, turned_down="HTTP 400"), "BadRequestError", ExecutionStatus.COMPLETED),
        (Tally(answered=1, turned_down="HTTP 400", fault="HTTP 503"), "BadRequestError", None),
        (Tally(turned_down="HTTP 503, as it were"), "BadRequestError", None),
    ],
    ids=[
        "context",
        "tokens",
        "turns",
        "time",
        "submitted all the same",
        "time, by our fault",
        "crashed by our fault",
        "turns, with a fault",
        "its own turns, with a fault",
        "by a request that the model's text spoilt",
        "a spoilt request and a fault",
        "a request that no text of the model is in",
    ],
)
def test_how_it_ended_is_told_from_what_went_through_the_gate(tally, ended, status):
    said = {"end": ended, "text": ""}
    if status is None:
        with pytest.raises(InfrastructureError, match="HTTP 503"):
            end_of(tally, said, 0)
    else:
        assert end_of(tally, said, 0).status is status


async def test_its_crashes_are_ours(tmp_path):
    with pytest.raises(InfrastructureError, match="RuntimeError"):
        await run(tmp_path, "'RuntimeError'")
    with pytest.raises(InfrastructureError, match="its process ended"):
        await run(tmp_path, "1 / 0")


async def test_its_time_is_limited(tmp_path):
    end = await run(tmp_path, "__import__('time').sleep(600)", Limits(wall_s=1.5))
    assert (end.status, end.reason) == (ExecutionStatus.TIMEOUT, "limit of time")
