"""The task set `nl2repo`: the benchmark's projects as Gyre tasks scored by the scorer `pytest`.

Invariant: an agent gets the description and an empty folder; the original's tests are in the scorer's options alone.
The score is the share of tests that pass, of as many as the benchmark counts or, if they are more, as were collected.
Commands that install the project are not run: its folder and `src` are importable.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from gyre_core import ComponentContext, ConfigError, ScorerSpec, Task

from gyre_tasks.nl2repo.benchmark import STATEMENT, Project, read_projects
from gyre_tasks.nl2repo.hidden import Origin, hidden_tests
from gyre_tasks.nl2repo.options import Nl2RepoOptions
from gyre_tasks.settings import cache_folder
from gyre_tasks.splits import known_split, split_of

PROMPT = f"Read {STATEMENT} and write the Python project that it describes, in this folder. Hidden tests decide."


class Nl2RepoTaskSet:
    """NL2RepoBench behind the `TaskSet` protocol."""

    def __init__(self, options: Nl2RepoOptions | None, context: ComponentContext) -> None:
        self._options = options = options or Nl2RepoOptions()
        base = Path(context.base_dir)
        self._root = None if options.path is None else base / options.path
        self._origin = Origin(
            None if options.tests is None else base / options.tests,
            cache_folder() / "sources" if options.cache is None else base / options.cache,
            options.sources,
            options.python,
            options.fetch_s,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of `split`; see `gyre_core.TaskSet`."""
        chosen = self._chosen(split)
        hidden = hidden_tests(chosen, self._origin)
        return [self._task(each, hidden[each.name]) for each in chosen]

    def check(self, split: str) -> Sequence[Task]:
        """As `tasks`, but none where their hidden tests have to be fetched: only the options are looked at then."""
        if self._options.tests is not None:
            return self.tasks(split)
        self._chosen(split)
        return []

    def _chosen(self, split: str) -> list[Project]:
        known_split("nl2repo", split)
        projects = self._projects()
        unknown = {*self._options.only, *(self._options.heldout or ())} - {each.name for each in projects}
        if unknown:
            raise ConfigError(
                f"choosing projects of {self._root}",
                got=f"names that are not there: {', '.join(sorted(unknown))}",
                expected=f"names such as {projects[0].name}",
            )
        only = self._options.only
        return [each for each in projects if (not only or each.name in only) and self._split(each) == split]

    def named(self, name: str) -> Task:
        """One task by its id or project, without fetching the tests of the others; ConfigError naming the nearest."""
        projects = {each.name: each for each in self._projects()}
        found = projects.get(name.removeprefix("nl2repo/"))
        if found is None:
            near = difflib.get_close_matches(name, projects, 1) or sorted(projects)[:5]
            raise ConfigError(
                f"looking for the task {name!r}",
                got=f"none among {len(projects)} projects of {self._root}",
                expected=f"a project such as {', '.join(near)}",
            )
        return self._task(found, hidden_tests([found], self._origin)[found.name])

    def _projects(self) -> list[Project]:
        if self._root is None:
            raise ConfigError(
                "listing tasks of 'nl2repo'",
                got="no path",
                expected="the folder of NL2RepoBench's projects",
                fix='Set it: path = "…" in [tasks], or --set tasks.path=….',
            )
        return read_projects(self._root)

    def _split(self, project: Project) -> str:
        if self._options.heldout is None:
            return split_of(project.name)
        return "heldout" if project.name in self._options.heldout else "train"

    def _task(self, project: Project, hidden: Mapping[str, bytes]) -> Task:
        options = self._options
        as_text = options.prompt == "text"
        scorer = {
            "files": hidden,
            "targets": project.targets,
            "count": project.count,
            "arguments": project.arguments,
            "timeout_s": options.timeout_s,
            "test_timeout_s": options.test_timeout_s,
            "skipped": options.skipped,
        }
        return Task(
            id=f"nl2repo/{project.name}",
            prompt=project.statement if as_text else PROMPT,
            scorer=ScorerSpec("pytest", scorer),
            files={} if as_text else {STATEMENT: project.statement.encode()},
            metadata={"family": "nl2repo", "tests": project.count, "left_out": project.left_out},
        )
