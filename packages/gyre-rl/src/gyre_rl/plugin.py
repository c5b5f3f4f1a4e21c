"""What gyre-rl itself brings as a plugin: the launcher for one machine.

Import-light: names its classes as strings.
"""

from __future__ import annotations

from collections.abc import Iterator

from gyre_core import Kind, Registration, hookimpl


@hookimpl
def gyre_register() -> Iterator[Registration]:
    """Register the local launcher."""
    yield Registration(
        Kind.LAUNCHER,
        "local",
        "gyre_rl.procs.launcher:LocalLauncher",
        summary="processes of this machine, each in a session of its own",
    )
