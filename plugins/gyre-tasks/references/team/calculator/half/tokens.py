import re

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([-+*/()^]))")


def tokens(text):
    found, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise ValueError(f"unexpected {text[at:].strip()[0]!r}")
        found.append(("number", float(match[1])) if match[1] else ("sign", match[2]))
        at = match.end()
    return found
