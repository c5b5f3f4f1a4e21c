TO_BASE = {"kg": 1.0, "g": 0.001, "t": 1000.0, "lb": 0.45359237, "oz": 0.028349523125}


def convert(value, source, target):
    return value * TO_BASE[source] / TO_BASE[target]
