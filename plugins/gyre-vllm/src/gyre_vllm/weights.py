"""Policy versions at rest: what is checked before a running server is told to load one.

Invariant: a version passes only if every file of it is there and whole, its bytes have their digests, and it names the
same tensors with the same shapes as the model the server runs; then loading changes weights and nothing else. Formats
are gyre-weights' business: a folder on disk, in shared memory, or a delta on another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import gyre_weights
import msgspec
from gyre_core import CapabilityError, InfrastructureError, WeightSource

PACKAGE = str(Path(gyre_weights.__file__).parent)
"""Where the server's workers find gyre-weights; it needs only the numpy that they have."""
KINDS = ("disk", "shm", "delta")
COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a group meets to broadcast a version: a store, the group's name, the member number of this server's first
    worker, and how many members there are."""

    host: str
    port: int
    name: str
    first: int
    size: int
    backend: str


def read_meeting(location: str, doing: str) -> Meeting:
    """A meeting out of "group://HOST:PORT/NAME?first=1&size=3&backend=gloo". InfrastructureError when it is none."""
    parts = urlsplit(location)
    try:
        asked = {key: values[-1] for key, values in parse_qs(parts.query, strict_parsing=True).items()}
        backend = asked.get("backend", "gloo")
        found = Meeting(
            parts.hostname or "", int(parts.port or 0), parts.path.strip("/"), int(asked["first"]), int(asked["size"]),
            backend,
        )  # fmt: skip
        whole = parts.scheme == "group" and found.host and found.port and found.name
        if not whole or not 1 <= found.first < found.size or backend not in ("gloo", "nccl"):
            raise ValueError("something is missing or out of range")
    except (ValueError, KeyError) as error:
        raise InfrastructureError(
            doing, got=f"{location!r} ({error})", expected="group://HOST:PORT/NAME?first=1&size=2&backend=gloo"
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """`shapes` by tensor name. `base`: the full version's folder (its own, but for a delta)."""

    shapes: dict[str, tuple[int, ...]]
    vocab: int
    tied: bool
    """The output layer is the embedding."""
    base: str
    is_delta: bool
    digest: str = ""
    """Of the contents; empty when nobody told."""


def read_version(source: WeightSource, doing: str) -> ModelVersion:
    """Open, check every byte against its digest, and say what it holds. InfrastructureError when anything cannot be
    read, CapabilityError for a kind that is no version at rest."""
    if source.kind not in KINDS:
        raise CapabilityError(
            doing, got=f"a weight source of kind {source.kind!r}", expected=f"one of {', '.join(KINDS)}"
        )
    try:
        version = gyre_weights.open_version(source.location, digest=source.digest or None)
        version.verify()
        full = version
        while full.is_delta:
            full = full.open_base()
        config = msgspec.json.decode((full.folder / "config.json").read_bytes())
        text = config.get("text_config") or config
        vocab = int(text["vocab_size"])
    except (gyre_weights.WeightsError, OSError, msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        raise InfrastructureError(
            doing, got=f"{source.location}: {type(error).__name__}: {error}", expected="a whole published version"
        ) from error
    shapes = {name: entry.shape for name, entry in version.manifest.tensors.items()}
    digest = version.digest or source.digest
    return ModelVersion(shapes, vocab, "lm_head.weight" not in shapes, str(full.folder), version.is_delta, digest)


def require_same(new: ModelVersion, old: ModelVersion, location: str, doing: str) -> None:
    """InfrastructureError when `new` has other tensors or shapes than `old`."""
    if new.shapes == old.shapes:
        return
    names = sorted(new.shapes.keys() ^ old.shapes.keys())
    shapes = sorted(name for name in new.shapes.keys() & old.shapes.keys() if new.shapes[name] != old.shapes[name])
    raise InfrastructureError(
        doing,
        got=f"{location}: other tensors {names[:3]}, other shapes {shapes[:3]}",
        expected="the tensors of the model that runs",
        fix="All versions of a run must share one architecture.",
    )
