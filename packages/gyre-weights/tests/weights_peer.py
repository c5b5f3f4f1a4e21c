"""A satellite in a process of its own that dies or stops at a chosen point. Arguments: JSON of what to do."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gyre_weights.handover import Endpoint, hand_over, lanes, nearest, snapshot, wire


def gradient(elements: int) -> dict[str, np.ndarray]:
    """What the peer hands over."""
    return {"a": np.arange(elements, dtype=np.float32), "b": np.full((3, 5), 2.0, np.float32)}


def end(how: str) -> None:
    """Die without a word, or hang without one."""
    os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)


def plant(point: str, how: str) -> None:
    """Make the library end this process when it comes to `point`."""
    if point == "piece":
        real = lanes.chunks

        def chunks(windows: Iterable[Any]) -> Iterator[Any]:
            for index, piece in enumerate(real(windows)):
                if index == 2:
                    end(how)
                yield piece

        lanes.chunks = chunks
    elif point == "fetch":
        receive = snapshot._receive_file

        def receive_file(channel: Any, path: Path, size: int) -> None:
            if path.suffix == ".safetensors":
                end(how)
            receive(channel, path, size)

        snapshot._receive_file = receive_file
    elif point == "place":
        snapshot._checked = lambda *args: end(how)
    elif point in ("digest", "seal"):
        send = wire.Channel.send

        def send_until(self: Any, message: dict[str, Any]) -> None:
            if point in message:
                end(how)
            send(self, message)

        wire.Channel.send = send_until  # type: ignore[method-assign]


def main() -> None:
    """Fetch, compute, hand over; ends where it was told to."""
    do = json.loads(sys.argv[1])
    endpoint = Endpoint.load(Path(do["endpoint"]))
    plant(do["point"], do["how"])
    if do.get("into"):
        print("fetching", flush=True)
        found = nearest("/nowhere", do["version"], endpoint, do["into"])
        print(json.dumps([str(found.folder), found.digest]), flush=True)
        return
    print("computing", flush=True)
    if do["point"] == "compute":
        end(do["how"])
    time.sleep(do.get("seconds", 0.0))
    made = hand_over(endpoint, do["id"], do["version"], gradient(do["elements"]), meta={"ids": [1]}, lane=do["lane"])
    print(json.dumps([made.bytes, made.lanes]), flush=True)


if __name__ == "__main__":
    main()
