"""Policy versions into a running server. Pure preparation first, then one change between two forward passes.

Invariant: nothing is asked of the server before the version is known to be whole and to fit the model that it serves: a
load that fails half way would be rolled back by SGLang from the very folder that could not be read, which ends it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gyre_core import CapabilityError, InfrastructureError, WeightSource
from gyre_weights import Version, WeightsError, open_version, publish_full

from gyre_sglang.launch import Server

KINDS = ("disk", "shm", "delta")
HEAD = "lm_head.weight"
"""Some writers put it beside a tied embedding, some do not."""
Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"
"""Shape by tensor name."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that may be given to the server."""

    version: int
    folder: str
    """Safetensors that the server loads."""
    temporary: str = ""
    """A folder of ours to remove afterwards."""

    def remove(self) -> None:
        """Give a temporary folder back."""
        if self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)


def shapes_of(version: Version) -> dict[str, tuple[int, ...]]:
    """What a version's tensors look like."""
    return {name: tuple(entry.shape) for name, entry in version.manifest.tensors.items()}


def open_source(source: WeightSource) -> Version:
    """Open and check a version; InfrastructureError when it is missing, cut short or of another number, CapabilityError
    for a kind of source that this engine does not take."""
    doing = f"loading policy version {source.version} from {source.location}"
    if source.kind not in KINDS:
        raise CapabilityError(
            doing, got=f"a weight source of kind {source.kind!r}", expected=f"one of {', '.join(KINDS)}",
            fix="Publish the version to a folder.",
        )  # fmt: skip
    try:
        opened = open_version(source.location)
    except WeightsError as error:
        raise InfrastructureError(doing, got=str(error), expected="a published version") from error
    if opened.version not in (-1, source.version):
        raise InfrastructureError(doing, got=f"version {opened.version}", expected=f"version {source.version}")
    return opened


def prepare(source: WeightSource, shapes: Shapes, *, tied: bool) -> Prepared:
    """Check a version against the model that is served (`shapes`); a delta becomes a folder of the tensors that
    changed. Blocks on the disk: run it in a thread."""
    opened = open_source(source)
    found = shapes_of(opened)
    names = {*found, *shapes} - ({HEAD} if tied else set())
    wrong = sorted(name for name in names if found.get(name) != shapes.get(name))
    if wrong:
        raise InfrastructureError(
            f"loading policy version {source.version} from {source.location}",
            got=f"{wrong[0]} of shape {found.get(wrong[0])} ({len(wrong)} tensors differ)",
            expected=str(shapes.get(wrong[0])), fix="All versions of a run must be of one model.",
        )  # fmt: skip
    if not opened.is_delta:
        return Prepared(source.version, source.location)
    folder = scratch_folder(f"gyre-sglang-v{source.version}-")
    try:
        published = publish_full(
            folder, source.version, ((name, opened[name]) for name in sorted(opened.changed)), kind="shm"
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Prepared(source.version, published.location, str(folder))


async def apply_version(server: Server, prepared: Prepared) -> None:
    """Have the server load it now; nothing must be sampled meanwhile."""
    body = disk_body(prepared)
    await server.client.post("/update_weights_from_disk", body, server.options.weights_timeout_s)
    info = await server.client.get("/model_info", server.options.request_timeout_s)
    if info.get("weight_version") != str(prepared.version):
        raise InfrastructureError(
            f"loading policy version {prepared.version} into SGLang", got=f"version {info.get('weight_version')}",
            expected=f"version {prepared.version}", fix="Does somebody else update this server?",
        )  # fmt: skip


def disk_body(prepared: Prepared) -> dict[str, Any]:
    """The body of POST /update_weights_from_disk: keep running calls and their KV; flushing is asked for apart."""
    return {
        "model_path": prepared.folder,
        "weight_version": str(prepared.version),
        "abort_all_requests": False,
        "flush_cache": False,
        "keep_pause": True,
    }


def scratch_folder(prefix: str) -> Path:
    """A new folder in shared memory where there is some, else among temporary files."""
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix=prefix, dir=shm if shm.is_dir() else None))
