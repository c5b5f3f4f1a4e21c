import string

_LETTERS = string.ascii_lowercase


def encode(text, by=3):
    return "".join(_move(c, by) for c in text)


def decode(text, by=3):
    return encode(text, -by)


def _move(c, by):
    if c in _LETTERS:
        return _LETTERS[(_LETTERS.index(c) + by) % 26]
    if c in _LETTERS.upper():
        return _move(c.lower(), by).upper()
    return c
