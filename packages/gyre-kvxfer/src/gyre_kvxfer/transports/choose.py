"""Which transport: probe in order of cost, take the first that works, remember why the others did not.

Order: `process_vm` (one copy, one kernel) → `nixl` where there is device memory or an RDMA device → `shm` (two
copies, one kernel) → `tcp` (anywhere) → `nixl` over whatever UCX finds. An explicit name is tried alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre_kvxfer.engine import Region
from gyre_kvxfer.errors import KVError, TransportError, explain
from gyre_kvxfer.transports import nixl
from gyre_kvxfer.transports.base import Access, Reader, Transport, boot_id
from gyre_kvxfer.transports.bulk import BulkReader
from gyre_kvxfer.transports.process_vm import ProcessVmReader

NAMES = ("process_vm", "nixl", "shm", "tcp")


@dataclass(frozen=True, slots=True)
class Choice:
    """The reader taken and, for each transport looked at, why it was or was not taken."""

    reader: Reader
    reasons: dict[str, str]


def has_rdma() -> bool:
    """Whether the kernel shows an RDMA device."""
    where = Path("/sys/class/infiniband")
    return where.is_dir() and any(where.iterdir())


def order(access: Access, into: Sequence[Region]) -> list[str]:
    """Names to try, best first, from what is offered and what memory is on the two sides."""
    device = any(r.device != "cpu" for r in (*access.regions, *into))
    if device:
        names = ["nixl"]
    elif has_rdma() and nixl.flavour():
        names = ["process_vm", "nixl", "shm", "tcp"]
    else:
        names = ["process_vm", "shm", "tcp", "nixl"]
    return [n for n in names if n in access.transports]


async def choose(
    access: Access,
    address: str,
    key: bytes,
    into: Sequence[Region],
    wanted: str = "auto",
    extra: Sequence[Transport] = (),
) -> Choice:
    """A working reader; `extra` transports are tried first. Raises `TransportError` with every reason if none
    works.
    """
    known = {t.name: t for t in extra}
    if wanted != "auto" and wanted not in (*known, *NAMES):
        raise TransportError(
            explain("choosing a transport", repr(wanted), ("auto", *known, *NAMES), "Correct the name.")
        )
    first = [n for n in known if n in access.transports]
    names = [*first, *order(access, into)] if wanted == "auto" else [wanted]
    reasons: dict[str, str] = {}
    for name in names:
        try:
            reader = await _open(name, access, address, key, into, known.get(name))
        except (KVError, OSError, KeyError, ValueError) as err:
            reasons[name] = str(err)
            continue
        reasons[name] = "taken"
        return Choice(reader, reasons)
    raise TransportError(
        explain("choosing a transport", reasons or "nothing offered", "one that works", "See the reasons.")
    )


async def _open(
    name: str, access: Access, address: str, key: bytes, into: Sequence[Region], other: Transport | None
) -> Reader:
    meta = access.transports.get(name)
    if meta is None:
        raise TransportError(explain(f"opening {name}", "not offered by the source", name, "Enable it there."))
    if other is not None:
        return await asyncio.to_thread(other.open, meta, access.regions, into)
    if name == "process_vm":
        return ProcessVmReader.probe(meta, access.regions)
    if name == "nixl":
        return await asyncio.to_thread(nixl.NixlReader.open, meta, access.regions, into)
    if name == "shm" and json.loads(meta)["boot"] != boot_id():
        raise TransportError(explain("opening shm", "another machine", "this one", "Use tcp."))
    return await asyncio.to_thread(BulkReader.open, name, address, key, access.regions)
