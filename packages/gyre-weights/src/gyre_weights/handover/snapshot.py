"""A satellite's snapshot: the weights of a version from the nearest holder.

Nearest is where the folder can be opened (shared memory or a disk of this machine); else its files come over the
core's endpoint and are put at rest here. Invariant: what was fetched has the digests its manifest tells, or it is not
there at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gyre_weights.errors import IncompleteError, PeerError, WeightsError
from gyre_weights.folder import new_folder, version_folder
from gyre_weights.handover.wire import Channel, Endpoint, connect
from gyre_weights.version import Version, open_version

_PIECE = 4 << 20


def nearest(
    location: str | Path,
    version: int,
    endpoint: Endpoint | None,
    into: str | Path,
    *,
    idle_s: float = 30.0,
    total_s: float = 600.0,
) -> Version:
    """The version at `location` if this machine has it, else fetched from `endpoint` into `into`/v<version>, where it
    stays for the next who asks. Raises what `open_version` and `fetch_version` raise."""
    for folder in (Path(location), version_folder(into, version)):
        try:
            return open_version(folder, version=version)
        except IncompleteError:
            continue
    if endpoint is None:
        raise IncompleteError(
            f"taking policy version {version}", got=f"nothing at {location} on this machine", expected="a holder to ask"
        )
    return fetch_version(endpoint, version, into, idle_s=idle_s, total_s=total_s)


def fetch_version(
    endpoint: Endpoint, version: int, into: str | Path, *, idle_s: float = 30.0, total_s: float = 600.0
) -> Version:
    """Copy a version's folder from the process at `endpoint` to `into`/v<version> and open it. PeerError when the
    holder has it not, dies or is silent; nothing is left behind then."""
    doing = f"fetching policy version {version}"
    channel = connect(endpoint, {"do": "fetch", "version": version}, doing, idle_s=idle_s, total_s=total_s)
    target = version_folder(into, version)
    try:
        files = channel.receive()["files"]
        with new_folder(target, durable=False) as draft:
            for name, size in files:
                if Path(name).name != name or name.startswith("."):
                    raise PeerError(doing, got=f"a file named {name!r}", expected="a plain file name")
                _receive_file(channel, draft / name, int(size))
            open_version(draft, version=version).verify()
    finally:
        channel.close()
    return open_version(target, version=version)


def _receive_file(channel: Channel, path: Path, size: int) -> None:
    buffer = np.empty(min(size, _PIECE), np.uint8)
    with path.open("wb") as writer:
        while size:
            piece = buffer[: min(size, _PIECE)]
            channel.receive_into(piece)
            writer.write(piece.data)
            size -= piece.nbytes


def serve_snapshot(channel: Channel, version: int, where: Callable[[int], str | Path | None]) -> None:
    """The holder's side: send the folder's files. A delta is refused: a newcomer has no base."""
    channel.doing = f"giving policy version {version}"
    folder = where(version)
    try:
        if folder is None:
            raise IncompleteError(channel.doing, got="a version not held here", expected="one that is")
        opened = open_version(folder, version=version)
        if opened.is_delta:
            raise IncompleteError(channel.doing, got="a delta", expected="a full version")
    except WeightsError as error:
        channel.send({"refused": str(error)})
        return
    paths = sorted(path for path in Path(folder).iterdir() if path.is_file() and not path.name.startswith("."))
    channel.send({"files": [[path.name, path.stat().st_size] for path in paths]})
    for path in paths:
        with path.open("rb") as reader:
            left = os.fstat(reader.fileno()).st_size
            while left:
                channel.sock.settimeout(channel.remaining())
                try:
                    left -= channel.sock.sendfile(reader, offset=reader.tell(), count=min(left, 16 * _PIECE))
                except OSError as error:
                    raise PeerError(channel.doing, got=f"a broken connection ({error})", expected="a peer") from error
