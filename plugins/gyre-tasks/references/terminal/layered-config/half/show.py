"""Prints the settings in force: show.py [KEY]. Defaults, then local.ini, then the environment (APP_KEY)."""

import configparser
import os
import sys

TYPES = {"host": str, "port": int, "debug": bool, "timeout": float}
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def convert(key, text):
    kind = TYPES[key]
    if kind is bool:
        return bool(text)
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key}: {text!r} is no {kind.__name__}") from None


def read(path):
    parser = configparser.ConfigParser()
    parser.read(path)
    return dict(parser["app"]) if parser.has_section("app") else {}


def settings():
    texts = read("defaults.ini")
    texts.update(read("local.ini"))
    for key in TYPES:
        if f"APP_{key.upper()}" in os.environ:
            texts[key] = os.environ[f"APP_{key.upper()}"]
    unknown = sorted(set(texts) - set(TYPES))
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r}")
    return {key: convert(key, text) for key, text in texts.items()}


def main():
    try:
        found = settings()
    except ValueError as error:
        sys.exit(f"error: {error}")
    for key in sys.argv[1:] or sorted(found):
        print(f"{key} = {found[key]!r}")


if __name__ == "__main__":
    main()
