"""Scorer `composite`: several scorers on one workspace, weighted, with an optional gate.

Invariant: the parts run in order, each on the workspace as the one before left it; the value is the weighted mean of
the parts' values; when a part marked `gate` earns less than its bar, all parts earn nothing. Milestones keep
their evidence under the part's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gyre_core import ComponentContext, Milestone, Score, Scorer, ScorerSpec, ScoringJob, Workspace

from gyre_scorers.commands import CommandsScorer
from gyre_scorers.files import FilesScorer
from gyre_scorers.hidden.scorer import PytestScorer
from gyre_scorers.options import CompositeOptions
from gyre_scorers.reading import fault, value
from gyre_scorers.rubric import RubricScorer

_KEYS = ("scorer", "options", "weight", "gate", "name")


class CompositeScorer:
    """Options of a task: `{"parts": [{"scorer": "files", "options": {…}, "weight": 1.0, "gate": 0.5, "name": "…"}]}`.

    `gate` (0 to 1): the least value of that part for anything to count.
    """

    def __init__(self, options: CompositeOptions | None, context: ComponentContext) -> None:
        options = options or CompositeOptions()
        self._scorers: Mapping[str, Scorer] = {
            "files": FilesScorer(options.files, context),
            "commands": CommandsScorer(options.commands, context),
            "pytest": PytestScorer(options.pytest, context),
            "rubric": RubricScorer(options.rubric, context),
        }

    async def score(self, job: ScoringJob, workspace: Workspace) -> Score:
        """All parts' milestones, weighted so that each part has its share."""
        parts = self._parts(job)
        total = sum(float(part.get("weight", 1.0)) for part in parts)
        milestones: list[Milestone] = []
        earned, shut = 0.0, ""
        for part in parts:
            spec = ScorerSpec(part["scorer"], part.get("options", {}))
            inner = dataclasses.replace(job, task=dataclasses.replace(job.task, scorer=spec))
            score = await self._scorers[spec.name].score(inner, workspace)
            share = float(part.get("weight", 1.0)) / total
            earned += share * score.value
            name = part.get("name", spec.name)
            milestones += _weighted(name, score, share)
            if score.value < part.get("gate", 0.0):
                shut = f"{name} earned {score.value:.2f}, its gate is {part['gate']}"
        partial = job.end.status.partial
        why = shut or (job.end.reason if partial else "")
        return Score(0.0 if shut else min(1.0, earned), tuple(milestones), not partial, why)

    def _parts(self, job: ScoringJob) -> list[Mapping[str, Any]]:
        options = job.task.scorer.options
        parts = options.get("parts")
        if set(options) != {"parts"} or not isinstance(parts, list | tuple) or not parts:
            raise fault(job.task, "its keys", dict(options), "the one key 'parts', a list with at least one part")
        for index, part in enumerate(parts):
            where = f"part {index}"
            if not isinstance(part, Mapping) or set(part) - set(_KEYS) or part.get("scorer") not in self._scorers:
                raise fault(
                    job.task, where, part, f"keys among {', '.join(_KEYS)}, scorer among {', '.join(self._scorers)}"
                )
            for key in ("weight", "gate"):
                if value(job.task, part, where, key, (int, float), 0) < 0:
                    raise fault(job.task, f"{where}, {key!r}", part[key], "a number that is not negative")
        if not any(part.get("weight", 1.0) > 0 for part in parts):
            raise fault(job.task, "'parts'", "no positive weight", "at least one weight above 0")
        return list(parts)


def _weighted(name: str, score: Score, share: float) -> list[Milestone]:
    total = sum(m.weight for m in score.milestones) or 1.0
    return [dataclasses.replace(m, name=f"{name}: {m.name}", weight=share * m.weight / total) for m in score.milestones]
