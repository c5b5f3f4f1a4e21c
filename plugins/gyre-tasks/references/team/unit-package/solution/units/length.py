TO_BASE = {"m": 1.0, "km": 1000.0, "cm": 0.01, "in": 0.0254, "ft": 0.3048}


def convert(value, source, target):
    return value * TO_BASE[source] / TO_BASE[target]
