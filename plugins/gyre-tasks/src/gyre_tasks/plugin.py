"""What this plugin brings, as strings: listing it imports nothing else of it."""

from __future__ import annotations

from collections.abc import Iterable

from gyre_core import Kind, Registration, hookimpl

_FOLDERS = "gyre_tasks.folders"


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
    for name, target, summary in (
        ("folder", "FolderTaskSet", "Your own tasks, each a folder: task.toml, start/, hidden/."),
        ("terminal", "TerminalTaskSet", "Operate and repair a broken service in a sandbox. Ten samples."),
        ("migrate", "MigrateTaskSet", "Port a small library from one stack to another; tests decide. Ten samples."),
        ("team", "TeamTaskSet", "A lead agent hands parts to sub-agents and merges. Ten samples."),
    ):
        yield Registration(
            Kind.TASKSET,
            name,
            f"{_FOLDERS}.taskset:{target}",
            options=f"{_FOLDERS}.options:FolderOptions",
            summary=summary,
        )
    yield Registration(
        Kind.TASKSET,
        "nl2repo",
        "gyre_tasks.nl2repo.taskset:Nl2RepoTaskSet",
        options="gyre_tasks.nl2repo.options:Nl2RepoOptions",
        summary="NL2RepoBench: write a project from its description; the project's own tests decide.",
    )
