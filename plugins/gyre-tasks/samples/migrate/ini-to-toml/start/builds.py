"""Builds of a project, from an INI file."""

import configparser


def load(path):
    parser = configparser.ConfigParser()
    with open(path) as file:
        parser.read_file(file)
    builds = []
    for name in parser.sections():
        if not name.startswith("build:"):
            continue
        section = parser[name]
        builds.append({
            "name": name.partition(":")[2],
            "target": section["target"],
            "optimize": section.getint("optimize", 0),
            "strip": section.getboolean("strip", False),
            "flags": section.get("flags", "").split(),
            "needs": [each.strip() for each in section.get("needs", "").split(",") if each.strip()],
        })
    return builds


def order(builds):
    """Names so that each comes after what it needs, otherwise in the order of the file."""
    done = []
    left = list(builds)
    while left:
        for build in left:
            if all(need in done for need in build["needs"]):
                done.append(build["name"])
                left.remove(build)
                break
        else:
            raise ValueError("needs go in a circle")
    return done
