"""Policy versions before a server hears of them: opened, checked against the model it serves, made into an order.

Invariant: nothing is asked of the server before a version at rest is known to be whole, byte by byte where it has
digests, and to fit: SGLang's own way back from a load that fails half way is to read the folder that could not be read,
which ends it. Not here: the server (`loading`).
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qs, urlsplit

from gyre_core import CapabilityError, InfrastructureError, WeightSource
from gyre_weights import Version, WeightsError, open_version, publish_full

AT_REST = ("disk", "shm", "delta")
COLLECTIVE = "collective"
HEAD = "lm_head.weight"
"""Some writers put it beside a tied embedding, some do not."""
Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"
"""Shape by tensor name."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a group meets to broadcast a version, and the member number of the server's first worker."""

    host: str
    port: int
    name: str
    first: int
    size: int
    backend: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that a server may be asked to take: at rest (`folder`), or by a group (`meeting`)."""

    source: WeightSource
    shapes: Shapes
    folder: str = ""
    digest: str = ""
    """Of the contents, or of the files' times where they have none; empty for a broadcast of which nobody told it."""
    changed_only: bool = False
    """A delta on the version that the server holds: only what it changes is loaded."""
    meeting: Meeting | None = None
    optional: tuple[str, ...] = ()
    """Tensors that may be missing or come on top."""


def open_source(source: WeightSource) -> Version:
    """Open and check a version at rest; InfrastructureError when it is missing, cut short, damaged or of another
    number or digest, CapabilityError for another kind of source. Reads all of it: run it in a thread."""
    doing = f"loading policy version {source.version} from {source.location}"
    if source.kind not in AT_REST:
        raise CapabilityError(
            doing, got=f"a weight source of kind {source.kind!r}", expected=f"one of {', '.join(AT_REST)}",
            fix="Publish the version to a folder.",
        )  # fmt: skip
    try:
        opened = open_version(source.location, digest=source.digest or None)
        opened.verify()
    except WeightsError as error:
        raise InfrastructureError(doing, got=str(error), expected="a published version") from error
    if opened.version not in (-1, source.version):
        raise InfrastructureError(doing, got=f"version {opened.version}", expected=f"version {source.version}")
    return opened


def whole_of(source: WeightSource, opened: Version) -> WeightSource:
    """What a server can be started with: the version itself, or the whole one that a delta goes back to."""
    whole = opened
    try:
        while whole.is_delta:
            whole = whole.open_base()
    except WeightsError as error:
        raise InfrastructureError(
            f"loading policy version {source.version} from {source.location}", got=str(error), expected="its base"
        ) from error
    if whole is opened:
        return source
    return WeightSource(max(whole.version, 0), str(whole.folder), digest=whole.digest)


def shapes_of(version: Version) -> dict[str, tuple[int, ...]]:
    """What a version's tensors look like."""
    return {name: tuple(entry.shape) for name, entry in version.manifest.tensors.items()}


def prepare(source: WeightSource, shapes: Shapes, *, tied: bool, held: str = "") -> Prepared:
    """Check a version against the model that is served (`shapes`); a group's is checked when its plan comes. `held` is
    the content digest of the version it has now."""
    if source.kind == COLLECTIVE:
        meeting = read_meeting(source)
        return Prepared(source, shapes, digest=source.digest, meeting=meeting, optional=(HEAD,) if tied else ())
    return fitting(source, open_source(source), shapes, tied=tied, held=held)


def fitting(source: WeightSource, opened: Version, shapes: Shapes, *, tied: bool, held: str = "") -> Prepared:
    """The same for a version that is open."""
    optional = (HEAD,) if tied else ()
    found = shapes_of(opened)
    wrong = sorted(
        name for name in {*found, *shapes} - {*optional} if found.get(name) != shapes.get(name)
    )  # fmt: skip
    if wrong:
        raise InfrastructureError(
            f"loading policy version {source.version} from {source.location}",
            got=f"{wrong[0]} of shape {found.get(wrong[0])} ({len(wrong)} tensors differ)",
            expected=str(shapes.get(wrong[0])), fix="All versions of a run must be of one model.",
        )  # fmt: skip
    base = opened.manifest.base
    return Prepared(
        source, shapes, str(Path(source.location).resolve()), opened.digest or source.digest or _stamp(opened),
        changed_only=base is not None and held == base.digest != "", optional=optional,
    )  # fmt: skip


def _stamp(opened: Version) -> str:
    """Names the contents of a folder that has no digests, unless somebody writes into it and hides that."""
    stats = [(name, (opened.folder / name).stat()) for name in sorted(opened.manifest.files)]
    text = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return f"files:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def read_meeting(source: WeightSource) -> Meeting:
    """The location of a "collective" source: group://HOST:PORT/NAME?first=1&size=2&backend=gloo."""
    parts = urlsplit(source.location)
    try:
        asked = {key: values[-1] for key, values in parse_qs(parts.query, strict_parsing=True).items()}
        found = Meeting(
            parts.hostname or "", parts.port or 0, parts.path.strip("/"), int(asked["first"]), int(asked["size"]),
            asked.get("backend", "gloo"),
        )  # fmt: skip
        if parts.scheme != "group" or not (found.host and found.port and found.name and 1 <= found.first < found.size):
            raise ValueError("a part is missing or out of range")
        if found.backend not in ("gloo", "nccl"):
            raise ValueError(f"backend {found.backend!r}")
    except (ValueError, KeyError) as error:
        raise InfrastructureError(
            f"receiving policy version {source.version}", got=f"{source.location!r} ({error})",
            expected="group://HOST:PORT/NAME?first=1&size=2&backend=gloo",
        ) from error  # fmt: skip
    return found


def materialise(prepared: Prepared) -> Path:
    """What a delta leads to, in a new folder of shared memory: all tensors, or those it changes on what the server has.
    The caller removes the folder's parent."""
    opened = open_source(prepared.source)
    shm = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix=f"gyre-v{opened.version}-", dir=shm if shm.is_dir() else None))
    try:
        names = sorted(opened.changed if prepared.changed_only else opened)
        tensors = ((name, opened[name]) for name in names)
        return Path(publish_full(root, prepared.source.version, tensors, kind="shm").location)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
