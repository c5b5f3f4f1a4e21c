"""Publication by a group: the trainer broadcasts, receivers write into place.

The plan (names, dtypes, shapes, digests) goes first, so that a receiver refuses before a byte of weights moves; then
the tensors in flat buckets. Invariants: no receiver holds more than a bucket beside its targets; a member that dies or
hangs ends the publication for all by the group's time-out, and the targets are then of no version: load them again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gyre_weights.apply import Held
from gyre_weights.arrays import DTYPE_BYTES, HostTensor, Named, named_host_tensors, torch_dtype
from gyre_weights.digest import digest_bytes, digest_torch
from gyre_weights.errors import CorruptError, MismatchError, PeerError
from gyre_weights.groups import Group
from gyre_weights.manifest import TensorEntry, identity
from gyre_weights.version import Published

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be sent, in this order."""

    version: int
    tensors: Mapping[str, TensorEntry]

    def buckets(self, bucket_bytes: int) -> Iterator[list[str]]:
        """Names in groups of at most `bucket_bytes`, one tensor at least; of one group all are sent together."""
        names: list[str] = []
        size = 0
        for name, entry in self.tensors.items():
            if names and size + entry.nbytes > bucket_bytes:
                yield names
                names, size = [], 0
            names.append(name)
            size += entry.nbytes
        if names:
            yield names


def broadcast_version(
    group: Group, version: int, tensors: Named, *, bucket_bytes: int = BUCKET_BYTES, device: str = "cpu"
) -> Published:
    """Trainer's side (the group's member 0): send `tensors` as `version` to all others. `tensors` should be a mapping
    that can be gone through twice (for the plan and for the data); a stream is taken into memory. PeerError when a
    member refuses, dies or hangs."""
    import torch

    started = time.perf_counter()
    source = tensors if isinstance(tensors, Mapping) else dict(named_host_tensors(tensors))
    plan = Plan(version, {name: _entry(name, value) for name, value in source.items()})
    _send_object(group, {"version": version, "bucket": bucket_bytes, "tensors": _plain(plan)}, device)
    _all_agree(group, "", device)
    sent = 0
    for names in plan.buckets(bucket_bytes):
        bucket = torch.cat([_flat(source[name], device) for name in names])
        group.broadcast(bucket, 0)
        sent += bucket.numel()
    _all_agree(group, "", device)
    seconds = time.perf_counter() - started
    return Published(version, "", "collective", sent, seconds, identity(plan.tensors))


def receive_version(
    group: Group,
    targets: Mapping[str, Any],
    *,
    cast: bool = False,
    optional: Collection[str] = (),
    verify: bool = True,
    device: str = "cpu",
) -> Held:
    """Engine's side: write what member 0 sends into `targets` (torch tensors). MismatchError, told to the sender too,
    before any weight moves; CorruptError when a digest differs at the end."""
    wrong: list[str] = []

    def write(name: str, value: Any) -> None:
        if name in targets:
            targets[name].detach().copy_(value)

    def check(plan: Plan) -> str:
        return _misfit(plan, targets, cast, optional)

    held = receive_tensors(group, write, check=check, verify=verify, device=device, wrong=wrong)
    if wrong:
        raise CorruptError(
            f"receiving policy version {held.version}", got=f"other bytes in {wrong[0]}", expected="equal"
        )
    return held


def receive_tensors(
    group: Group,
    write: Callable[[str, Any], None],
    *,
    check: Callable[[Plan], str] = lambda plan: "",
    verify: bool = True,
    device: str = "cpu",
    wrong: list[str] | None = None,
) -> Held:
    """As `receive_version` for an engine with a layout of its own: `write(name, tensor)` for each, the tensor valid
    during the call only; `check(plan)` says why not to go on, or nothing."""
    import torch

    data = _receive_object(group, device)
    plan = Plan(int(data["version"]), {n: TensorEntry(d, tuple(s), g) for n, (d, s, g) in data["tensors"].items()})
    reason = check(plan)
    _all_agree(group, reason, device)
    bad: list[str] = []
    for names in plan.buckets(int(data["bucket"])):
        bucket = torch.empty(sum(plan.tensors[name].nbytes for name in names), dtype=torch.uint8, device=device)
        group.broadcast(bucket, 0)
        at = 0
        for name in names:
            entry = plan.tensors[name]
            raw = bucket[at : at + entry.nbytes]
            at += entry.nbytes
            if verify and digest_torch(raw) != entry.digest:
                bad.append(name)
            write(name, _shaped(raw, entry))
    if wrong is not None:
        wrong.extend(bad)
    _all_agree(group, f"other bytes than sent in {bad[0]}" if bad else "", device)
    return Held(plan.version, identity(plan.tensors))


def _shaped(raw: Any, entry: TensorEntry) -> Any:
    import torch

    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=raw.device)
    if raw.data_ptr() % DTYPE_BYTES[entry.dtype]:
        raw = raw.clone()
    return raw.view(torch_dtype(entry.dtype)).reshape(entry.shape)


def _entry(name: str, value: Any) -> TensorEntry:
    [(_, tensor)] = list(named_host_tensors([(name, value)])) if not hasattr(value, "data_ptr") else [(name, None)]
    if tensor is None:
        from gyre_weights.arrays import torch_code

        return TensorEntry(torch_code(name, value.dtype), tuple(value.shape), digest_torch(value))
    return TensorEntry(tensor.dtype, tensor.shape, digest_bytes(tensor.data))


def _flat(value: Any, device: str) -> Any:
    import torch

    if hasattr(value, "data_ptr"):
        return value.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
    tensor: HostTensor = next(named_host_tensors([("tensor", value)]))[1]
    return torch.from_numpy(tensor.data).to(device)


def _plain(plan: Plan) -> dict[str, list[Any]]:
    return {name: [e.dtype, list(e.shape), e.digest] for name, e in plan.tensors.items()}


def _misfit(plan: Plan, targets: Mapping[str, Any], cast: bool, optional: Collection[str]) -> str:
    for name in (*plan.tensors, *targets):
        if name in optional and not (name in plan.tensors and name in targets):
            continue
        entry, target = plan.tensors.get(name), targets.get(name)
        if entry is None or target is None:
            return f"{name} that {'is not sent' if entry is None else 'no target has'}"
        if tuple(target.shape) != entry.shape:
            return f"{name} of shape {list(entry.shape)}, expected {list(target.shape)}"
        if not cast and torch_dtype(entry.dtype) != target.dtype:
            return f"{name} in {entry.dtype}, expected {target.dtype}"
    return ""


def _send_object(group: Group, value: dict[str, Any], device: str) -> None:
    import torch

    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    group.broadcast(torch.tensor([data.numel()], dtype=torch.int64, device=device), 0)
    group.broadcast(data, 0)


def _receive_object(group: Group, device: str) -> dict[str, Any]:
    import torch

    size = torch.zeros(1, dtype=torch.int64, device=device)
    group.broadcast(size, 0)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    group.broadcast(data, 0)
    found: dict[str, Any] = json.loads(bytes(data.cpu().numpy()))
    return found


def _all_agree(group: Group, reason: str, device: str) -> None:
    """Each member says whether it can go on; MismatchError for the one that cannot, PeerError for the others."""
    import torch

    reasons = []
    for member in range(group.size):
        size = torch.tensor([len(reason.encode()) if member == group.rank else 0], dtype=torch.int64, device=device)
        group.broadcast(size, member)
        if int(size):
            text = torch.zeros(int(size), dtype=torch.uint8, device=device)
            if member == group.rank:
                text.copy_(torch.frombuffer(bytearray(reason.encode()), dtype=torch.uint8))
            group.broadcast(text, member)
            reasons.append(f"member {member}: {bytes(text.cpu().numpy()).decode()}")
    if reason:
        raise MismatchError("taking weights from a group", got=reason, expected="the targets' tensors")
    if reasons:
        raise PeerError("sending weights to a group", got="; ".join(reasons), expected="members that fit")
