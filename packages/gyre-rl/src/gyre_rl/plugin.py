"""What gyre-rl itself brings as a plugin: the launcher for one machine, and gyre-sched's policies.

Import-light: names its classes as strings.
"""

from __future__ import annotations

from collections.abc import Iterator

from gyre_core import Kind, Registration, hookimpl


@hookimpl
def gyre_register() -> Iterator[Registration]:
    """Register the local launcher and the built-in policies."""
    yield Registration(
        Kind.LAUNCHER,
        "local",
        "gyre_rl.procs.launcher:LocalLauncher",
        summary="processes of this machine, each in a session of its own",
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
