"""The hidden tests of projects, from a folder that the user names or from the package index.

Invariant: plain data comes out, for tasks travel between processes; all that is missing is said at once, before any
execution starts. Several projects are fetched at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gyre_core import InfrastructureError

from gyre_tasks.folders.loader import read_folder
from gyre_tasks.nl2repo import sources
from gyre_tasks.nl2repo.benchmark import Project

AT_A_TIME = 8


class Origin:
    """Where a project's files come from: a folder that the user names, or the package index."""

    def __init__(
        self, tests: Path | None, cache: Path, requirements: Mapping[str, str], python: str | None, fetch_s: float
    ) -> None:
        self._tests, self._cache, self._requirements = tests, cache, requirements
        self._python, self._fetch_s = python, fetch_s

    def __str__(self) -> str:
        return "the package index" if self._tests is None else str(self._tests)

    def files(self, name: str) -> dict[str, bytes]:
        """All files of the project, or at least its tests, by path."""
        if self._tests is None:
            requirement = self._requirements.get(name, name)
            return sources.read_archive(sources.fetch(requirement, self._cache, self._python, self._fetch_s))
        if (self._tests / name).is_dir():
            return read_folder(self._tests / name)
        archive = sources.find_archive(self._tests, name)
        if archive is None:
            raise InfrastructureError(
                f"looking for the hidden tests of {name!r} in {self._tests}",
                got="neither a folder nor an archive of that name",
                expected=f"{name}/ or {name}-VERSION.tar.gz",
            )
        return sources.read_archive(archive)


def hidden_tests(projects: Sequence[Project], origin: Origin) -> dict[str, dict[str, bytes]]:
    """Project -> path -> content; InfrastructureError that names every project whose tests cannot be had."""
    found: dict[str, dict[str, bytes]] = {}
    problems: list[str] = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        reading = [(each, pool.submit(origin.files, each.name)) for each in projects]
        for project, future in reading:
            try:
                whole = future.result()
            except InfrastructureError as error:
                problems.append(f"{project.name}: {error}")
                continue
            found[project.name] = {path: data for path, data in whole.items() if project.hidden(path)}
            if not found[project.name]:
                names = ", ".join(project.test_files)
                problems.append(f"{project.name}: {len(whole)} files, none of them below {names}")
    if problems:
        raise InfrastructureError(
            f"reading the hidden tests of {len(projects)} projects from {origin}",
            got="\n".join(problems),
            expected="the tests of every project",
            fix="Give them with tasks.tests, another version with tasks.sources, or choose with tasks.only.",
        )
    return found
