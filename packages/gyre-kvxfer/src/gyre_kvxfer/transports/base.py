"""What a transport is.

The destination reads: it names runs of the source's regions and runs of its own, two cuttings of one stream of bytes,
and the transport fills the second from the first. Whether the bytes were still valid is not the transport's business;
leases and digests say that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

from gyre_kvxfer.digest import U64
from gyre_kvxfer.engine import Region
from gyre_kvxfer.errors import ProtocolError, TransportError, explain
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.plan import Runs


class Reader(Protocol):
    """The destination's end of a transport to one source."""

    @property
    def name(self) -> str:
        """Name of the transport."""
        ...

    async def read(self, move: str, remote: Runs, local: Runs, into: Sequence[Region]) -> None:
        """Fill `local` runs of regions `into` from `remote` runs of the source's regions. Raises `TransportError`."""
        ...

    def stop(self) -> None:
        """Make running and later reads end soon, with `TransportError`, whatever the source does."""
        ...

    async def close(self) -> None:
        """Let go of connections and registrations."""
        ...


@runtime_checkable
class SummingReader(Reader, Protocol):
    """A reader that can take `fast` digests while the bytes it read are still in the cache."""

    @property
    def can_sum(self) -> bool:
        """Whether it can on this machine."""
        ...

    async def read_summed(self, move: str, remote: Runs, local: Runs, into: Sequence[Region], blocks: int) -> U64:
        """Like `read`, the runs being pairs: run i is the piece i // blocks of block i % blocks of a form.

        Returns uint64[runs]: what each adds to its block's digest (`digest.fast_part`). Pieces must be `native.whole`.
        """
        ...


@runtime_checkable
class LingeringReader(Reader, Protocol):
    """A reader whose reads cannot always be taken back: what has been begun may write after `read` has raised."""

    @property
    def still_writing(self) -> bool:
        """Whether a read that has ended may still write: its blocks (and staging) are then kept out of use."""
        ...


class Exporter(Protocol):
    """The source's end: makes regions readable and says how (`meta`)."""

    @property
    def name(self) -> str:
        """Name of the transport."""
        ...

    def meta(self) -> str:
        """JSON that a reader on the other side needs, no secrets in it."""
        ...

    def close(self) -> None:
        """Stop offering."""
        ...


@dataclass(frozen=True, slots=True)
class Transport:
    """A transport from outside this package: its name and how each side begins.

    `export(regions)` at the source; `open(meta, source regions, own regions)` at the destination, in a thread,
    raising `TransportError` if it cannot be used. Give it to `MigrationServer` and `migrate` as `extra`; it is tried
    first.
    """

    name: str
    export: Callable[[Sequence[Region]], Exporter]
    open: Callable[[str, Sequence[Region], Sequence[Region]], Reader]


@dataclass(frozen=True, slots=True)
class Access:
    """How a source's pool can be reached: its layout (rank 0's), its regions in rank order, each transport's meta."""

    layout: KVLayout
    regions: tuple[Region, ...]
    transports: dict[str, str]

    def dumps(self) -> str:
        """As JSON."""
        regions = [list(asdict(r).values()) for r in self.regions]
        return json.dumps({"layout": self.layout.to_dict(), "regions": regions, "transports": self.transports})

    @classmethod
    def loads(cls, text: str) -> Access:
        """From JSON. Raises `ProtocolError`, `LayoutRefused`."""
        try:
            data = json.loads(text)
            regions = tuple(Region(int(a), int(n), str(d), int(r)) for a, n, d, r in data["regions"])
            transports = {str(k): str(v) for k, v in data["transports"].items()}
            return cls(KVLayout.from_dict(data["layout"]), regions, transports)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise ProtocolError(
                explain("reading an offer's access", err, "layout, regions, transports", "Abort.")
            ) from err


def boot_id() -> str:
    """Names this boot of this machine: equal on both sides means one kernel. Empty where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except OSError:
        return ""


def random_cookie() -> bytes:
    """16 bytes that prove a reader reached the very process or file that was offered."""
    return os.urandom(16)


def stopped(flag: bool) -> None:
    """Raise `TransportError` if a reader was told to stop."""
    if flag:
        raise TransportError(explain("reading from the source", "a stop", "to go on", "The move has ended."))
