"""What gyre-rl itself brings as a plugin: the launchers for one machine and for several, and gyre-sched's policies.

Import-light: names its classes as strings.
"""

from __future__ import annotations

from collections.abc import Iterator

from gyre_core import Kind, Registration, hookimpl


@hookimpl
def gyre_register() -> Iterator[Registration]:
    """Register the launchers and the built-in policies."""
    yield Registration(
        Kind.LAUNCHER,
        "local",
        "gyre_rl.procs.launcher:LocalLauncher",
        summary="processes of this machine, each in a session of its own",
    )
    yield Registration(
        Kind.LAUNCHER,
        "machines",
        "gyre_rl.procs.machines:MachinesLauncher",
        options="gyre_rl.procs.machines:MachinesOptions",
        summary="cells on the hosts of a list, by ssh, srun or another command",
    )
    for name, cls, summary in (
        (
            "watermark",
            "Watermark",
            "releases cells below the low mark while data waits, claims them back above the high",
        ),
        ("cost-aware", "CostAware", "watermark, and a turn must gain more than its measured cost"),
        ("static", "Static", "nobody turns: the split of the start stays (asynchronous baseline)"),
        ("colocate", "Colocate", "all cells sample, then all train (synchronous baseline)"),
    ):
        yield Registration(Kind.POLICY, name, f"gyre_rl.policies:{cls}", summary=summary)
