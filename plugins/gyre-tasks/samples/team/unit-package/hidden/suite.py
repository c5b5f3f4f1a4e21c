import importlib

import pytest


def part(name):
    return importlib.import_module(f"units.{name}")


@pytest.mark.parametrize(("module", "value", "source", "target", "expected"), [
    ("length", 1, "km", "m", 1000), ("length", 12, "in", "ft", 1), ("length", 2.54, "cm", "in", 1),
    ("mass", 1, "t", "kg", 1000), ("mass", 16, "oz", "lb", 1), ("mass", 1, "lb", "g", 453.59237),
    ("temperature", 100, "C", "F", 212), ("temperature", -40, "F", "C", -40), ("temperature", 0, "K", "C", -273.15),
])
def test_modules(module, value, source, target, expected):
    assert part(module).convert(value, source, target) == pytest.approx(expected)


@pytest.mark.parametrize("module", ["length", "mass"])
def test_unknown_units_of_a_module(module):
    with pytest.raises(KeyError):
        part(module).convert(1, "m" if module == "mass" else "kg", "stone")


def test_absolute_zero():
    with pytest.raises(ValueError):
        part("temperature").convert(-300, "C", "K")


def test_the_package_converts_all():
    import units

    assert units.convert(1, "km", "m") == pytest.approx(1000)
    assert units.convert(1, "kg", "g") == pytest.approx(1000)
    assert units.convert(0, "C", "K") == pytest.approx(273.15)


def test_the_package_refuses():
    import units

    for source, target in (("m", "kg"), ("C", "ft"), ("m", "mile")):
        with pytest.raises(ValueError):
            units.convert(1, source, target)


def test_what_is_known():
    import units

    assert units.known() == sorted(["m", "km", "cm", "in", "ft", "kg", "g", "t", "lb", "oz", "C", "F", "K"])
