"""What this plugin brings. Imports nothing but core's registration types."""

from __future__ import annotations

from collections.abc import Iterable

from gyre_core.hookspecs import hookimpl
from gyre_core.registration import Kind, Registration

_OPTIONS = "gyre_scorers.options"


@hookimpl
def gyre_register() -> Iterable[Registration]:
    """The scorers."""
    return [
        Registration(
            Kind.SCORER,
            "files",
            "gyre_scorers.files:FilesScorer",
            f"{_OPTIONS}:FilesOptions",
            "milestones are files of the workspace with expected content",
        ),
        Registration(
            Kind.SCORER,
            "commands",
            "gyre_scorers.commands:CommandsScorer",
            f"{_OPTIONS}:CommandsOptions",
            "milestones are commands with expected results, run in the workspace",
        ),
        Registration(
            Kind.SCORER,
            "pytest",
            "gyre_scorers.hidden.scorer:PytestScorer",
            f"{_OPTIONS}:PytestOptions",
            "a hidden pytest suite on a fresh copy of the workspace, one milestone a test",
            requires=("pytest",),
        ),
        Registration(
            Kind.SCORER,
            "rubric",
            "gyre_scorers.rubric:RubricScorer",
            f"{_OPTIONS}:RubricOptions",
            "a model answers yes or no for each criterion, behind any chat completions endpoint",
        ),
        Registration(
            Kind.SCORER,
            "composite",
            "gyre_scorers.composite:CompositeScorer",
            f"{_OPTIONS}:CompositeOptions",
            "the weighted sum of other scorers' milestones, or gates of one before another",
        ),
    ]
