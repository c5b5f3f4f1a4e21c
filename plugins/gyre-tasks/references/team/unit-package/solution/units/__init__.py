from units import length, mass, temperature

_MODULES = {**dict.fromkeys(length.TO_BASE, length), **dict.fromkeys(mass.TO_BASE, mass), **dict.fromkeys(temperature.UNITS, temperature)}


def convert(value, source, target):
    for name in (source, target):
        if name not in _MODULES:
            raise ValueError(f"no unit {name!r}")
    if _MODULES[source] is not _MODULES[target]:
        raise ValueError(f"cannot convert {source} to {target}")
    return _MODULES[source].convert(value, source, target)


def known():
    return sorted(_MODULES)
