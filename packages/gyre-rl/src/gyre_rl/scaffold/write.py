"""Writing a new plugin package from templates.

Invariant: what is written works before a line of it is changed: it registers, passes its kind's conformance suite, and
is clean under a strict type checker. Nothing that exists is overwritten.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from gyre_core.errors import ConfigError
from gyre_core.plugins import PluginManager
from gyre_core.registration import Kind

KINDS = (
    Kind.ENGINE,
    Kind.HARNESS,
    Kind.LAUNCHER,
    Kind.OBJECTIVE,
    Kind.POLICY,
    Kind.SANDBOX,
    Kind.SCORER,
    Kind.SINK,
    Kind.TASKSET,
    Kind.TRAINER,
)
"""Kinds that there is a template for."""
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Names:
    """What things are called in a new package."""

    kind: Kind
    name: str
    """Of the component: "my-thing"."""

    @property
    def distribution(self) -> str:
        """Of the package: "gyre-my-thing"."""
        return f"gyre-{self.name}"

    @property
    def module(self) -> str:
        """Import name: "gyre_my_thing"."""
        return self.distribution.replace("-", "_")

    @property
    def stem(self) -> str:
        """The class's name without its kind: "MyThing"."""
        return "".join(part.capitalize() for part in self.name.split("-"))

    @property
    def cls(self) -> str:
        """The component's class: "MyThingScorer"."""
        return f"{self.stem}{_WORDS.get(self.kind, self.kind.value.capitalize())}"

    @property
    def options(self) -> str:
        """The class of its options. An objective's fields are its options."""
        return self.cls if self.kind is Kind.OBJECTIVE else f"{self.stem}Options"

    @property
    def options_module(self) -> str:
        """The module that its options are in."""
        return self.kind.value if self.kind is Kind.OBJECTIVE else "options"

    def fill(self, text: str) -> str:
        """A template with these names in it."""
        values = {
            "kind": self.kind.value,
            "KIND": self.kind.name,
            "name": self.name,
            "distribution": self.distribution,
            "module": self.module,
            "Class": self.cls,
            "Options": self.options,
            "options_module": self.options_module,
            "options_file": f"{self.options_module}.py",
            "usage": _USAGE.get(self.kind, f'[{self.kind.value}]\nname = "$name"').replace("$name", self.name),
            "dependencies": ", ".join(f'"{name}"' for name in ("gyre-core", *_LEAVES.get(self.kind, ()))),
            "test_dependencies": ", ".join(f'"{name}"' for name in (*_TESTED_WITH, *_ALSO_TESTED.get(self.kind, ()))),
            "test": self.name.replace("-", "_"),
        }
        return Template(text).substitute(values)


_WORDS = {Kind.TASKSET: "TaskSet"}
_USAGE = {
    Kind.TASKSET: '[tasks]\nname = "$name"',
    Kind.SCORER: '[[scorers]]\nname = "$name"',
    Kind.SINK: '[[sinks]]\nname = "$name"',
    Kind.POLICY: '[scheduler.policy]\nname = "$name"',
    Kind.OBJECTIVE: '[trainer]\nobjective = "$name"',
}
"""How a run's file chooses it, where that is not a section of its kind's name."""
_LEAVES = {Kind.POLICY: ("gyre-sched",), Kind.OBJECTIVE: ("gyre-loss",), Kind.TRAINER: ("gyre-loss",)}
"""The leaf that a kind adapts."""
_TESTED_WITH = ("gyre-core[testing]", "pytest>=8", "pytest-asyncio>=0.24")
_ALSO_TESTED = {
    Kind.ENGINE: ("gyre-local",),
    Kind.TRAINER: ("gyre-local",),
    Kind.HARNESS: ("gyre-harnesses",),
    Kind.SANDBOX: ("gyre-harnesses",),
    Kind.OBJECTIVE: ("transformers>=4.51",),
}
"""Where what they begin as comes from."""


def names_of(kind: str, name: str) -> Names:
    """Checked names; ConfigError for a kind without a template or a name that cannot be a package's."""
    if kind not in KINDS:
        raise ConfigError(
            f"writing a plugin of kind {kind!r}",
            got="a kind without a template" if kind in set(Kind) else "no kind of component",
            expected=f"one of {', '.join(KINDS)}",
        )
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"writing the {kind} {name!r}",
            got=f"{name!r} as its name",
            expected="small letters and digits, words joined by '-', such as my-thing",
        )
    return Names(Kind(kind), name)


def contents(names: Names) -> dict[str, str]:
    """Relative path -> text of every file of the package."""
    folder = files("gyre_rl.scaffold") / "templates"

    def read(template: str) -> str:
        return names.fill((folder / f"{template}.tmpl").read_text(encoding="utf-8"))

    kind, source = names.kind.value, f"src/{names.module}"
    options = {} if names.kind is Kind.OBJECTIVE else {f"{source}/options.py": read(f"{kind}_options.py")}
    return options | {
        "pyproject.toml": read("pyproject.toml"),
        "README.md": read("README.md"),
        f"{source}/__init__.py": f'"""{names.distribution}: the {kind} "{names.name}" for Gyre."""\n',
        f"{source}/py.typed": "",
        f"{source}/plugin.py": read("plugin.py"),
        f"{source}/{kind}.py": read(f"{kind}.py"),
        f"tests/test_{names.name.replace('-', '_')}_{kind}.py": read(f"{kind}_test.py"),
    }


def write_plugin(kind: str, name: str, parent: Path) -> list[Path]:
    """Write the package into `parent`/gyre-NAME and return its files; ConfigError when that exists, or the name is an
    installed plugin's.
    """
    names = names_of(kind, name)
    for component in PluginManager.installed().components(names.kind):
        if component.registration.name == name:
            raise ConfigError(
                f"writing the {kind} {name!r}",
                got=f"a name that {component.distribution} brings already",
                expected="one owner for each name",
                fix="Choose another name.",
            )
    folder = parent / names.distribution
    if folder.exists():
        raise ConfigError(
            f"writing the {kind} {name!r}", got=f"{folder}, which exists", expected="a new folder", fix="Choose a name."
        )
    written = []
    for path, text in contents(names).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written
