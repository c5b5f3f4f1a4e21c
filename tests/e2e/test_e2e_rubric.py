"""`gyre run` with a model that judges, composed with a hidden suite and commands; the judge is a real HTTP end point.

What it says arrives, with its evidence, in the store and in the advantage. A judge that is away, or answers nonsense,
is our fault: it is asked a bounded number of times, nothing is scored as zero, and a run without any score ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gyre_rl.run.directory import RunDirectory
from gyre_rl.views import events as ev
from gyre_tito import ExecutionInfo, Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = """
split = "{split}"
prompt = "Look at what is there."

[scorer]
name = "composite"

[[scorer.parts]]
scorer = "commands"
weight = 1
[[scorer.parts.milestones]]
name = "letter"
run = "test -f letter.txt"

[[scorer.parts]]
scorer = "pytest"
weight = 1
targets = ["tests"]
count = 1

[[scorer.parts]]
scorer = "rubric"
weight = 2
context = "A letter of the {split} split."
files = ["letter.txt"]
criteria = [{{ question = "Is it kind?", name = "kind" }}, {{ question = "Is it short?", name = "short", weight = 3 }}]
"""
CONFIG = """
extends = "{base}"
name = "judged"

[model]
path = "{model}"

[tasks]
name = "folder"
path = "tasks"

[rollout]
tasks_per_step = 1
group_size = 4
retries = 1

[limits]
max_turns = 1

[harness]
name = "shell"
tools = ["bash"]

[[scorers]]
name = "composite"
[scorers.rubric]
base_url = "{url}"
retry_first_s = 0.01
"""
Answer = tuple[int, str]
"""Status of the judge's answer, and what it says."""


def verdict(yes: bool, why: str) -> Answer:
    return 200, json.dumps({"why": why, "verdict": "yes" if yes else "no"})


@contextmanager
def judging(answer: Callable[[str, int], Answer]) -> Iterator[str]:
    """A judge: `answer` gets the question with the work, and how often any was asked before."""
    lock, asked = threading.Lock(), 0

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal asked
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                status, said = answer(body["messages"][1]["content"], asked)
                asked += 1
            data = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def gyre_run(folder: Path, url: str, *sets: str) -> subprocess.CompletedProcess[str]:
    for split in ("train", "heldout"):
        task = folder / "tasks" / f"letter-{split}"
        for path, text in {
            "task.toml": TASK.format(split=split),
            "start/letter.txt": "Dear you\n",
            "start/greeting.py": "def greet(): return 'hello'\n",
            "hidden/tests/test_greeting.py": "import greeting\ndef test_it(): assert greeting.greet() == 'hello'\n",
        }.items():
            (task / path).parent.mkdir(parents=True, exist_ok=True)
            (task / path).write_text(text)
    file = folder / "gyre.toml"
    file.write_text(
        CONFIG.format(base=EXAMPLES / "bases" / "laptop.toml", model=EXAMPLES / "quickstart" / "policy", url=url)
    )
    words = ["run", str(file), "--plain", *(f"--set={item}" for item in (f"dir={folder / 'run'}", *sets))]
    return subprocess.run([sys.executable, "-m", "gyre_rl", *words], capture_output=True, text=True, check=False)


def recorded(folder: Path) -> tuple[list[ExecutionInfo], list[Any]]:
    directory = RunDirectory(folder / "run")
    with Store.open(directory.store) as store:
        return list(store.executions()), [ev.parse(event) for event in ev.read_log(directory.events)]


@pytest.mark.checked
def test_what_the_judge_says_arrives_in_the_store_and_the_advantage(tmp_path: Path) -> None:
    """It is away for the first two questions, mumbles at the third, and finds each second training letter kind."""
    kind = 0

    def answer(question: str, before: int) -> Answer:
        nonlocal kind
        if before < 3:
            return (503, "") if before < 2 else (200, "Well, I think so.")
        if "short" in question:
            return verdict(True, "eight letters")
        kind += "the train split" in question
        return verdict(kind % 2 == 0, f"letter {kind} says dear")

    with judging(answer) as url:
        done = gyre_run(tmp_path, url)
    assert done.returncode == 0, done.stderr[-3000:]
    infos, events = recorded(tmp_path)
    scored = [info for info in infos if info.purpose == "train" and info.score is not None]
    shares = {0.875: False, 1.0: True}  # a quarter each for letter and suite, a half for the rubric's (kind + 3) / 4
    values = [shares[info.score.value] for info in scored]
    assert Counter(values) == {True: 2, False: 2}
    for info, is_kind in zip(scored, values, strict=True):
        told = {each["name"]: each for each in info.metadata["verdict"]["milestones"]}
        assert set(told) == {
            "commands: letter",
            "pytest: tests/test_greeting.py::test_it",
            "rubric: kind",
            "rubric: short",
        }
        assert told["rubric: kind"]["passed"] is is_kind
        assert "says dear" in told["rubric: kind"]["evidence"]
        assert told["rubric: short"]["evidence"] == "eight letters"
        assert sum(each["weight"] for each in told.values()) == pytest.approx(1.0)
        assert info.score.milestones["rubric: kind"] == float(is_kind)
    (ready,) = (event for event in events if isinstance(event, ev.GroupReady))
    assert (ready.members, ready.baseline, ready.spread) == (4, pytest.approx(0.9375), pytest.approx(0.0625))
    assert ready.batches > 0, "the scores differ, so there is something to learn"
    assert no_zeros(infos)


def no_zeros(infos: list[ExecutionInfo]) -> bool:
    """No failure has a score."""
    return all((info.score is None) == (info.status.value == "failed") for info in infos)


def test_a_judge_that_is_away_for_good_ends_the_run_without_a_score(tmp_path: Path) -> None:
    with judging(lambda question, before: (500, "")) as url:
        done = gyre_run(tmp_path, url)
    assert done.returncode == 1
    assert "judging 'heldout' after step 0" in done.stderr
    assert f"HTTP 500 of {url}" in done.stderr
    infos, events = recorded(tmp_path)
    assert [(info.status.value, info.score) for info in infos] == [("failed", None)] * 2, "one retry"
    assert not [event for event in events if isinstance(event, ev.Evaluated)], "and no mean of nothing"


def test_a_judge_that_mumbles_at_training_ends_the_run_when_group_after_group_is_lost(tmp_path: Path) -> None:
    asked: Counter[str] = Counter()

    def answer(question: str, before: int) -> Answer:
        train = "the train split" in question
        asked["train" if train else "heldout"] += 1
        return (200, "Hm.") if train else verdict(True, "fine")

    with judging(answer) as url:
        done = gyre_run(tmp_path, url, "rollout.retries=0", "rollout.group_size=2")
    assert done.returncode == 1
    assert "8 groups in a row lost" in done.stderr
    assert "asking the judge: got 'Hm.'" in done.stderr
    infos, _ = recorded(tmp_path)
    train = [info for info in infos if info.purpose == "train"]
    ended = [info for info in train if info.status.value != "open"]
    assert no_zeros(ended)
    assert {info.status.value for info in ended} == {"failed"}
    assert asked["train"] <= len(train) * 2 * 3, "three tries for each of two criteria"
    assert asked["heldout"] == 2
