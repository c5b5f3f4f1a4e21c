"""The conformance suite on this plugin's scorers."""

from __future__ import annotations

import pytest
from gyre_core.testing.folder import FolderSandbox
from gyre_core.testing.scorers import ScorerCase, ScorerConformance
from gyre_scorers.commands import CommandsScorer
from gyre_scorers.composite import CompositeScorer
from gyre_scorers.files import FilesScorer

FILES = {"milestones": [{"path": "a", "content": "1"}, {"path": "b", "content": "2", "weight": 2}]}
COMMANDS = {"milestones": [{"run": "cat a", "stdout": "1"}, {"run": "grep -q 2 b", "weight": 2}]}
FULL, HALF = {"a": b"1\n", "b": b"2\n"}, {"a": b"1\n", "b": b"3\n"}


class TestFiles(ScorerConformance):
    @pytest.fixture
    def case(self, tmp_path, context):
        make = lambda: FilesScorer(None, context)  # noqa: E731
        return ScorerCase(make, lambda: FolderSandbox(str(tmp_path)), FILES, FULL, HALF)


class TestCommands(ScorerConformance):
    @pytest.fixture
    def case(self, tmp_path, context):
        make = lambda: CommandsScorer(None, context)  # noqa: E731
        return ScorerCase(make, lambda: FolderSandbox(str(tmp_path)), COMMANDS, FULL, HALF)


class TestComposite(ScorerConformance):
    @pytest.fixture
    def case(self, tmp_path, context):
        parts = [{"scorer": "files", "options": FILES, "weight": 3}, {"scorer": "commands", "options": COMMANDS}]
        make = lambda: CompositeScorer(None, context)  # noqa: E731
        return ScorerCase(make, lambda: FolderSandbox(str(tmp_path)), {"parts": parts}, FULL, HALF)
