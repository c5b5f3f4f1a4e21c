"""Two processes: a fixture that starts a source beside the test."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

PEER = Path(__file__).with_name("kvxfer_peer.py")


def _load():
    spec = importlib.util.spec_from_file_location("kvxfer_peer", PEER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Source:
    """A source process and the line protocol to it."""

    def __init__(self, config: dict) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), json.dumps(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.endpoint = self.process.stdout.readline().strip()

    def ask(self, line: str) -> dict:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        while not (said := self.process.stdout.readline()).startswith("{"):  # libraries may print, too
            assert said, "the source ended"
        return json.loads(said)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="session")
def peer():
    """The peer's module: key, tokens and KV of a session."""
    return _load()


@pytest.fixture
def source():
    """Start sources; they end with the test."""
    started = []

    def start(layout, sessions, **config) -> Source:
        started.append(Source({"layout": layout.to_dict(), "sessions": sessions, **config}))
        return started[-1]

    yield start
    for one in started:
        one.end()
