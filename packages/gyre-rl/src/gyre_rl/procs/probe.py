"""Whether a machine can take cells of a run: `python -m gyre_rl.procs.probe URL FILE`, run there.

Prints what it finds as one JSON line (`Found`), then waits for one connection from the run's machine, so that both ways
are tried. Invariant: changes nothing, and ends within PATIENCE_S.
"""

from __future__ import annotations

import json
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from gyre_core import InfrastructureError

from gyre_rl.procs.address import own_address

PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Found:
    """What a machine told of itself."""

    version: str
    """Of gyre-rl there."""
    address: str
    """Its own, on the way to the run; where it listens."""
    port: int
    reaches: str
    """Empty: it reached the run's machine; else why not."""
    sees: bool
    """The run's directory is there."""


def _tell(found: Found) -> None:
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Look, tell, wait for the way back."""
    url, file = sys.argv[1:]
    try:
        there, address = urlsplit(url), own_address(url)
    except InfrastructureError as error:
        _tell(Found(version("gyre-rl"), "", 0, error.got, Path(file).is_file()))
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        server.settimeout(PATIENCE_S)
        reaches = ""
        try:
            socket.create_connection((there.hostname or "", there.port or 0), PATIENCE_S / 2).close()
        except OSError as error:
            reaches = str(error)
        found = Found(version("gyre-rl"), address, server.getsockname()[1], reaches, Path(file).is_file())
        _tell(found)
        with suppress(OSError):
            server.accept()[0].close()


if __name__ == "__main__":
    main()
