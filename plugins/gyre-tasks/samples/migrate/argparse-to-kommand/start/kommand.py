"""Commands as functions: `@command("NAME", "POSITIONAL", "--flag", "--option=DEFAULT")`, then `run(argv)`.

The function is called with the positionals in order and flags and options by name, as texts (flags: True or False).
What it returns is printed, unless None. Wrong use raises UsageError; `run` lets it through.
"""

COMMANDS = {}


class UsageError(Exception):
    """The text says what was wrong."""


def command(name, *spec):
    def register(function):
        COMMANDS[name] = (function, spec)
        return function

    return register


def run(argv):
    if not argv or argv[0] not in COMMANDS:
        raise UsageError(f"no such command: {argv[0] if argv else ''}".rstrip())
    function, spec = COMMANDS[argv[0]]
    places = [each for each in spec if not each.startswith("--")]
    options = {each[2:].partition("=")[0]: each.partition("=")[2] or None for each in spec if "=" in each}
    flags = {each[2:] for each in spec if each.startswith("--") and "=" not in each}
    values, given = [], {**options, **dict.fromkeys(flags, False)}
    for word in argv[1:]:
        name, sign, value = word[2:].partition("=")
        if not word.startswith("--"):
            values.append(word)
        elif name in flags and not sign:
            given[name] = True
        elif name in options and sign:
            given[name] = value
        else:
            raise UsageError(f"unknown option: {word}")
    if len(values) != len(places):
        raise UsageError(f"{argv[0]} takes {len(places)} arguments, got {len(values)}")
    result = function(*values, **given)
    if result is not None:
        print(result)
