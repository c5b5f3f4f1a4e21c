import tomllib

import pytest

TOML = """
[build.lib]
target = "x86"

[build.app]
target = "arm"
optimize = 2
strip = true
flags = ["-g", "-DNAME=a b"]
needs = ["lib"]
"""
INI = """
[project]
name = x
[build:app]
target = arm "v8"
optimize = 2
strip = yes
flags = -g  -Wall
needs = lib, util.x
[build:lib]
target = x86
[build:util.x]
target = x86
strip = off
"""


def load(folder, text):
    from builds import load

    (folder / "b.toml").write_text("\n".join(line.strip() for line in text.splitlines()), encoding="utf-8")
    return load(str(folder / "b.toml"))


def test_builds_are_objects(tmp_path):
    assert load(tmp_path, "") == []
    lib, app = load(tmp_path, TOML)
    assert (lib.name, lib.target, lib.optimize, lib.strip, lib.flags, lib.needs) == ("lib", "x86", 0, False, (), ())
    assert (app.name, app.target, app.optimize, app.strip) == ("app", "arm", 2, True)
    assert app.flags == ("-g", "-DNAME=a b")
    assert app.needs == ("lib",)


def test_builds_do_not_change(tmp_path):
    lib, _ = load(tmp_path, TOML)
    with pytest.raises(AttributeError):
        lib.target = "arm"


@pytest.mark.parametrize(("line", "place"), [
    ("optimize = \"2\"", "build.x.optimize"), ("optimize = true", "build.x.optimize"), ("strip = 1", "build.x.strip"),
    ("flags = \"-g\"", "build.x.flags"), ("flags = [1]", "build.x.flags"), ("stripp = true", "build.x.stripp"),
    ("needs = [\"y\"]", "build.x.needs"),
])
def test_what_is_wrong_is_named(tmp_path, line, place):
    with pytest.raises(ValueError, match=place):
        load(tmp_path, f'[build.x]\ntarget = "a"\n{line}\n')


def test_a_build_needs_a_target(tmp_path):
    with pytest.raises(ValueError, match="build.x.target"):
        load(tmp_path, "[build.x]\n")


def test_order(tmp_path):
    from builds import order

    text = '[build.a]\ntarget="t"\nneeds=["c"]\n[build.b]\ntarget="t"\n[build.c]\ntarget="t"\n'
    assert order(load(tmp_path, text)) == ["b", "c", "a"]
    with pytest.raises(ValueError, match="circle"):
        order(load(tmp_path, '[build.a]\ntarget="t"\nneeds=["a"]\n'))


def test_an_old_file_is_converted(tmp_path):
    from builds import convert

    (tmp_path / "old.ini").write_text("\n".join(line.strip() for line in INI.splitlines()))
    convert(str(tmp_path / "old.ini"), str(tmp_path / "new.toml"))
    assert tomllib.loads((tmp_path / "new.toml").read_text()) == {"build": {
        "app": {"target": 'arm "v8"', "optimize": 2, "strip": True, "flags": ["-g", "-Wall"], "needs": ["lib", "util.x"]},
        "lib": {"target": "x86"},
        "util.x": {"target": "x86", "strip": False},
    }}
