"""Builds the machine that a log leads to.

A replayed machine is equal to the one that wrote the log (``snapshot``), and its answers were the same commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .commands import Command
from .errors import LogError
from .events import Event
from .ledger import Ledger
from .log import read_header, read_log
from .machine import Scheduler
from .policies import POLICIES, Policy
from .records import Cell, Session
from .world import World

__all__ = ["replay", "replay_events", "snapshot"]

Watcher = Callable[[Event, list[Command]], None]


def replay(path: str | Path, policy: Policy | None = None, watch: Watcher | None = None) -> Scheduler:
    """The machine after all events of the log at ``path``. A policy that is not built in must be given."""
    name, config = read_header(path)
    chosen = policy or POLICIES.get(name)
    if chosen is None:
        raise LogError(f"{path} was written under policy {name!r}, which is not built in; give it as `policy`")
    return replay_events(Scheduler(config, chosen), read_log(path), watch)


def replay_events(machine: Scheduler, events: Iterable[Event], watch: Watcher | None = None) -> Scheduler:
    """Feed ``events`` to ``machine``; ``watch`` sees each event with its commands."""
    for event in events:
        commands = machine.handle(event)
        if watch is not None:
            watch(event, commands)
    return machine


def snapshot(machine: Scheduler) -> dict[str, Any]:
    """Everything a machine knows, as plain data with names for references; equal machines have equal snapshots."""
    w = machine._w
    return {
        "now": w.now,
        "seq": w.seq,
        "cells": {name: _cell(cell) for name, cell in w.cells.items()},
        "core": None if w.core is None else w.core.id,
        "sets": (tuple(w.rollout.members), tuple(w.trainers), tuple(w.idle), tuple(w.behind), tuple(w.in_transit)),
        "sessions": {s.id: _session(s) for s in w.sessions.values()},
        "executions": {
            x.id: (x.group.id, x.attempt, x.running, x.cut, x.status, x.deadline, x.started)
            for x in w.executions.values()
        },
        "groups": {
            g.id: (g.size, g.version, g.stage, g.step, g.unfinished, tuple(g.executions)) for g in w.groups.values()
        },
        "order": (
            tuple(w.queue),
            tuple(sorted(w.waiting)),
            tuple(sorted(w.line)),
            tuple(w.moves),
            w.next_move,
            w.closed,
        ),
        "prefixes": tuple(w.prefixes.items()),
        "ledger": _ledger(w.ledger),
        "sums": _sums(w),
        "growth": (
            w.growth,
            w.growth_at,
            w.reported_growth,
            w.ended_contexts,
            w.ended_sessions,
            w.switches,
            w.step_opened,
        ),
        "history": (tuple(w.durations), tuple(w.recent), w.call_s, w.arrivals, w.admissions),
        "costs": w.costs.snapshot(),
        "deadlines": tuple(sorted(w.deadlines)),
        "stories": {name: tuple(cell.notes) for name, cell in w.cells.items()},
    }


def _cell(cell: Cell) -> tuple[Any, ...]:
    return (
        (cell.id, cell.core, cell.state, cell.role, cell.target),
        (cell.slots, cell.kv_tokens, cell.version, cell.syncing),
        tuple(cell.sessions),
        (cell.calling, cell.kv_held, cell.moves_out, cell.quiet),
        None if cell.lease is None else cell.lease.id,
        (cell.report, cell.growth_tps, cell.since, cell.role_since),
    )


def _session(s: Session) -> tuple[Any, ...]:
    home = None if s.home is None else s.home.id
    src = None if s.src is None else s.src.id
    return (s.execution.id, s.phase, s.context, home, src, (s.move, s.wants, s.since))


def _ledger(led: Ledger) -> tuple[Any, ...]:
    return (
        (led.version, led.published, led.admitted, led.sealed, led.applying, led.next_lease),
        (tuple(led.seated), tuple(led.ended), tuple(led.outstanding)),
        tuple((b.batch, b.group, b.lease, b.done, b.failures) for b in led.batches.values()),
        tuple(b.batch.id for b in led.ready),
        tuple((x.id, x.cell.id, x.recalled, x.since) for x in led.leases.values()),
        (led.building, led.ready_tokens, led.leased_tokens, led.done_tokens, led.undone),
    )


def _sums(w: World) -> tuple[Any, ...]:
    capacity = (w.slots, w.kv_tokens, w.all_slots, w.all_kv)
    return (*capacity, w.kv_held, w.calling, w.homed, w.unstarted, w.bare, w.live)
