UNITS = ("C", "F", "K")


def convert(value, source, target):
    kelvin = {"C": lambda x: x + 273.15, "F": lambda x: (x + 459.67) * 5 / 9, "K": lambda x: x}[source](value)
    if kelvin < 0:
        raise ValueError("below absolute zero")
    return {"C": lambda x: x - 273.15, "F": lambda x: x * 9 / 5 - 459.67, "K": lambda x: x}[target](kelvin)
