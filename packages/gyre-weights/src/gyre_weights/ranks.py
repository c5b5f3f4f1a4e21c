"""Publishing from a trainer whose weights are sharded over rank processes, and taking a version into them.

The ranks fill the files of a draft in place, at once; then each digests, or compares with the version before, a share
of the tensors (`rank_share`); this process, which holds no tensor, makes the manifest and gives the folder its name.
The files are what a trainer of one process makes. Invariants: those of `Publisher`; nothing is gathered; what waits for
a disk or gives much memory back does so in a thread, for the event loop is the cell's. All ranks see this machine's
file systems. Not here: how ranks are reached: `ask(command, values)` gives every rank's answer.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from gyre_weights.errors import CorruptError, IncompleteError, VersionError, WeightsError
from gyre_weights.folder import drop_drafts, drop_old, flush, new_folder, version_folder
from gyre_weights.manifest import BaseRef, Manifest, TensorEntry, read_manifest
from gyre_weights.publish import Part, finish_version
from gyre_weights.publisher import Kind
from gyre_weights.shards import read_headers
from gyre_weights.shm import drop_links, link_version, own, remove, settle, shm_root, sweep
from gyre_weights.version import Published, open_version

Ask = Callable[[str, Mapping[str, Any]], Awaitable[Sequence[Mapping[str, Any]]]]


class Order(Protocol):
    """What is to be published."""

    @property
    def version(self) -> int:
        """Its number."""

    @property
    def folder(self) -> Path:
        """It becomes `folder`/v<version>."""

    @property
    def make_files(self) -> Callable[[Path], list[str]]:
        """Makes empty safetensors files of all weights in a folder; the command "publish" fills them."""

    @property
    def extras(self) -> Mapping[str, bytes]:
        """Small files beside the weights."""

    @property
    def keep(self) -> int:
        """Versions kept."""

    @property
    def spare(self) -> Path:
        """A version that is never dropped."""


class Source(Protocol):
    """Where a version lies."""

    @property
    def version(self) -> int:
        """Its number."""

    @property
    def location(self) -> str:
        """Its folder."""


class RankVersions:
    """Publishes and takes versions for one trainer with ranks. `full_every`, `worth`: as of `Publisher`."""

    def __init__(self, kind: Kind | str, *, full_every: int = 16, worth: float = 0.5) -> None:
        self.kind, self._full_every, self._worth = Kind(kind), full_every, worth
        self._folder: Path | None = None
        self._memory: Path | None = None
        self._last: int | None = None
        """The version published last."""
        self._looked_at = ("", "")
        """Location and content digest of the version whose shapes were told last."""
        self._cramped = False
        """Whole weights did not fit into shared memory, so the next are not tried there."""
        self._deltas = 0
        self._again = False
        """The last delta was not worth it."""

    @property
    def refusals(self) -> type[Exception]:
        """Its errors about a version that cannot be used."""
        return WeightsError

    # Taking

    async def shapes(self, source: Source) -> Mapping[str, tuple[int, ...]]:
        """Of every weight, without reading it. VersionError when another version lies there. What is loaded next from
        this location has these very contents, or is refused."""
        opened = await asyncio.to_thread(open_version, source.location)
        if opened.digest and opened.version != source.version:
            raise VersionError(
                f"taking policy version {source.version} from {source.location}", got=f"version {opened.version}",
                expected=f"version {source.version}",
            )  # fmt: skip
        self._looked_at = (source.location, opened.digest)
        return {name: entry.shape for name, entry in opened.manifest.tensors.items()}

    async def load(self, source: Source, ask: Ask) -> None:
        """Each rank opens it and compares its share with the digests; then all read their shards from what they
        opened. A version that is damaged, or not the one whose shapes were told, changes nothing."""
        location, digest = self._looked_at
        expected = digest if location == source.location else ""
        for answer in await ask("compare", {"folder": source.location, "version": source.version, "digest": expected}):
            if answer["wrong"]:
                raise CorruptError(
                    f"taking policy version {source.version} from {source.location}", got=str(answer["wrong"]),
                    expected="what was published",
                )  # fmt: skip
        await ask("load", {"folder": source.location})

    # Publishing

    async def publish(self, order: Order, ask: Ask) -> Published:
        """Publish; OSError when the medium is full, and nothing is left behind then."""
        began = time.perf_counter()
        if self._folder != order.folder:
            await asyncio.to_thread(self._begin, order.folder)
        if self.kind is Kind.SHM:
            manifest, changed = await self._shm(order, ask), None
        elif self.kind is Kind.DELTA:
            manifest, changed = await self._delta(order, ask)
        else:
            manifest, changed = await self._full(order, order.folder, "disk", ask), None
        target = version_folder(order.folder, order.version)
        await asyncio.to_thread(drop_old, order.folder, order.keep, [order.spare, target], newest=order.version)
        self._last = order.version
        base = None if manifest.base is None else manifest.base.version
        return Published(
            order.version, str(target), manifest.kind, sum(manifest.files.values()), time.perf_counter() - began,
            manifest.digest, base, changed,
        )  # fmt: skip

    def _begin(self, folder: Path) -> None:
        """Publish to this folder from now on. What a process that was killed was making there is removed."""
        self.close()
        drop_drafts(folder)
        self._folder = folder
        if self.kind is Kind.DELTA:
            self._scratch_root(folder)

    async def _full(self, order: Order, root: Path, kind: str, ask: Ask) -> Manifest:
        durable = kind == "disk"
        async with _draft(version_folder(root, order.version), durable=durable) as draft:
            names = await self._fill(order, draft, ask)
            if durable:
                for name in names:
                    await asyncio.to_thread(flush, draft / name)
            digests: dict[str, str] = {}
            for answer in await ask("digest", {"folder": str(draft)}):
                digests |= answer["digests"]
            part = await asyncio.to_thread(_part, draft, names, digests)
            return await asyncio.to_thread(
                finish_version, draft, [part], version=order.version, kind=kind, extras=order.extras, durable=durable
            )

    async def _fill(self, order: Order, draft: Path, ask: Ask) -> list[str]:
        """Names of the files with all weights in `draft`."""
        files = await asyncio.to_thread(order.make_files, draft)
        await ask("publish", {"files": files})
        return [Path(file).name for file in files]

    async def _shm(self, order: Order, ask: Ask) -> Manifest:
        root = await asyncio.to_thread(self._root, order.folder)
        manifest = await self._full(order, root, "shm", ask)
        target = version_folder(root, order.version)
        await asyncio.to_thread(link_version, order.folder, order.version, target)
        await asyncio.to_thread(drop_old, root, order.keep, [order.spare, target], newest=order.version)
        await asyncio.to_thread(drop_links, order.folder)
        return manifest

    def _root(self, folder: Path) -> Path:
        """This run's folder in shared memory."""
        if self._memory is None:
            sweep()
            memory = shm_root(folder)
            drop_drafts(memory)
            self._memory = memory
        own(self._memory, folder.resolve())
        return self._memory

    # Deltas

    async def _delta(self, order: Order, ask: Ask) -> tuple[Manifest, int | None]:
        base = await self._base(order, ask)
        if base is not None:
            return await self._difference(order, base, ask)
        manifest = await self._full(order, order.folder, "disk", ask)
        await ask("shadow", {"folder": str(version_folder(order.folder, order.version))})
        self._deltas, self._again = 0, False
        return manifest, None

    async def _base(self, order: Order, ask: Ask) -> BaseRef | None:
        """What all ranks have a copy of, if the next version may rest on it."""
        told = {(int(answer["version"]), str(answer["digest"])) for answer in await ask("base", {})}
        if len(told) != 1 or self._again or self._deltas >= self._full_every - 1:
            return None
        version, digest = told.pop()
        folder = version_folder(order.folder, version)
        if not 0 <= version < order.version or not folder.is_dir():
            return None
        there = await asyncio.to_thread(read_manifest, folder)
        if there is None or there.digest != digest:  # published anew by a core that was set back
            return None
        return BaseRef(version, digest, folder.name)

    async def _difference(self, order: Order, base: BaseRef, ask: Ask) -> tuple[Manifest, int]:
        async with _draft(version_folder(order.folder, order.version)) as draft:
            async with self._whole(order, ask) as whole:
                values = {"folder": str(whole), "draft": str(draft), "version": order.version}
                answers = await ask("differ", values)
            manifest = await asyncio.to_thread(
                finish_version, draft, len(answers), version=order.version, kind="delta", base=base,
                extras=order.extras,
            )  # fmt: skip
        await ask("advance", {"version": order.version, "digest": manifest.digest})
        self._deltas += 1
        self._again = sum(manifest.files.values()) > self._worth * manifest.full_bytes
        return manifest, sum(int(answer["changed"]) for answer in answers)

    @asynccontextmanager
    async def _whole(self, order: Order, ask: Ask) -> AsyncIterator[Path]:
        """A folder with whole weights that are looked at once: in memory if they fit there, else on disk."""
        made = await asyncio.to_thread(self._scratch, order)
        try:
            try:
                await self._fill(order, made, ask)
            except OSError:
                if made.parent == order.folder:
                    raise
                self._cramped = True
                await asyncio.to_thread(_clear, made)  # before the disk is tried: others need the memory
                made = await asyncio.to_thread(self._scratch, order)
                await self._fill(order, made, ask)
            yield made
        finally:
            await asyncio.to_thread(_clear, made)

    def _scratch(self, order: Order) -> Path:
        """An empty folder for whole weights."""
        made = self._scratch_root(order.folder) / f".whole-{order.version}"
        _clear(made)
        made.mkdir(parents=True)
        return made

    def _scratch_root(self, folder: Path) -> Path:
        """In memory where there is a file system for that with any room, else the run's folder."""
        if self._cramped:
            return folder
        try:
            return self._root(folder)
        except (IncompleteError, OSError):
            return folder

    def close(self) -> None:
        """End: the version published last, if it lies in shared memory, goes to disk as `folder`/v<N>; the memory is
        given back."""
        memory, self._memory = self._memory, None
        last, self._last = self._last, None
        if memory is None or self._folder is None:
            return
        if self.kind is Kind.SHM:
            settle(self._folder, memory, last)
        else:
            remove(memory)


@asynccontextmanager
async def _draft(target: Path, *, durable: bool = True) -> AsyncIterator[Path]:
    """`new_folder`, for an event loop."""
    draft = new_folder(target, durable=durable)
    made = await asyncio.to_thread(draft.__enter__)
    try:
        yield made
    except BaseException as error:
        await asyncio.to_thread(draft.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(draft.__exit__, None, None, None)


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _part(draft: Path, files: Sequence[str], digests: Mapping[str, str]) -> Part:
    """What all ranks together wrote."""
    found, sizes = read_headers(draft, files, f"finishing {draft}")
    stored = {name: replace(entry, digest=digests[name]) for name, entry in found.items()}
    tensors = {name: TensorEntry(entry.dtype, entry.shape, entry.digest) for name, entry in stored.items()}
    return Part(tensors, stored, sizes)
