"""Builds of a project, from a TOML file."""

from __future__ import annotations

import configparser
import json
import tomllib
from dataclasses import dataclass


@dataclass(frozen=False)
class Build:
    name: str
    target: str
    optimize: int = 0
    strip: bool = False
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


KINDS = {"target": str, "optimize": int, "strip": bool, "flags": list, "needs": list}


def load(path):
    with open(path, "rb") as file:
        table = tomllib.load(file)
    builds = [_build(name, values) for name, values in table.get("build", {}).items()]
    names = {build.name for build in builds}
    for build in builds:
        for need in build.needs:
            if need not in names:
                raise ValueError(f"build.{build.name}.needs: no build {need!r}")
    return builds


def _build(name, values):
    for key, value in values.items():
        if key not in KINDS:
            raise ValueError(f"build.{name}.{key}: unknown key")
        wrong = not isinstance(value, KINDS[key])
        if wrong or (KINDS[key] is list and not all(isinstance(each, str) for each in value)):
            raise ValueError(f"build.{name}.{key}: {value!r} is no {KINDS[key].__name__}")
    if "target" not in values:
        raise ValueError(f"build.{name}.target: missing")
    return Build(name, **{key: tuple(value) if KINDS[key] is list else value for key, value in values.items()})


def order(builds):
    """Names so that each comes after what it needs, otherwise in the order of the file."""
    done = []
    left = list(builds)
    while left:
        for build in left:
            if all(need in done for need in build.needs):
                done.append(build.name)
                left.remove(build)
                break
        else:
            raise ValueError("needs go in a circle")
    return done
