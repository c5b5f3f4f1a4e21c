"""Publishing a version at rest: full, on disk or in shared memory, or as a delta.

One process streams its tensors through `publish_full` or `publish_delta`; a trainer of several processes lets each
write its own part into one draft (`write_part`) and one of them finish it (`finish_version`), with a barrier of its own
between. Invariants: the folder appears whole or not at all; no process holds more than the tensor it is writing (a
delta also holds its base, see `Shadow`). Not here: who is told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gyre_weights.arrays import Named, named_host_tensors
from gyre_weights.delta_code import Patch, difference, encode
from gyre_weights.errors import IncompleteError, MismatchError
from gyre_weights.folder import Extras, drop_old, flush, new_folder, version_folder, write_extras
from gyre_weights.manifest import MANIFEST, BaseRef, Manifest, StoredEntry, TensorEntry, identity, to_json
from gyre_weights.shadow import Shadow
from gyre_weights.shards import ShardWriter
from gyre_weights.spares import Spares
from gyre_weights.version import INDEX, PART, Published

SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """What one process wrote into a draft."""

    tensors: dict[str, TensorEntry]
    stored: dict[str, StoredEntry]
    files: dict[str, int]
    changed: int = 0


def publish_full(
    root: str | Path,
    version: int,
    tensors: Named,
    *,
    kind: str = "disk",
    keep: int = 3,
    extras: Extras | None = None,
    spare: Iterable[str | Path] = (),
    shard_bytes: int = SHARD_BYTES,
) -> Published:
    """Write `root`/v<version> from a stream of tensors and drop versions beyond the newest `keep`, and
    those above it, which are of a run that was set back.

    `kind` "disk" forces everything to disk before the folder gets its name; "shm" is for a root in shared memory and
    does not, and writes over the memory of the version that was dropped last (`gyre_weights.spares`). `spare` are
    folders never dropped. OSError when the medium is full; nothing is left behind then.
    """
    spares = Spares(Path(root)) if kind == "shm" else None

    def write(draft: Path) -> Part:
        return write_part(
            draft, 0, tensors, version=version, durable=kind == "disk", shard_bytes=shard_bytes, spares=spares
        )

    return _publish(root, version, kind, keep, extras or {}, spare, None, write, spares=spares)


def publish_delta(
    root: str | Path,
    version: int,
    tensors: Named,
    shadow: Shadow,
    *,
    keep: int = 3,
    extras: Extras | None = None,
    spare: Iterable[str | Path] = (),
    durable: bool = True,
) -> Published:
    """Write `root`/v<version> as the difference to `shadow`, the version published before, which must lie under the
    same root; `shadow` then holds this version. MismatchError when names, shapes or dtypes differ from the base's."""
    patches: list[tuple[str, Patch]] = []
    base = BaseRef(shadow.version, shadow.digest, version_folder("", shadow.version).name)
    published = _publish(
        root, version, "delta", keep, extras or {}, spare, base,
        lambda draft: write_delta_part(draft, 0, tensors, shadow, patches, version=version, durable=durable),
        durable=durable,
    )  # fmt: skip
    shadow.advance(patches, version, published.digest)
    return published


def _publish(
    root: str | Path,
    version: int,
    kind: str,
    keep: int,
    extras: Extras,
    spare: Iterable[str | Path],
    base: BaseRef | None,
    write: Callable[[Path], Part],
    *,
    durable: bool | None = None,
    spares: Spares | None = None,
) -> Published:
    started = time.perf_counter()
    durable = kind == "disk" if durable is None else durable
    target = version_folder(root, version)
    with new_folder(target, durable=durable) as draft:
        part = write(draft)
        manifest = finish_version(draft, [part], version=version, kind=kind, base=base, extras=extras, durable=durable)
    drop_old(root, keep, [*spare, target], spares, newest=version)
    return Published(
        version, str(target), kind, sum(manifest.files.values()), time.perf_counter() - started, manifest.digest,
        None if base is None else base.version, None if base is None else part.changed,
    )  # fmt: skip


def write_part(
    draft: Path,
    part: int,
    tensors: Named,
    *,
    version: int,
    durable: bool = True,
    shard_bytes: int = SHARD_BYTES,
    spares: Spares | None = None,
) -> Part:
    """Write this process's tensors into the draft folder, over shards of `spares` where there are; returns, and leaves
    in the draft, what was written."""
    entries: dict[str, TensorEntry] = {}
    stem = f"part-{part:05d}"
    with ShardWriter(draft, stem, version=version, shard_bytes=shard_bytes, flush=durable, spares=spares) as writer:
        for name, tensor in named_host_tensors(tensors):
            stored = writer.add(name, tensor)
            entries[name] = TensorEntry(tensor.dtype, tensor.shape, stored.digest)
    return _leave_receipt(draft, part, Part(entries, writer.stored, writer.files))


def write_delta_part(
    draft: Path,
    part: int,
    tensors: Named,
    shadow: Shadow,
    patches: list[tuple[str, Patch]],
    *,
    version: int,
    durable: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Part:
    """As `write_part`, but what differs from `shadow` only. The patches are appended to `patches`: give them to
    `shadow.advance` when the version has its name."""
    entries: dict[str, TensorEntry] = {}
    changed = 0
    with ShardWriter(draft, f"part-{part:05d}", version=version, shard_bytes=shard_bytes, flush=durable) as writer:
        for name, tensor in named_host_tensors(tensors):
            base = shadow.take(name, tensor)
            change, digest = difference(base, tensor)
            entries[name] = TensorEntry(tensor.dtype, tensor.shape, digest)
            coded = encode(tensor, change)
            for key, piece in coded.parts.items():
                writer.add(name + PART + key, piece)
            if len(change.positions):
                changed += len(change.positions)
                patches.append((name, change))
    missing = sorted(set(shadow) - set(entries))
    if missing:
        raise MismatchError(
            f"publishing policy version {version} as a delta", got=f"no {missing[0]} and {len(missing) - 1} others",
            expected=f"every tensor of version {shadow.version}",
        )  # fmt: skip
    return _leave_receipt(draft, part, Part(entries, writer.stored, writer.files, changed))


def finish_version(
    draft: Path,
    parts: int | list[Part],
    *,
    version: int,
    kind: str,
    base: BaseRef | None = None,
    extras: Extras | None = None,
    durable: bool = True,
) -> Manifest:
    """Make the draft whole: shards under Hugging Face's names with their index, small files, manifest last. `parts` is
    how many processes wrote (their receipts are read from the draft) or what they returned. Rename the draft then, or
    use `new_folder`, which does. MismatchError when two parts hold one name; IncompleteError when one is missing."""
    found = [_read_receipt(draft, part) for part in range(parts)] if isinstance(parts, int) else parts
    tensors: dict[str, TensorEntry] = {}
    stored: dict[str, StoredEntry] = {}
    files: dict[str, int] = {}
    for part in found:
        twice = set(tensors) & set(part.tensors)
        if twice:
            raise MismatchError(
                f"finishing policy version {version}", got=f"{min(twice)} from two processes",
                expected="one writer for each tensor",
            )  # fmt: skip
        tensors |= part.tensors
        stored |= part.stored
        files |= part.files
    names = _final_names(sorted(files), "model" if base is None else "delta")
    for old, new in names.items():
        (draft / old).rename(draft / new)
    stored = {name: replace(entry, file=names[entry.file]) for name, entry in stored.items()}
    files = {names[file]: size for file, size in files.items()}
    if base is None and len(files) > 1:
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in stored.values())},
            "weight_map": {name: entry.file for name, entry in stored.items()},
        }
        (draft / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    write_extras(draft, extras or {}, durable=durable)
    for receipt in draft.glob(".part-*.json"):
        receipt.unlink()
    manifest = Manifest(version, kind, tensors, stored, files, base, identity(tensors))
    (draft / MANIFEST).write_text(to_json(manifest), encoding="utf-8")
    if durable:
        flush(draft / MANIFEST)
    return manifest


def _final_names(files: list[str], stem: str) -> dict[str, str]:
    if len(files) == 1:
        return {files[0]: f"{stem}.safetensors"}
    return {file: f"{stem}-{i:05d}-of-{len(files):05d}.safetensors" for i, file in enumerate(files, 1)}


def _leave_receipt(draft: Path, part: int, wrote: Part) -> Part:
    data = {
        "tensors": {name: asdict(entry) for name, entry in wrote.tensors.items()},
        "stored": {name: asdict(entry) for name, entry in wrote.stored.items()},
        "files": wrote.files,
        "changed": wrote.changed,
    }
    partial = draft / f".part-{part:05d}.tmp"
    partial.write_text(json.dumps(data), encoding="utf-8")
    partial.rename(draft / f".part-{part:05d}.json")
    return wrote


def _read_receipt(draft: Path, part: int) -> Part:
    try:
        data = json.loads((draft / f".part-{part:05d}.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise IncompleteError(
            f"finishing {draft}", got=f"no receipt of part {part}", expected="one from each writer",
            fix="Wait for all writers (a barrier) before finishing.",
        ) from error  # fmt: skip
    return Part(
        {n: TensorEntry(e["dtype"], tuple(e["shape"]), e["digest"]) for n, e in data["tensors"].items()},
        {n: StoredEntry(**(e | {"shape": tuple(e["shape"])})) for n, e in data["stored"].items()},
        data["files"],
        data["changed"],
    )
