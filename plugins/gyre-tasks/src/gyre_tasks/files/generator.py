"""Draws instances of the family: which files, which jobs, which results.

Invariants: an instance is a pure function of (options, split, index); the split of an instance follows from its
content alone, so no seed can put one instance into both splits; expected results are in the milestones and
never in the workspace. This module runs no command.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from gyre_tasks.files.operations import OPERATIONS, distinct, operation
from gyre_tasks.files.options import FilesOptions
from gyre_tasks.files.words import BRIEFS, SOURCES, TARGETS, WORDS

SPLITS: tuple[str, ...] = ("train", "heldout")
HELDOUT_ONE_IN = 5
_HELPER = "helper: "
DONE = "done"


@dataclass(frozen=True, slots=True)
class FileJob:
    """One line of a brief: do `word` on `source`, write `target`; `helper` when a sub-agent is to do it."""

    word: str
    source: str
    target: str
    helper: bool = False

    @property
    def instruction(self) -> str:
        """What whoever does the job is told."""
        return f"{self.word} {self.source} {self.target}"

    @property
    def line(self) -> str:
        """How the brief says it, without the newline."""
        return f"{_HELPER if self.helper else ''}{self.instruction}"


@dataclass(frozen=True, slots=True)
class Instance:
    """One workspace at its start and the jobs in it. `data` is (path, content) in a fixed order."""

    brief: str
    jobs: tuple[FileJob, ...]
    data: tuple[tuple[str, str], ...]

    @property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of everything that makes the instance."""
        jobs = [[job.word, job.source, job.target, job.helper] for job in self.jobs]
        canonical = json.dumps([self.brief, jobs, [list(pair) for pair in self.data]])
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def split(self) -> str:
        """The split this instance belongs to, whoever draws it."""
        return "heldout" if int(self.fingerprint[:8], 16) % HELDOUT_ONE_IN == 0 else "train"

    @property
    def workspace(self) -> dict[str, str]:
        """Relative path -> content at the start; `out/` exists through a hidden empty file."""
        lines = [*(job.line for job in self.jobs), DONE]
        brief = "".join(f"{number}. {line}\n" for number, line in enumerate(lines, start=1))
        return {self.brief: brief, **dict(self.data), "out/.keep": ""}

    def expected(self, job: FileJob) -> str:
        """What the job's target must hold."""
        return operation(job.word).result(dict(self.data)[job.source])


def instances(options: FilesOptions, split: str) -> Iterator[Instance]:
    """Distinct instances of `split` without end, in a fixed order. ValueError when the split is unknown."""
    if split not in SPLITS:
        raise ValueError(
            f"drawing tasks of the family 'files': split is {split!r}, expected one of {', '.join(SPLITS)}"
        )
    draw = random.Random(f"gyre-files/{options.seed}/{split}")
    seen: set[str] = set()
    while True:
        instance = _instance(draw, options)
        if instance.split == split and instance.fingerprint not in seen:
            seen.add(instance.fingerprint)
            yield instance


def _instance(draw: random.Random, options: FilesOptions) -> Instance:
    count = draw.randint(options.min_jobs, options.max_jobs)
    sources = draw.sample(SOURCES, count + options.spare_files)
    targets = draw.sample(TARGETS, count)
    helped = draw.randrange(count) if draw.random() < options.helper_share else -1
    words = [op.word for op in draw.sample(OPERATIONS, count)]
    jobs = tuple(FileJob(words[i], sources[i], targets[i], helper=i == helped) for i in range(count))
    data = tuple(sorted((source, _data(draw)) for source in sources))
    return Instance(draw.choice(BRIEFS), jobs, data)


def _data(draw: random.Random) -> str:
    """Four to six words, one a line, on which all operations differ."""
    while True:
        lines = draw.sample(WORDS, draw.randint(4, 6))
        content = "".join(f"{line}\n" for line in lines)
        if distinct(content):
            return content
