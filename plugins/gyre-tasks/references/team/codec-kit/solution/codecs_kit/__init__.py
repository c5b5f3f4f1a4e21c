from codecs_kit import hexes, runs, shift

NAMES = {"runs": runs, "shift": shift, "hex": hexes}


def _steps(chain):
    names = chain.split("|")
    for name in names:
        if name not in NAMES:
            raise ValueError(f"no codec {name!r}")
    return [NAMES[name] for name in names]


def encode(chain, text):
    for step in _steps(chain):
        text = step.encode(text)
    return text


def decode(chain, text):
    for step in reversed(_steps(chain)):
        text = step.decode(text)
    return text
