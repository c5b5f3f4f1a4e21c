"""What this plugin brings, as strings: listing it imports nothing else of it (DESIGN law 3.5)."""

from __future__ import annotations

from collections.abc import Iterable

from gyre_core import Kind, Registration, hookimpl


@hookimpl
def gyre_register() -> Iterable[Registration]:
    """The task sets."""
    yield Registration(
        Kind.TASKSET,
        "files",
        "gyre_tasks.files.taskset:FilesTaskSet",
        options="gyre_tasks.files.options:FilesOptions",
        summary="Small file jobs: find the brief, run shell commands, write several results. The quickstart's.",
    )
