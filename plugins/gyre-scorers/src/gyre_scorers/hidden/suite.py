"""What a task says of its hidden suite, and how signed lines become results.

Invariant: pure; a line whose signature does not hold is as if it were not there; one process speaks, so two lines of
one number, or one after the end, make all void; a test that failed once has failed. Not here: running anything.
"""

from __future__ import annotations

import fnmatch
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_core import Milestone, Task

from gyre_scorers.hidden.probes import Probes, file_of
from gyre_scorers.hidden.skips import read_skips
from gyre_scorers.reading import fault, value

_KEYS: dict[str, type | tuple[type, ...]] = {
    "files": Mapping,
    "folder": str,
    "targets": (list, tuple),
    "count": int,
    "paths": (list, tuple),
    "arguments": (list, tuple),
    "setup": (list, tuple),
    "python": str,
    "timeout_s": (int, float),
    "test_timeout_s": (int, float),
    "weights": Mapping,
    "skipped": str,
    "site_packages": bool,
    "probes": bool,
}


@dataclass(frozen=True, slots=True)
class Suite:
    """A hidden suite."""

    files: Mapping[str, bytes]
    """Path in the copy of the workspace -> content; they replace what the agent left there."""
    targets: Sequence[str]
    """What pytest is given: folders or files. The agent's own test files below them are removed first."""
    count: int
    """How many tests there are when all can be collected: the denominator when fewer were; parameters of
    tests beyond it earn nothing."""
    paths: Sequence[str] = (".", "src")
    """Folders of the copy that are importable, first to last."""
    arguments: Sequence[str] = ()
    """Further arguments of pytest."""
    setup: Sequence[str] = ()
    """Shell lines run in the copy before the suite; that they fail is no error of itself."""
    python: str | None = None
    timeout_s: float | None = None
    test_timeout_s: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    """Pattern of test ids (as fnmatch has it) -> weight; the first that fits; otherwise 1."""
    skipped: str = "left out"
    """What a test counts as that the suite itself skips: `failed`, `passed`, or `left out`. One that the code under
    test skips has failed, and so has one that nothing in the suite's text skips (see `skips`)."""
    site_packages: bool = False
    """Whether packages installed in the sandbox can be imported: one of them may be the very project to be written."""
    probes: bool = True
    """Whether work that passed is judged a second time, with tests in it that must fail (see `probes`)."""


def read_suite(task: Task, base_dir: str) -> Suite:
    """The suite of a task's scorer options; ConfigError naming the task when they are wrong."""
    given = dict(task.scorer.options)
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise fault(task, "its keys", unknown, f"keys among {', '.join(_KEYS)}")
    for key, kinds in _KEYS.items():
        value(task, given, "the suite", key, kinds, None)
    if ("files" in given) == ("folder" in given):
        raise fault(task, "the suite", sorted(given), "either 'files' or 'folder'")
    if not given.get("targets") or not isinstance(given.get("count"), int) or given["count"] < 1:
        raise fault(task, "the suite", sorted(given), "'targets', and 'count' of at least 1")
    if given.get("skipped", "failed") not in ("failed", "passed", "left out"):
        raise fault(task, "the suite, 'skipped'", given["skipped"], "failed, passed or left out")
    folder = given.pop("folder", None)
    files = given.pop("files", None)
    if folder is not None:
        files = _folder(task, Path(base_dir, folder))
    texts = {path: data.encode() if isinstance(data, str) else bytes(data) for path, data in files.items()}
    for path in (*texts, *given["targets"]):
        if path.startswith(("/", "-")) or ".." in path.split("/"):
            raise fault(task, "a path of the suite", path, "a path inside the workspace")
    return Suite(files=texts, **given)


def _folder(task: Task, folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise fault(task, "the suite, 'folder'", str(folder), "a folder that exists")
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def signed_records(output: bytes, key: bytes) -> list[dict[str, Any]]:
    """The records of all lines that bear the right signature, in the order in which they were made.

    A further one of kind `forged` stands at the end if more than one process made them: a fork of the one that judges
    has its key and its count, so that sooner or later both say something under one number, or one goes on after the
    other's end. So does one if a line says what the guard never says.
    """
    records: dict[int, dict[str, Any]] = {}
    forged = False
    for line in output.split(b"\n"):
        mac, _, text = line.partition(b" ")
        if len(mac) == 64 and hmac.compare_digest(hmac.digest(key, text, "sha256").hex().encode(), mac):
            record = _record(text)
            forged |= record is None or records.setdefault(record["n"], record) != record
    ordered = [records[number] for number in sorted(records)]
    forged |= any(record["kind"] == "end" for record in ordered[:-1])
    return [*ordered, {"kind": "forged"}] if forged else ordered


_SHAPES: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "ready": {},
    "uncollected": {"id": str, "why": str},
    "collected": {"ids": list},
    "start": {"id": str},
    "result": {"id": str, "outcome": str, "why": str, "at": str},
    "canary": {"void": (str, type(None))},
    "end": {"code": int, "void": (str, type(None)), "said": str},
}
_GRAVITY = ("passed", "skipped", "failed")


def _record(text: bytes) -> dict[str, Any] | None:
    """What a signed line says; None when the guard never says such a thing."""
    try:
        record = _plain(json.loads(text))
        shape = {"n": int, **_SHAPES[record["kind"]]}
        whole = all(isinstance(record[key], kind) for key, kind in shape.items())
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    whole &= (
        all(isinstance(name, str) for name in record.get("ids", ())) and record.get("outcome", "failed") in _GRAVITY
    )
    return record if whole else None


def _plain(found: Any) -> Any:
    """The same with text that every encoding has: code under test may put half a character into what it says."""
    match found:
        case str():
            return found.encode("utf-8", "replace").decode()
        case list():
            return [_plain(each) for each in found]
        case dict():
            return {key: _plain(each) for key, each in found.items()}
    return found


@dataclass(slots=True)
class Results:
    """What is known of the suite's tests after some runs."""

    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Test id -> outcome (`passed`, `failed`, `skipped`) and why."""
    collected: list[str] = field(default_factory=list)
    uncollected: dict[str, str] = field(default_factory=dict)
    void: str | None = None
    places: dict[str, str] = field(default_factory=dict)
    """Test id -> file and line at which it failed."""
    _pending: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Of the present run, since the last sign that it can be trusted."""

    def add(self, records: Sequence[Mapping[str, Any]], limit: str | None) -> bool:
        """Take in one run's records; True when another run could learn more."""
        running: str | None = None
        last: str | None = None
        here: set[str] | None = None
        ended, self._pending = False, {}
        for record in records:
            match record["kind"]:
                case "collected":
                    self._once(here is None, "the tests were collected twice")
                    here = set(record["ids"])
                    self.collected += [name for name in record["ids"] if name not in self.outcomes]
                case "uncollected":
                    self.uncollected[record["id"]] = record["why"]
                case "start":
                    self._once(here is not None and record["id"] in here, "a test ran that was not collected")
                    running = last = record["id"]
                case "result":
                    self._once(here is not None and record["id"] in here, "a test ran that was not collected")
                    self._result(record)
                    running = None
                case "canary":
                    self._trust(record)
                case "end":
                    ended = True
                    self._trust(record)
                    if record["code"] not in (0, 1):
                        self.uncollected["pytest"] = f"exit code {record['code']}: {record['said']}"
                case "forged":
                    self.void = self.void or "more than one process spoke for the judge"
        if ended or last is None or self.void is not None or (running is None and limit is not None):
            return False
        # Between two tests it can only have been what ran last, which may have reported in its own name before.
        self.outcomes[running or last] = ("failed", f"ended the process ({limit or 'by itself'})")
        return limit is None or limit == "wall"

    def _once(self, holds: bool, otherwise: str) -> None:
        """What the guard keeps to; another who speaks in its name may not."""
        if not holds:
            self.void = self.void or otherwise

    @property
    def passed(self) -> list[str]:
        """Ids of the tests that passed."""
        return [name for name, (outcome, _) in self.outcomes.items() if outcome == "passed"]

    def judged_again(self, again: Results, probes: Probes) -> None:
        """Hold what passed against a second judging with probes: it counts if it passed again, or failed at the end of
        a probe alone. A probe that passed makes all of it void. A file none of whose probes failed at its end says
        nothing, but of tests for which none can speak: names that are not the suite's can be told, a probe's end not.
        """
        if again.void is not None or any(probes.among(name) for name in again.passed):
            self.void = again.void or "a test that must fail passed"
        reached = {name for name, at in again.places.items() if probes.reached(at)}
        files = {file_of(name) for name in reached}
        for name in self.passed:
            outcome, why = again.outcomes.get(name, ("failed", "was not reached"))
            if probes.names and outcome != "passed" and name not in reached:
                self.outcomes[name] = ("failed", f"passed, and when judged again {outcome}: {why}")
            elif file_of(name) not in files and not probes.beyond(name):
                self.outcomes[name] = ("failed", "passed, but no test of its file failed that must fail")

    def _trust(self, record: Mapping[str, Any]) -> None:
        """What came before a test that failed as it must, or a good end, counts."""
        self.void = self.void or record["void"]
        for name, outcome in self._pending.items():
            _worst(self.outcomes, name, outcome)
        self._pending = {}

    def _result(self, record: Mapping[str, Any]) -> None:
        _worst(self._pending, record["id"], (record["outcome"], record["why"]))
        if record["outcome"] == "failed":
            self.places.setdefault(record["id"], record["at"])


def _worst(outcomes: dict[str, tuple[str, str]], name: str, outcome: tuple[str, str]) -> None:
    """Nothing that is said later takes back that a test failed."""
    known = outcomes.get(name)
    if known is None or _GRAVITY.index(outcome[0]) > _GRAVITY.index(known[0]):
        outcomes[name] = outcome


def milestones(suite: Suite, results: Results) -> list[Milestone]:
    """One for each test that was collected, and one for all that were expected besides."""
    if results.void is not None:
        return [Milestone("the suite", False, float(suite.count), f"void: {results.void}")]
    found: list[Milestone] = []
    left_out, skips = 0, read_skips(suite.files)
    for name in dict.fromkeys(results.collected):
        outcome, why = results.outcomes.get(name, ("failed", "was not reached"))
        if outcome == "skipped" and not skips.allow(name):
            outcome, why = "failed", "skipped, and nothing in the suite skips it"
        if outcome == "skipped" and suite.skipped == "left out":
            left_out += 1
            continue
        passed = outcome == "passed" or (outcome == "skipped" and suite.skipped == "passed")
        found.append(Milestone(name, passed, _weight(suite, name), "" if passed else _short(f"{outcome}: {why}")))
    missing = suite.count - len(found) - left_out
    if -missing > suite.count / 10:  # platforms differ by a few
        return _within(suite, found, -missing)
    if missing > 0:
        causes = "; ".join(f"{name}: {_short(why)}" for name, why in results.uncollected.items())
        found.append(Milestone(f"{missing} tests not collected", False, float(missing), causes or "they are not there"))
    return found


def _within(suite: Suite, found: list[Milestone], beyond: int) -> list[Milestone]:
    """More tests than there are: as many with parameters that passed, the heaviest first, count for nothing. So nobody
    gains by adding tests, as work can from which a suite takes its parameters; others stand in the suite's text."""
    heavy = sorted((m.weight for m in found if m.passed and "[" in m.name), reverse=True)[:beyond]
    why = f"one of {beyond} beyond the {suite.count} tests that the suite is said to have"
    kept: list[Milestone] = []
    for milestone in found:
        if milestone.passed and "[" in milestone.name and milestone.weight in heavy:
            heavy.remove(milestone.weight)
            milestone = Milestone(milestone.name, False, 0.0, why)
        kept.append(milestone)
    return kept


def _weight(suite: Suite, name: str) -> float:
    return next((float(w) for pattern, w in suite.weights.items() if fnmatch.fnmatchcase(name, pattern)), 1.0)


def _short(text: str) -> str:
    return text if len(text) <= 300 else "…" + text[-300:]
