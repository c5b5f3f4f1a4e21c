"""Putting a version into tensors that exist: an engine's or a satellite's, in place.

Invariants: everything that can be refused is refused before the first byte is written (unless `Verify.DURING` is asked
for); a delta goes only onto the version it is against; a target keeps its storage. Targets are torch tensors of any
device, numpy arrays or HostTensors. Not here: making the tensors, or an engine's fused layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from gyre_weights.arrays import DTYPE_BYTES, Bytes, HostTensor, host_tensor, is_torch, torch_code
from gyre_weights.delta_code import Patch
from gyre_weights.digest import CHUNK, Digest, digest_bytes, digest_torch
from gyre_weights.errors import MismatchError, VersionError
from gyre_weights.parallel import each
from gyre_weights.version import Published, Version, check_base, open_version


class Verify(StrEnum):
    """When bytes are compared with their digests."""

    BEFORE = "before"
    """All that is at rest, before a target is touched: a damaged version changes nothing."""
    DURING = "during"
    """Each tensor while it is copied: one pass over memory; after an error the targets are of no version."""
    AFTER = "after"
    """As BEFORE, and the targets themselves at the end (needs equal dtypes)."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Held:
    """What a set of targets holds: what a delta is checked against."""

    version: int
    digest: str


def apply(
    source: Version | Published | str | Path,
    targets: Mapping[str, Any],
    *,
    held: Held | None = None,
    verify: Verify | str = Verify.BEFORE,
    cast: bool = False,
    optional: Collection[str] = (),
) -> Held:
    """Write a version into `targets` by name and return what they hold now.

    A delta needs `held` to be its base (VersionError otherwise; see `catch_up`). MismatchError when a tensor is missing
    on either side (but for `optional` names, e.g. a tied head), or of another shape, or of another dtype without
    `cast`. CorruptError as `verify` says.
    """
    version = source if isinstance(source, Version) else open_version(source)
    verify = Verify(verify)
    doing = f"applying policy version {version.version} from {version.folder}"
    names = _check_targets(version, targets, cast, optional, doing)
    if version.manifest.base is not None:
        if held is None:
            raise VersionError(
                doing, got="a delta", expected="a full version, as it is not known what the targets hold",
                fix="Give `held`, or use catch_up.",
            )  # fmt: skip
        check_base(doing, version.manifest.base, held.version, held.digest)
    if verify in (Verify.BEFORE, Verify.AFTER) or (version.is_delta and verify is Verify.DURING):
        version.verify()
    if version.is_delta:
        patches = [(name, version.patch(name)) for name in names if name in version.changed]
        for name, change in patches:
            write_patch(targets[name], change)
    else:
        _write_all(version, {name: targets[name] for name in names}, verify=verify)
    if verify is Verify.AFTER:
        for name in names:
            version.verify_tensor(name, _digest(targets[name]))
    return Held(version.version, version.digest)


def catch_up(
    source: Version | Published | str | Path,
    targets: Mapping[str, Any],
    *,
    held: Held | None = None,
    verify: Verify | str = Verify.BEFORE,
    cast: bool = False,
    optional: Collection[str] = (),
) -> Held:
    """As `apply`, from whatever the targets hold: the deltas between, or a full version and the deltas after it."""
    newest = source if isinstance(source, Version) else open_version(source)
    steps = list(_steps(newest, held))
    for version in steps:
        if verify in (Verify.BEFORE, Verify.AFTER):
            version.verify()
    once = Verify.NONE if verify == Verify.BEFORE else verify
    for version in steps:
        held = apply(version, targets, held=held, verify=once, cast=cast, optional=optional)
    assert held is not None
    return held


def _steps(newest: Version, held: Held | None) -> Iterator[Version]:
    """What to apply, oldest first. Nothing when the targets hold the newest already."""
    steps: list[Version] = []
    at = newest
    while held is None or not held.digest or (at.version, at.digest) != (held.version, held.digest):
        steps.append(at)
        if not at.is_delta:
            break
        at = at.open_base()
    yield from reversed(steps)


def _check_targets(
    version: Version, targets: Mapping[str, Any], cast: bool, optional: Collection[str], doing: str
) -> list[str]:
    """The names to write; MismatchError says what does not fit."""
    published = version.manifest.tensors
    missing = sorted(name for name in targets if name not in published and name not in optional)
    extra = sorted(name for name in published if name not in targets and name not in optional)
    if missing or extra:
        got = [f"no {', '.join(missing[:3])} ({len(missing)} missing)"] if missing else []
        got += [f"{', '.join(extra[:3])} that no target has ({len(extra)} too many)"] if extra else []
        raise MismatchError(doing, got=" and ".join(got), expected="the targets' tensors")
    names = [name for name in published if name in targets]
    for name in names:
        entry, (code, shape) = published[name], _form(name, targets[name])
        if shape != entry.shape:
            raise MismatchError(doing, got=f"{name} of shape {list(entry.shape)}", expected=f"{list(shape)}")
        if code != entry.dtype and not cast:
            raise MismatchError(
                doing, got=f"{name} in {entry.dtype}", expected=code, fix="Publish in that dtype, or allow `cast`."
            )
        if version.is_delta and not _contiguous(targets[name]):
            raise MismatchError(doing, got=f"a target {name} that is not contiguous", expected="one that is")
    return names


def _form(name: str, target: Any) -> tuple[str, tuple[int, ...]]:
    if isinstance(target, HostTensor):
        return target.dtype, target.shape
    if is_torch(target):
        return torch_code(name, target.dtype), tuple(target.shape)
    return host_tensor(name, target[:0] if target.ndim else target).dtype, target.shape


def _contiguous(target: Any) -> bool:
    if isinstance(target, HostTensor):
        return True
    return bool(target.is_contiguous() if is_torch(target) else target.flags.c_contiguous)


def _bytes_of(target: Any, dtype: str) -> Bytes | None:
    """The target's memory as flat bytes when it can be written so: host memory, contiguous, of `dtype`."""
    if isinstance(target, HostTensor):
        return target.data if target.dtype == dtype else None
    if not _contiguous(target) or _form("target", target)[0] != dtype:
        return None
    if not is_torch(target):
        flat: Bytes = target.reshape(-1).view(np.uint8)
        return flat
    if target.device.type != "cpu":
        return None
    import torch

    raw: Bytes = target.detach().reshape(-1).view(torch.uint8).numpy()
    return raw


def _write_all(version: Version, targets: Mapping[str, Any], *, verify: Verify) -> None:
    """A full version into its targets: host memory by several threads, devices in turn."""
    check = verify is Verify.DURING
    sources = {name: version[name] for name in targets}  # opens the files, in one thread
    memory = {name: _bytes_of(target, sources[name].dtype) for name, target in targets.items()}
    host = [(name, found) for name, found in memory.items() if found is not None]
    each(lambda told: _into_host(version, *told, check=check), host, lambda told: told[1].nbytes)
    for name, target in targets.items():
        if memory[name] is None:
            _into_other(version, sources[name], name, target, check=check)


def _into_host(version: Version, name: str, memory: Bytes, *, check: bool) -> None:
    if not check:
        version.read_into(name, memory, 0)
        return
    digest = Digest()
    for start in range(0, memory.nbytes, CHUNK):
        piece = memory[start : start + CHUNK]
        version.read_into(name, piece, start)
        digest.add(piece)
    version.verify_tensor(name, digest.hex())


def _into_other(version: Version, source: HostTensor, name: str, target: Any, *, check: bool) -> None:
    """On a device, in another dtype, or not contiguous."""
    if check:
        version.verify_tensor(name, digest_bytes(source.data))
    if is_torch(target):
        target.detach().copy_(source.torch())
    else:
        np.copyto(target, source.numpy(), casting="unsafe")


def write_patch(target: Any, change: Patch) -> None:
    """Write changed elements into a contiguous target of as many elements, in its own dtype."""
    memory = _bytes_of(target, change.dtype)
    if memory is not None:
        memory.view(f"u{DTYPE_BYTES[change.dtype]}")[change.positions] = change.bits
    elif is_torch(target):
        import torch

        flat = target.detach().view(-1)
        values = change.values().torch().to(device=flat.device, dtype=flat.dtype)
        if flat.element_size() == 1:
            flat, values = flat.view(torch.uint8), values.view(torch.uint8)
        flat.index_copy_(0, torch.from_numpy(change.positions).to(flat.device), values)
    else:
        target.reshape(-1)[change.positions] = change.values().numpy()


def _digest(target: Any) -> str:
    return digest_torch(target) if is_torch(target) else digest_bytes(host_tensor("target", target).data)
