"""Scorer `files`: each milestone is a file of the workspace with an expected content or digest.

Invariant: only regular files inside the workspace count, read through the workspace (links that lead out are refused
there); a missing, unreadable or oversized file is a milestone not passed, never an error. Not here: running anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from gyre_core import ComponentContext, Milestone, Score, ScoringJob, Task, Workspace

from gyre_scorers.options import FilesOptions
from gyre_scorers.reading import fault, milestone_specs, value

_KEYS = ("path", "content", "sha256", "weight", "strip", "name")


class FilesScorer:
    """Options of a task: `{"milestones": [{"path", "content" or "sha256", "weight": 1.0, "strip": true, "name"}]}`.

    `strip`: white space at the end of the file and of every line is ignored, on both sides, before comparing or
    digesting; so the digest is of the stripped bytes (see `stripped`).
    """

    def __init__(self, options: FilesOptions | None, context: ComponentContext) -> None:
        self.options = options or FilesOptions()

    def check(self, task: Task) -> None:
        """ConfigError when the task's options are wrong."""
        _specs(task)

    async def score(self, job: ScoringJob, workspace: Workspace) -> Score:
        """One milestone per file, in the task's order."""
        specs = _specs(job.task)
        milestones = [await self._milestone(spec, workspace) for spec in specs]
        partial = job.end.status.partial
        return Score.of_milestones(milestones, complete=not partial, why=job.end.reason if partial else "")

    async def _milestone(self, spec: Mapping[str, Any], workspace: Workspace) -> Milestone:
        path = spec["path"]
        try:
            data = await workspace.read(path, limit=self.options.largest_bytes + 1)
        except OSError as error:
            passed, evidence = False, f"{path}: {error.strerror or type(error).__name__}"
        else:
            if len(data) > self.options.largest_bytes:
                passed, evidence = False, f"{path}: more than {self.options.largest_bytes} bytes"
            else:
                passed, evidence = compare(spec, data)
        return Milestone(spec.get("name", path), passed, float(spec.get("weight", 1.0)), evidence)


def _specs(task: Task) -> list[Mapping[str, Any]]:
    specs = milestone_specs(task, task.scorer.options, known=_KEYS)
    for index, spec in enumerate(specs):
        _check(task, spec, f"milestone {index}")
    return specs


def _check(task: Task, spec: Mapping[str, Any], where: str) -> None:
    if not value(task, spec, where, "path", str, None):
        raise fault(task, where, dict(spec), "a 'path'")
    value(task, spec, where, "content", (str, bytes), None)
    value(task, spec, where, "sha256", str, None)
    value(task, spec, where, "strip", bool, True)
    value(task, spec, where, "name", str, None)
    if ("content" in spec) == ("sha256" in spec):
        raise fault(task, where, sorted(spec), "either 'content' or 'sha256'")


def stripped(data: bytes) -> bytes:
    """Without white space at the end of each line and of the whole; carriage returns go with it."""
    return b"\n".join(line.rstrip() for line in data.split(b"\n")).rstrip()


def compare(spec: Mapping[str, Any], data: bytes) -> tuple[bool, str]:
    """Whether `data` is what the milestone expects, and in a few words what differs."""
    shape = stripped if spec.get("strip", True) else bytes
    got = shape(data)
    if "sha256" in spec:
        digest = hashlib.sha256(got).hexdigest()
        passed = digest == spec["sha256"].lower()
        return passed, "" if passed else f"{spec['path']}: sha256 {digest[:12]}…, expected {spec['sha256'][:12]}…"
    content = spec["content"]
    want = shape(content.encode() if isinstance(content, str) else content)
    if got == want:
        return True, ""
    return False, f"{spec['path']}: {difference(got, want)}"


def difference(got: bytes, want: bytes) -> str:
    """The first line that differs, short."""
    ours, theirs = got.split(b"\n"), want.split(b"\n")
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=False), 1):
        if mine != its:
            return f"line {number} is {_short(mine)}, expected {_short(its)}"
    return f"{len(ours)} lines, expected {len(theirs)}"


def _short(line: bytes) -> str:
    text = line[:40].decode("utf-8", "replace")
    return repr(text) + ("…" if len(line) > 40 else "")
