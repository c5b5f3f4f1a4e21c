"""The conformance suites on this plugin's components."""

from __future__ import annotations

import asyncio

import pytest
from gyre_core import ComponentContext, ConfigError
from gyre_core.testing.endpoint import Call, Say
from gyre_core.testing.harnesses import HarnessConformance, HarnessRig
from gyre_core.testing.sandboxes import IsolationConformance, SandboxConformance
from gyre_harnesses.options import LocalOptions, ShellOptions
from gyre_harnesses.sandbox.local import LocalSandbox
from gyre_harnesses.shell.harness import ShellHarness


def local(tmp_path, level):
    def make():
        return LocalSandbox(LocalOptions(isolation=level), ComponentContext(str(tmp_path / "run"), "test"))

    async def probe():
        sandbox = make()
        try:
            await sandbox.isolation()
        except ConfigError as error:
            pytest.skip(str(error))
        finally:
            await sandbox.close()

    asyncio.run(probe())
    return make


class TestLocalNamespaces(SandboxConformance, IsolationConformance):
    @pytest.fixture
    def make_sandbox(self, tmp_path):
        return local(tmp_path, "namespaces")


@pytest.mark.slow  # the default run holds the level of namespaces to the suite
class TestLocalLandlock(SandboxConformance, IsolationConformance):
    @pytest.fixture
    def make_sandbox(self, tmp_path):
        return local(tmp_path, "landlock")


@pytest.mark.slow  # the default run holds the level of namespaces to the suite
class TestLocalPlain(SandboxConformance):
    @pytest.fixture
    def make_sandbox(self, tmp_path):
        return local(tmp_path, "none")


class TestShell(HarnessConformance):
    @pytest.fixture
    def rig(self, tmp_path):
        context = ComponentContext(str(tmp_path), "test")
        work = Say(calls=[Call("bash", {"command": "cat in.txt > out"})])
        return HarnessRig(
            lambda: ShellHarness(ShellOptions(retry_first_s=0.01), context),
            lambda: LocalSandbox(LocalOptions(), context),
            works=[work, work, Say("done")],
        )
