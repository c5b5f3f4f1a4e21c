"""The typed plugin manager: finds components, explains why one is unusable, makes instances.

Invariant: nothing but the light modules named in entry points is imported until `create` or `load` is called for
a component. Plugins are found through the entry-point group "gyre" and by no other name.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

import pluggy

from gyre_core.errors import PluginError
from gyre_core.hookspecs import PROJECT, HookSpecs
from gyre_core.registration import ComponentContext, Kind, Registration


@dataclass(frozen=True, slots=True)
class Component:
    """A registered component and the distribution it comes from."""

    registration: Registration
    distribution: str
    version: str

    @property
    def missing(self) -> tuple[str, ...]:
        """Modules it requires that are not installed."""
        return tuple(name for name in self.registration.requires if not _importable(name))


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """An entry point that could not be used, and why."""

    name: str
    distribution: str
    reason: str


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def load_symbol(path: str, why: str) -> Any:
    """Import "module:Name"; PluginError saying `why` and what failed otherwise."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            why,
            got=f"{type(error).__name__}: {error}",
            expected=f"{path} to be importable",
            fix="Install the missing package, or correct the plugin's registration.",
        ) from error


class PluginManager:
    """All components of the installed plugins, by kind and name.

    Use `PluginManager.installed()` for what entry points bring; tests and scripts may `add` modules or objects
    that implement the hooks.
    """

    def __init__(self) -> None:
        self.hooks = pluggy.PluginManager(PROJECT)
        self.hooks.add_hookspecs(HookSpecs)
        self._components: dict[tuple[Kind, str], Component] = {}
        self.broken: list[BrokenPlugin] = []

    @classmethod
    def installed(cls, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> PluginManager:
        """Every plugin found through the entry-point group "gyre". A broken one is kept in `broken`."""
        manager = cls()
        found = importlib.metadata.entry_points(group=PROJECT) if entry_points is None else entry_points
        for point in sorted(found, key=lambda p: p.name):
            dist = point.dist.name if point.dist else point.value
            try:
                manager.add(point.load(), dist, point.dist.version if point.dist else "unknown")
            except Exception as error:  # noqa: BLE001 - boundary: one broken plugin must not hide the others
                manager.broken.append(BrokenPlugin(point.name, dist, f"{type(error).__name__}: {error}"))
        return manager

    def add(self, plugin: object, distribution: str = "local", version: str = "0") -> None:
        """Register a module or object that implements the hooks; PluginError when two bring one name."""
        found = list(self._registrations_of(plugin))
        for registration in found:
            key = (registration.kind, registration.name)
            if key in self._components:
                raise PluginError(
                    f"registering {registration.kind} {registration.name!r} of {distribution}",
                    got=f"a name that {self._components[key].distribution} brings already",
                    expected="one owner for each name",
                    fix="Rename it or uninstall one of the two.",
                )
        self.hooks.register(plugin)
        for registration in found:
            key = (registration.kind, registration.name)
            self._components[key] = Component(registration, distribution, version)

    @staticmethod
    def _registrations_of(plugin: object) -> Sequence[Registration]:
        register = getattr(plugin, "gyre_register", None)
        return [] if register is None else list(register())

    def components(self, kind: Kind | None = None) -> Sequence[Component]:
        """All, or those of one kind, sorted by kind and name."""
        return [c for (k, _), c in sorted(self._components.items()) if kind in (None, k)]

    def find(self, kind: Kind, name: str) -> Component:
        """The component; PluginError naming the nearest one, and why a broken plugin may be the cause."""
        component = self._components.get((kind, name))
        if component is None:
            names = [c.registration.name for c in self.components(kind)]
            near = difflib.get_close_matches(name, names, 1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            for broken in self.broken:
                hint += f"The plugin {broken.name!r} ({broken.distribution}) could not be loaded: {broken.reason}. "
            raise PluginError(
                f"looking for the {kind} {name!r}",
                got="no installed plugin that brings it",
                expected=f"one of {', '.join(names) or 'none installed'}",
                fix=f"{hint}Install the plugin that brings it; `gyre plugins` lists what is there.",
            )
        if component.missing:
            raise PluginError(
                f"using the {kind} {name!r} of {component.distribution}",
                got=f"modules that are not installed: {', '.join(component.missing)}",
                expected="all of its requirements",
                fix=f"Install them (see {component.distribution}'s README).",
            )
        return component

    def options_type(self, kind: Kind, name: str) -> type[Any] | None:
        """The dataclass of its options, or None when it takes none."""
        path = self.find(kind, name).registration.options
        if path is None:
            return None
        found = load_symbol(path, f"reading the options of {kind} {name!r}")
        if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
            raise PluginError(f"reading the options of {kind} {name!r}", got=repr(found), expected="a dataclass type")
        return found

    def load(self, kind: Kind, name: str) -> type[Any]:
        """The component's class, imported now."""
        target = load_symbol(self.find(kind, name).registration.target, f"loading the {kind} {name!r}")
        if not isinstance(target, type):
            raise PluginError(f"loading the {kind} {name!r}", got=repr(target), expected="a class")
        return target

    def create(self, kind: Kind, name: str, options: Any, context: ComponentContext) -> Any:
        """An instance: `Class(options, context)`. `options` may be a mapping, tables of options in it included, or an
        instance of its options type."""
        expected = self.options_type(kind, name)
        if isinstance(options, Mapping) or options is None:
            options = _filled(expected, options or {}) if expected else None
        return self.load(kind, name)(options, context)


def _filled(options_type: type[Any], given: Mapping[str, Any]) -> Any:
    """An instance of an options type; a mapping stands for an instance where a field is of an options type itself."""
    tables = [key for key, value in given.items() if isinstance(value, Mapping)]
    types = get_type_hints(options_type) if tables else {}
    made = {key: _filled(types[key], given[key]) for key in tables if is_dataclass(types.get(key))}
    return options_type(**{**given, **made})
