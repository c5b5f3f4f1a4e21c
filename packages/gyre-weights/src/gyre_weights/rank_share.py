"""A rank's part in publishing a version that several ranks fill in place, and in taking one.

Each rank has a share of the tensors, by size and name, and does for them what reads every byte: digests, comparing,
differences. Invariant: the shares of all ranks are all tensors, each once, whoever filled them; a rank that is asked
for a delta answers only for the base it holds. A delta costs its share of the model in host memory (`Shadow`). Not
here: filling and loading shards, which are the trainer's; the order of the commands (`ranks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gyre_weights.arrays import HostTensor
from gyre_weights.delta_code import Patch
from gyre_weights.errors import CorruptError, VersionError, WeightsError
from gyre_weights.publish import write_delta_part
from gyre_weights.shadow import Shadow
from gyre_weights.version import Version, open_version


class RankShare:
    """One rank's share; `commands` are what `gyre_weights.ranks` asks for."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._shadow: Shadow | None = None
        self._patches: list[tuple[str, Patch]] = []
        self._compared: tuple[str, Version] | None = None
        """Location and version that were compared last: what is loaded next from there."""

    @property
    def refusals(self) -> type[Exception]:
        """Its errors about a version that cannot be used."""
        return WeightsError

    def commands(self) -> Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
        """By name."""
        return {
            "digest": self.digest, "compare": self.compare, "base": self.base, "shadow": self.shadow,
            "differ": self.differ, "advance": self.advance,
        }  # fmt: skip

    def open(self, location: str) -> Mapping[str, Any]:
        """The tensors of a version, or of a Hugging Face folder, in torch; a delta's are patched copies. After
        `compare` of the same location they are of what was compared, whatever lies there now. All of it is held before
        the first is read: a version that is dropped meanwhile does not end half loaded."""
        compared, self._compared = self._compared, None
        if compared is not None and compared[0] == location:
            return AsTorch(compared[1])
        version = open_version(location)
        version.hold()
        return AsTorch(version)

    def _mine(self, sizes: Mapping[str, int]) -> list[str]:
        return sorted(sizes, key=lambda name: (-sizes[name], name))[self._rank :: self._world]

    def _share(self, version: Version) -> Iterator[tuple[str, HostTensor]]:
        sizes = {name: entry.nbytes for name, entry in version.manifest.tensors.items()}
        return ((name, version[name]) for name in self._mine(sizes))

    def digest(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Digests of this share of the folder `folder`, which has no manifest yet."""
        version = open_version(args["folder"])
        stored = version.manifest.stored
        sizes = {name: entry.nbytes for name, entry in stored.items()}
        return {"digests": {name: version.digest_stored(stored[name]) for name in self._mine(sizes)}}

    def compare(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is wrong with this share of what is at rest of a version and all it rests on; empty when nothing is.
        What was compared stays open for the `open` that follows."""
        self._compared = None
        try:
            opened = open_version(args["folder"], version=args["version"], digest=args["digest"])
            opened.hold()
            self._verify(opened)
        except (CorruptError, VersionError) as error:
            return {"wrong": str(error)}
        self._compared = (args["folder"], opened)
        return {"wrong": ""}

    def _verify(self, newest: Version) -> None:
        version: Version | None = newest
        while version is not None:
            stored = version.manifest.stored
            for name in self._mine({name: entry.nbytes for name, entry in stored.items()}):
                version.verify_stored(name, stored[name])
            version = version.open_base() if version.is_delta else None

    def base(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Which version this rank's copy is of; -1: it has none."""
        shadow = self._shadow
        return {"version": -1, "digest": ""} if shadow is None else {"version": shadow.version, "digest": shadow.digest}

    def shadow(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Copy this share of a whole version, for the next delta."""
        version = open_version(args["folder"])
        self._shadow = None
        self._shadow = Shadow(version.version, version.digest, self._share(version))
        return {}

    def differ(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write into `draft` what differs in this share of `folder`, whole weights of `version`, from the copy."""
        if self._shadow is None:
            raise VersionError(
                f"publishing policy version {args['version']} as a delta", got="no copy of the version before",
                expected="one", fix="Publish a whole version.",
            )  # fmt: skip
        whole = open_version(args["folder"])
        self._patches = []
        part = write_delta_part(
            Path(args["draft"]), self._rank, self._share(whole), self._shadow, self._patches, version=args["version"]
        )
        return {"changed": part.changed}

    def advance(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """The delta has its name: the copy becomes that version."""
        if self._shadow is not None:
            self._shadow.advance(self._patches, args["version"], args["digest"])
        self._patches = []
        return {}


class AsTorch(Mapping[str, Any]):
    """An opened version as torch tensors."""

    def __init__(self, version: Version) -> None:
        self._version = version

    def __getitem__(self, name: str) -> Any:
        return self._version[name].torch()

    def __iter__(self) -> Iterator[str]:
        return iter(self._version)

    def __len__(self) -> int:
        return len(self._version)
