"""What this plugin brings. Imports nothing but core's registration types."""

from __future__ import annotations

from collections.abc import Iterable

from gyre_core.hookspecs import hookimpl
from gyre_core.registration import Kind, Registration

_OPTIONS = "gyre_harnesses.options"


@hookimpl
def gyre_register() -> Iterable[Registration]:
    """Harnesses and sandboxes."""
    return [
        Registration(
            Kind.HARNESS,
            "shell",
            "gyre_harnesses.shell.harness:ShellHarness",
            f"{_OPTIONS}:ShellOptions",
            "small multi-turn agent with bash, read, write, edit and task tools, sub-agents and compaction",
            requires=("aiohttp",),
        ),
        Registration(
            Kind.HARNESS,
            "command",
            "gyre_harnesses.command.harness:CommandHarness",
            f"{_OPTIONS}:CommandOptions",
            "any agent program, started in the sandbox, that speaks to its model through a counted gate",
            requires=("aiohttp",),
        ),
        Registration(
            Kind.HARNESS,
            "mini-swe",
            "gyre_harnesses.mini_swe.harness:MiniSweHarness",
            f"{_OPTIONS}:MiniSweOptions",
            "mini-swe-agent unchanged, its commands run in the sandbox",
            requires=("aiohttp",),
        ),
        Registration(
            Kind.HARNESS,
            "verifiers",
            "gyre_harnesses.verifiers_env.harness:VerifiersHarness",
            f"{_OPTIONS}:VerifiersOptions",
            "plays environments of the package verifiers, unchanged",
            requires=("aiohttp",),
        ),
        Registration(
            Kind.TASKSET,
            "verifiers",
            "gyre_harnesses.verifiers_env.tasks:VerifiersTaskSet",
            f"{_OPTIONS}:VerifiersOptions",
            "the tasks of an environment of the package verifiers",
        ),
        Registration(
            Kind.SCORER,
            "verifiers",
            "gyre_harnesses.verifiers_env.tasks:VerifiersScorer",
            f"{_OPTIONS}:VerifiersScorerOptions",
            "the rewards that the environment's own functions gave",
        ),
        *_sandboxes(),
    ]


def _sandboxes() -> list[Registration]:
    return [
        Registration(
            Kind.SANDBOX,
            "local",
            "gyre_harnesses.sandbox.local:LocalSandbox",
            f"{_OPTIONS}:LocalOptions",
            "folders and processes of this host, isolated by namespaces or Landlock, with limits",
        ),
        Registration(
            Kind.SANDBOX,
            "docker",
            "gyre_harnesses.sandbox.docker:DockerSandbox",
            f"{_OPTIONS}:DockerOptions",
            "containers, driven by the docker command line",
        ),
        Registration(
            Kind.SANDBOX,
            "swe-rex",
            "gyre_harnesses.sandbox.rex:SweRexSandbox",
            f"{_OPTIONS}:SweRexOptions",
            "folders behind swe-rex servers, wherever those run",
            requires=("aiohttp",),
        ),
    ]
