"""How versions leave a trainer with ranks and come to it: the seam where gyre-weights is put in, and the plain way.

The cell makes the files, every rank fills its shards in place; what a manifest then needs (digests), or a delta (what
changed), the ranks find out together, each for a share of the tensors. Invariants: `folder`/v<N> appears whole or not
at all; no process holds the model. Not here: digests, deltas and shared memory, which are gyre-weights' (core imports
it not: a plugin gives the `Versions` of the cell and the `Holder` of each rank).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gyre_core.engine import WeightSource
from gyre_core.errors import GyreError, InfrastructureError
from gyre_core.ranks import files
from gyre_core.ranks.atrest import Shapes, check_weights
from gyre_core.ranks.tensorfile import TensorFile, files_of

Ask = Callable[[str, Mapping[str, Any]], Awaitable[Sequence[Mapping[str, Any]]]]
"""Give all ranks a command; their answers by rank."""


@dataclass(frozen=True, slots=True)
class Order:
    """A version to be published as `folder`/v<version>."""

    version: int
    folder: Path
    make_files: Callable[[Path], list[str]]
    """Makes the empty safetensors files of all weights in a folder; their paths. The ranks' command "publish" with
    these as `files` fills them."""
    extras: Mapping[str, bytes]
    """Small files beside the weights."""
    keep: int
    spare: Path
    """A version that is never dropped."""


class Placed(Protocol):
    """A published version."""

    @property
    def location(self) -> str:
        """Its folder."""

    @property
    def kind(self) -> str:
        """disk, shm or delta."""

    @property
    def digest(self) -> str:
        """Of its contents; empty when there is none."""

    @property
    def bytes(self) -> int:
        """Written for it."""

    @property
    def seconds(self) -> float:
        """It took."""


class Versions(Protocol):
    """The cell's side."""

    @property
    def refusals(self) -> type[Exception]:
        """Its errors about a version that cannot be used, with GyreError's parts."""

    async def publish(self, order: Order, ask: Ask) -> Placed:
        """Publish."""

    async def shapes(self, source: WeightSource) -> Shapes:
        """Of every weight of a version, or of a Hugging Face folder, without reading it."""

    async def load(self, source: WeightSource, ask: Ask) -> None:
        """Have the ranks take it, after whatever is compared first; one that is refused changes nothing."""

    def close(self) -> None:
        """End; what lies in memory alone goes to disk."""


class Holder(Protocol):
    """A rank's side: further commands, and versions opened."""

    @property
    def refusals(self) -> type[Exception]:
        """Its errors about a version that cannot be used, with GyreError's parts."""

    def commands(self) -> Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
        """By name; values in, values out."""

    def open(self, location: str) -> Mapping[str, Any]:
        """The tensors of a version by name, made when asked for."""


def as_ours(error: Exception, doing: str) -> GyreError:
    """A refusal of `Versions` or `Holder` as the run understands it."""
    return InfrastructureError(
        doing, got=str(error), expected="a whole published version", fix=getattr(error, "fix", "")
    )


async def take(versions: Versions, shapes: Shapes, source: WeightSource, ask: Ask) -> None:
    """A version's weights into ranks whose model has these shapes; InfrastructureError names what does not fit."""
    doing = f"loading policy version {source.version} from {source.location}"
    try:
        check_weights(shapes, await versions.shapes(source), doing)
        await versions.load(source, ask)
    except versions.refusals as error:
        raise as_ours(error, doing) from error


async def give(versions: Versions, order: Order, ask: Ask) -> Placed:
    """The ranks' weights as a version; InfrastructureError when it could not be published."""
    doing = f"publishing policy version {order.version}"
    try:
        return await versions.publish(order, ask)
    except versions.refusals as error:
        raise as_ours(error, doing) from error
    except OSError as error:
        raise InfrastructureError(
            doing, got=str(error), expected=f"room for it in {order.folder}", fix="Make room, or keep fewer versions."
        ) from error


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What `PlainVersions` published."""

    location: str
    bytes: int
    seconds: float
    kind: str = "disk"
    digest: str = ""


class PlainVersions:
    """Folders on disk without a manifest: what a trainer has that brings no gyre-weights."""

    @property
    def refusals(self) -> type[Exception]:
        """A disk that is full."""
        return OSError

    async def publish(self, order: Order, ask: Ask) -> OnDisk:
        """See `Versions`."""
        began = time.perf_counter()
        target = order.folder / f"v{order.version}"
        async with files.off_loop(files.new_folder(target)) as partial:
            made = await asyncio.to_thread(order.make_files, partial)
            await ask("publish", {"files": made})
            for name, content in order.extras.items():
                (partial / name).write_bytes(content)
            size = sum(Path(path).stat().st_size for path in made)
        await asyncio.to_thread(files.drop_old_versions, order.folder, order.keep, order.spare, order.version)
        return OnDisk(str(target), size, time.perf_counter() - began)

    async def shapes(self, source: WeightSource) -> Shapes:
        """See `Versions`."""
        found: dict[str, tuple[int, ...]] = {}
        for path in files_of(Path(source.location)):
            found |= TensorFile(path).shapes()
        return found

    async def load(self, source: WeightSource, ask: Ask) -> None:
        """See `Versions`."""
        await ask("load", {"files": list(map(str, files_of(Path(source.location))))})

    def close(self) -> None:
        """Nothing to end."""
