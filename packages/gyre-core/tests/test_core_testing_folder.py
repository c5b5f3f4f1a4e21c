"""The plain folder double keeps the letter of the protocol."""

from __future__ import annotations

import pytest
from gyre_core.testing.folder import FolderSandbox
from gyre_core.testing.sandboxes import SandboxConformance


class TestFolderSandbox(SandboxConformance):
    @pytest.fixture
    def make_sandbox(self, tmp_path):
        return lambda: FolderSandbox(str(tmp_path))
