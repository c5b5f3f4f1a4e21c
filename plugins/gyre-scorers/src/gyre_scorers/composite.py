"""Scorer `composite`: several scorers on one workspace, weighted, with an optional gate.

Invariant: the parts run in order, each on the workspace as the one before left it; the value is the weighted mean of
the parts' values; when a part marked `gate` earns less than its bar, all parts earn nothing. Milestones keep
their evidence under the part's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gyre_core import (
    ComponentContext,
    Kind,
    Milestone,
    PluginManager,
    Score,
    Scorer,
    ScorerSpec,
    ScoringJob,
    Task,
    Workspace,
)

from gyre_scorers.commands import CommandsScorer
from gyre_scorers.files import FilesScorer
from gyre_scorers.hidden.scorer import PytestScorer
from gyre_scorers.options import CompositeOptions
from gyre_scorers.reading import fault, value, weight
from gyre_scorers.rubric import RubricScorer

_KEYS = ("scorer", "options", "weight", "gate", "name")
_OWN = ("files", "commands", "pytest", "rubric", "composite")


class CompositeScorer:
    """Options of a task: `{"parts": [{"scorer": "files", "options": {…}, "weight": 1.0, "gate": 0.5, "name": "…"}]}`.

    `gate` (0 to 1): the least value of that part for anything to count. A part's scorer is one of this package or of
    any installed plugin; compositions do not nest.
    """

    def __init__(self, options: CompositeOptions | None, context: ComponentContext) -> None:
        options = options or CompositeOptions()
        self._context, self._others = context, options.others
        self._scorers: dict[str, Scorer] = {
            "files": FilesScorer(options.files, context),
            "commands": CommandsScorer(options.commands, context),
            "pytest": PytestScorer(options.pytest, context),
            "rubric": RubricScorer(options.rubric, context),
        }

    def check(self, task: Task) -> None:
        """ConfigError when the composition or the options of one of its parts are wrong."""
        for part in self._parts(task):
            check = getattr(self._scorer(part["scorer"]), "check", None)
            if check is not None:
                check(_inner(task, part))

    async def score(self, job: ScoringJob, workspace: Workspace) -> Score:
        """All parts' milestones, weighted so that each part has its share."""
        parts = self._parts(job.task)
        total = sum(float(part.get("weight", 1.0)) for part in parts)
        milestones: list[Milestone] = []
        earned, shut = 0.0, ""
        for part in parts:
            inner = dataclasses.replace(job, task=_inner(job.task, part))
            score = await self._scorer(part["scorer"]).score(inner, workspace)
            share = float(part.get("weight", 1.0)) / total
            earned += share * score.value
            name = part.get("name", part["scorer"])
            milestones += _weighted(name, score, share)
            if score.value < part.get("gate", 0.0):
                shut = f"{name} earned {score.value:.2f}, its gate is {part['gate']}"
        partial = job.end.status.partial
        why = shut or (job.end.reason if partial else "")
        return Score(0.0 if shut else min(1.0, earned), tuple(milestones), not partial, why)

    def _scorer(self, name: str) -> Scorer:
        if name not in self._scorers:
            made = PluginManager.installed().create(Kind.SCORER, name, self._others.get(name), self._context)
            self._scorers[name] = made
        return self._scorers[name]

    def _parts(self, task: Task) -> list[Mapping[str, Any]]:
        options = task.scorer.options
        parts = options.get("parts")
        if set(options) != {"parts"} or not isinstance(parts, list | tuple) or not parts:
            raise fault(task, "its keys", dict(options), "the one key 'parts', a list with at least one part")
        for index, part in enumerate(parts):
            self._check(task, part, f"part {index}")
        if not any(part.get("weight", 1.0) > 0 for part in parts):
            raise fault(task, "'parts'", "no positive weight", "at least one weight above 0")
        return list(parts)

    def _check(self, task: Task, part: object, where: str) -> None:
        if not isinstance(part, Mapping) or set(part) - set(_KEYS):
            raise fault(task, where, part, f"keys among {', '.join(_KEYS)}")
        if not value(task, part, where, "scorer", str, ""):
            raise fault(task, where, dict(part), "a 'scorer'")
        if part["scorer"] not in self._scorers:
            known = [*self._scorers, *_installed()]
            if part["scorer"] not in known:
                raise fault(task, f"{where}, 'scorer'", part["scorer"], f"one of {', '.join(known)}")
        value(task, part, where, "options", Mapping, None)
        value(task, part, where, "name", str, None)
        weight(task, part, where)
        if not 0 <= value(task, part, where, "gate", (int, float), 0) <= 1:
            raise fault(task, f"{where}, 'gate'", part["gate"], "a value from 0 to 1")


def _installed() -> list[str]:
    """Scorers of other packages."""
    found = [component.registration.name for component in PluginManager.installed().components(Kind.SCORER)]
    return [name for name in found if name not in _OWN]


def _inner(task: Task, part: Mapping[str, Any]) -> Task:
    """The task as the part's scorer is given it."""
    return dataclasses.replace(task, scorer=ScorerSpec(part["scorer"], part.get("options", {})))


def _weighted(name: str, score: Score, share: float) -> list[Milestone]:
    total = sum(m.weight for m in score.milestones) or 1.0
    return [dataclasses.replace(m, name=f"{name}: {m.name}", weight=share * m.weight / total) for m in score.milestones]
