"""Builds of a project, from a TOML file."""

from __future__ import annotations

import configparser
import json
import tomllib
from dataclasses import dataclass


@dataclass(frozen=True)
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
        wrong = type(value) is not KINDS[key]
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


def convert(old, new):
    """Write the TOML of an old INI file."""
    parser = configparser.ConfigParser()
    with open(old) as file:
        parser.read_file(file)
    lines = []
    for name in parser.sections():
        if not name.startswith("build:"):
            continue
        section = parser[name]
        lines.append(f"[build.{json.dumps(name.partition(':')[2], ensure_ascii=False)}]")
        lines.append(f"target = {json.dumps(section['target'], ensure_ascii=False)}")
        if "optimize" in section:
            lines.append(f"optimize = {section.getint('optimize')}")
        if "strip" in section:
            lines.append(f"strip = {json.dumps(section.getboolean('strip'))}")
        if section.get("flags", "").split():
            lines.append(f"flags = {json.dumps(section['flags'].split(), ensure_ascii=False)}")
        needs = [each.strip() for each in section.get("needs", "").split(",") if each.strip()]
        if needs:
            lines.append(f"needs = {json.dumps(needs, ensure_ascii=False)}")
    with open(new, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
