"""Reads what a task's `ScorerSpec.options` say, with errors that name the task and the place.

Invariant: an unknown or mistyped key is a ConfigError; nothing is guessed. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gyre_core import ConfigError, Task


def fault(task: Task, where: str, got: object, expected: str) -> ConfigError:
    """The error for a task's scorer options."""
    return ConfigError(
        f"reading the scorer options of task {task.id!r}, {where}",
        got=f"{got!r:.200}",
        expected=expected,
        fix="Correct the task set.",
    )


def milestone_specs(task: Task, options: Mapping[str, Any], *, known: Sequence[str]) -> list[Mapping[str, Any]]:
    """The list under "milestones": mappings with `known` keys, a weight >= 0, at least one of them above 0."""
    if set(options) != {"milestones"}:
        raise fault(task, "its keys", sorted(options), "the one key 'milestones'")
    found = options["milestones"]
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise fault(task, "'milestones'", found, "a list with at least one milestone")
    for index, spec in enumerate(found):
        where = f"milestone {index}"
        if not isinstance(spec, Mapping):
            raise fault(task, where, spec, "a mapping")
        unknown = sorted(set(spec) - set(known))
        if unknown:
            raise fault(task, where, unknown, f"keys among {', '.join(known)}")
        weight(task, spec, where)
    if not any(spec.get("weight", 1.0) > 0 for spec in found):
        raise fault(task, "'milestones'", "no positive weight", "at least one weight above 0")
    return list(found)


def value(
    task: Task, spec: Mapping[str, Any], where: str, key: str, types: type | tuple[type, ...], default: Any
) -> Any:
    """`spec[key]` of the given types, or the default when it is absent."""
    found = spec.get(key, default)
    allowed = types if isinstance(types, tuple) else (types,)
    if key in spec and (not isinstance(found, allowed) or (isinstance(found, bool) and bool not in allowed)):
        names = " or ".join(kind.__name__ for kind in allowed)
        raise fault(task, f"{where}, {key!r}", found, names)
    return found


def weight(task: Task, spec: Mapping[str, Any], where: str) -> None:
    """Its "weight", if it has one, is a finite number that is not negative."""
    if not 0 <= value(task, spec, where, "weight", (int, float), 1.0) < math.inf:
        raise fault(task, f"{where}, 'weight'", spec["weight"], "a finite number that is not negative")
