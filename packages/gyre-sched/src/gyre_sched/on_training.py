"""The ledger's events: micro-batches, leases, contributions, steps.

A contribution counts once: its lease must be open and held by the life of the cell that commits. The step is applied
once, when it is sealed, every micro-batch is done and the core cell is in TRAIN.
"""

from __future__ import annotations

from . import checks
from .commands import Alarm, ApplyStep, GrantLease, SealStep
from .errors import BadValueError, DuplicateCommitError, LateOutcomeError
from .events import ContributionCommitted, GroupBatched, LeaseFailed, StepApplied, WeightsPublished
from .ids import CellState
from .on_cells import sync_all
from .on_groups import admit, place, retire
from .records import Cell, Lease
from .world import World

__all__ = ["advance", "grant_all"]


def batched(w: World, ev: GroupBatched) -> None:
    """A group's micro-batches enter the ledger."""
    group = checks.group(w, ev, ev.group, "building")
    if not ev.counts and ev.batches:
        raise BadValueError(ev, "a group that does not count has no micro-batches; expected batches=()")
    seen: set[str] = set()
    for batch in ev.batches:
        checks.finite(w, ev, tokens=batch.tokens)
        if batch.id in w.ledger.batches or batch.id in seen:
            checks.refuse(DuplicateCommitError, w, ev, f"micro-batch {batch.id!r} is in the ledger", ev.group)
        seen.add(batch.id)
    w.dirty = True
    w.ledger.building -= 1
    if not ev.counts:
        w.note(group, "filtered out: its seat is free")
        retire(w, group, "dropped")
        place(w)
        return
    group.stage = "batched"
    count = w.ledger.add(group, ev.batches)
    w.note(group, "{} micro-batches, {} tokens", count, sum(b.tokens for b in ev.batches))


def committed(w: World, ev: ContributionCommitted) -> None:
    """A gradient is in the sum."""
    cell = checks.cell(w, ev, ev.cell)
    checks.finite(w, ev, seconds=ev.seconds)
    lease = checks.lease(w, ev, cell, ev.lease)
    if lease is None:
        problem = f"lease {ev.lease} is closed; its micro-batches were committed or went back"
        checks.refuse(DuplicateCommitError, w, ev, problem, str(ev.lease))
    ids = {line.batch.id for line in lease.batches}
    foreign = [b for b in ev.batches if b not in ids]
    if foreign or len(set(ev.batches)) != len(ev.batches):
        what = f"{foreign} are not in it" if foreign else "a micro-batch is named twice"
        checks.refuse(DuplicateCommitError, w, ev, f"lease {ev.lease} covers {sorted(ids)}; {what}", str(ev.lease))
    tokens = w.ledger.close(lease, frozenset(ev.batches))
    w.costs.trained(tokens, ev.seconds)
    w.note(lease, "{} of {} micro-batches committed by {}", len(ev.batches), len(ids), cell.id)
    _closed(w, cell, lease)


def lease_failed(w: World, ev: LeaseFailed) -> None:
    """Nothing of a lease was committed."""
    cell = checks.cell(w, ev, ev.cell)
    lease = checks.lease(w, ev, cell, ev.lease)
    if lease is None:
        checks.refuse(LateOutcomeError, w, ev, f"lease {ev.lease} is closed", str(ev.lease))
    w.ledger.close(lease, frozenset())
    if not lease.recalled:
        _count_failures(w, lease, ev.reason)
    w.note(lease, "returned whole by {}: {}", cell.id, ev.reason)
    w.note(cell, "lease {} failed: {}", lease.id, ev.reason)
    _closed(w, cell, lease)


def _count_failures(w: World, lease: Lease, reason: str) -> None:
    """Micro-batches that keep failing go behind the others and raise an alarm."""
    for line in lease.batches:
        line.failures += 1
        if line.failures > w.config.lease_retries:
            w.ledger.defer(line)
            why = f"failed {line.failures} times, last on {lease.cell.id}: {reason}"
            w.out.append(Alarm(f"micro-batch {line.batch.id} of group {line.group}", why))


def _closed(w: World, cell: Cell, lease: Lease) -> None:
    w.bury(f"lease {lease.id}", lease.notes)
    if cell.state is CellState.TRAIN:
        w.idle[cell.order] = cell
    elif cell.state is CellState.FLUSHING:
        w.touched.append(cell)
    w.dirty = True


def applied(w: World, ev: StepApplied) -> None:
    """The optimizer stepped."""
    led = w.ledger
    if ev.step != led.version:
        kind = DuplicateCommitError if ev.step < led.version else BadValueError
        raise kind(ev, f"step {ev.step} is not the open one; that is step {led.version}")
    if not led.applying:
        state = f"sealed: {led.sealed}, micro-batches not done: {led.undone}"
        raise LateOutcomeError(ev, f"step {ev.step} was not asked to be applied ({state})")
    trained = led.advance()
    if w.core is not None and w.core.state is not CellState.LOST:
        w.set_version(w.core, led.version)
    for group in trained:
        w.note(group, "trained in step {}", ev.step)
        retire(w, group, "trained")
    place(w)
    w.dirty = True


def published(w: World, ev: WeightsPublished) -> None:
    """New weights can be fetched; staleness allows more groups now."""
    led = w.ledger
    if not led.published < ev.version <= led.version:
        problem = f"published is v{led.published}, trained is v{led.version}"
        raise BadValueError(ev, f"version {ev.version} is not new or does not exist; {problem}")
    led.published = ev.version
    w.costs.stepped(w.now - w.step_opened)
    w.step_opened = w.now
    sync_all(w)
    w.dirty = True


def advance(w: World) -> None:
    """Seal and apply the open step if it is time, and lease what is ready."""
    led = w.ledger
    admit(w)
    if not led.sealed and led.seated and _full(w):
        led.sealed = True
        w.out.append(SealStep(led.version, tuple(led.seated)))
    core = w.core
    if (
        led.sealed
        and not led.undone
        and not led.applying
        and core is not None
        and core.state is CellState.TRAIN
        and core.version == led.version
    ):
        led.applying = True
        w.out.append(ApplyStep(led.version, tuple(led.seated)))
    grant_all(w)


def _full(w: World) -> bool:
    led = w.ledger
    if led.building:
        return False
    if len(led.seated) >= w.config.groups_per_step:
        return True
    return w.closed and not w.queue and not led.outstanding


def grant_all(w: World) -> None:
    """A cell in TRAIN that may compute and holds no lease gets one, while there is work."""
    led = w.ledger
    if not led.ready or not w.idle:
        return
    for cell in list(w.idle.values()):
        if not led.ready:
            return
        if not _may_compute(w, cell):
            continue
        lease = led.grant(cell, w.config.max_lease_batches, len(w.trainers), w.now)
        if lease is not None:
            del w.idle[cell.order]
            ids = tuple(line.batch.id for line in lease.batches)
            w.note(lease, "granted to {}: {}", cell.id, ", ".join(ids))
            w.out.append(GrantLease(cell.id, lease.id, lease.step, ids))


def _may_compute(w: World, cell: Cell) -> bool:
    if cell.version != w.ledger.version:
        return False
    return w.config.join_midway or w.ledger.sealed
