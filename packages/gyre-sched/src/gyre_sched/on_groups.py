"""Groups and executions: admission paced by staleness, retries, cuts, and which step a group trains in.

Pacing. With ``B`` groups per step and at most ``s`` versions of staleness, ``(published + s + 1) · B``
groups may ever have been admitted, and a step at version ``v`` must contain every group admitted at version
``v - s`` or earlier. There are at most ``B`` of those (all but ``v · B`` of the ``(v - s + s + 1) · B``
admitted by then have trained), so they always have seats: no token is older than ``s`` versions when it
trains, and nothing is thrown away.
"""

from __future__ import annotations

import heapq
import itertools

from . import checks
from .commands import AdmitGroup, BuildGroup, CutExecution, DropGroup, GroupEvaluated, RetryExecution
from .errors import BadValueError, DuplicateCommitError, LateOutcomeError
from .events import CutAsked, ExecutionEnded, ExecutionStarted, GroupQueued, GroupsClosed
from .ids import EndStatus
from .on_sessions import end_session
from .records import Execution, Group
from .world import World

__all__ = ["admit", "cut_due", "place", "retire"]


def queued(w: World, ev: GroupQueued) -> None:
    """A group wants to start."""
    checks.positive(w, ev, size=ev.size)
    if ev.group in w.groups:
        checks.refuse(BadValueError, w, ev, "a group of this name exists", ev.group)
    if w.closed:
        raise BadValueError(ev, "GroupsClosed was posted; no further group can be queued")
    group = Group(ev.group, ev.size, ev.evaluation)
    w.groups[ev.group] = group
    if group.evaluation:
        _run(w, group, f"evaluation of v{w.ledger.published}")
        return
    w.queue[ev.group] = group
    w.note(group, "queued with {} executions", ev.size)
    admit(w)


def closed(w: World, ev: GroupsClosed) -> None:
    """No more groups come."""
    w.closed = True
    place(w)
    w.dirty = True


def admit(w: World) -> None:
    """Admit waiting groups, oldest first, as far as staleness (and, if set, load) allows."""
    led, cfg = w.ledger, w.config
    limit = (led.published + cfg.max_staleness + 1) * cfg.groups_per_step
    while w.queue and led.admitted < limit:
        slots, kv = w.demand()
        if cfg.admit_load is not None and w.executions and w.all_slots:
            load = max(slots / w.all_slots, kv / w.all_kv)
            if load >= cfg.admit_load:
                return
        name, group = w.queue.popitem(last=False)
        w.admissions += 1
        if w.admissions == 1:
            w.step_opened = w.now
        group.order = w.admissions
        led.admitted += 1
        led.outstanding[name] = group
        _run(w, group, f"group {led.admitted} of {limit} at v{led.published} and staleness {cfg.max_staleness}")


def _run(w: World, group: Group, why: str) -> None:
    group.stage = "running"
    group.version = w.ledger.published
    w.unstarted += group.size
    w.live += group.size
    w.note(group, "admitted: {}", why)
    w.out.append(AdmitGroup(group.id, group.version, why))
    w.dirty = True


def started(w: World, ev: ExecutionStarted) -> None:
    """An execution runs."""
    group = checks.group(w, ev, ev.group, "running")
    execution = w.executions.get(ev.execution)
    if execution is not None:
        if execution.group is not group:
            checks.refuse(BadValueError, w, ev, f"it belongs to group {execution.group.id!r}", ev.execution)
        if execution.running or execution.status is not None:
            state = "runs already" if execution.running else f"has ended ({execution.status})"
            checks.refuse(LateOutcomeError, w, ev, f"the execution {state}", ev.execution)
    else:
        if len(group.executions) >= group.size:
            have = ", ".join(group.executions)
            checks.refuse(BadValueError, w, ev, f"the group has its {group.size} executions: {have}", ev.group)
        execution = Execution(ev.execution, group)
        w.executions[ev.execution] = execution
        group.executions[ev.execution] = execution
    execution.running = True
    execution.started = w.now
    w.unstarted -= 1
    w.bare += 1
    if w.config.cut_after_s is not None:
        w.wake_for(execution, w.now + w.config.cut_after_s)
    w.note(execution, "started, attempt {}", execution.attempt)


def ended(w: World, ev: ExecutionEnded) -> None:
    """An execution ended: retry it, or count it and see whether its group is complete."""
    execution = checks.execution(w, ev, ev.execution)
    status = EndStatus(ev.status)
    for session in list(execution.sessions.values()):
        end_session(w, session, f"execution {status}")
    execution.running = False
    execution.deadline = None
    w.bare -= 1
    w.dirty = True
    group = execution.group
    w.note(execution, "ended as {}{}", status.value, f": {ev.reason}" if ev.reason else "")
    if status is EndStatus.FAILED and not execution.cut and execution.attempt < w.config.max_retries:
        execution.attempt += 1
        w.unstarted += 1
        why = f"{ev.reason or 'failed'}; attempt {execution.attempt} of {w.config.max_retries}"
        w.note(execution, "to be run again: {}", why)
        w.out.append(RetryExecution(execution.id, group.id, execution.attempt, why))
        return
    if status is EndStatus.COMPLETED:
        w.ran(w.now - execution.started)
    execution.status = status
    group.unfinished -= 1
    w.live -= 1
    if group.unfinished == 0:
        _complete(w, group)


def _complete(w: World, group: Group) -> None:
    """All members ended: the group trains with those that count, or leaves if too few are left."""
    if group.evaluation:
        w.out.append(GroupEvaluated(group.id, tuple(group.executions)))
        retire(w, group, "evaluated")
        return
    good = sum(1 for e in group.executions.values() if e.status is not None and e.status.trains)
    if good < min(w.config.min_group, group.size):
        why = f"{good} of {group.size} executions can train; at least {w.config.min_group} are needed"
        w.note(group, "dropped: {}", why)
        w.out.append(DropGroup(group.id, why))
        retire(w, group, "dropped")
        place(w)
        return
    group.stage = "ended"
    w.ledger.ended[group.id] = group
    place(w)


def retire(w: World, group: Group, stage: str) -> None:
    """A group leaves. Dropped groups give their admission back."""
    group.stage = stage
    led = w.ledger
    led.outstanding.pop(group.id, None)
    led.ended.pop(group.id, None)
    for execution in group.executions.values():
        del w.executions[execution.id]
        w.bury(f"execution {execution.id}", execution.notes)
    del w.groups[group.id]
    w.bury(f"group {group.id}", group.notes)
    if stage == "dropped":
        led.seated.pop(group.id, None)
        led.admitted -= 1
        w.dirty = True


def place(w: World) -> None:
    """Give ended groups seats in the open step: overdue ones first, others while no overdue one needs the
    seat.
    """
    led, cfg = w.ledger, w.config
    if led.sealed or not led.ended:
        return
    if cfg.batch_order:
        for group in list(itertools.islice(led.outstanding.values(), cfg.groups_per_step - len(led.seated))):
            if group.stage == "ended":
                _seat(w, group)
        return
    oldest = led.version - cfg.max_staleness
    overdue = 0
    for group in led.outstanding.values():
        if group.version > oldest:
            break
        overdue += 1
    for must in (True, False):
        for group in list(led.ended.values()):
            if (group.version <= oldest) is not must:
                continue
            if not must and len(led.seated) + overdue >= cfg.groups_per_step:
                return
            if must:
                overdue -= 1
            _seat(w, group)


def _seat(w: World, group: Group) -> None:
    led = w.ledger
    del led.ended[group.id]
    del led.outstanding[group.id]
    led.seated[group.id] = group
    group.step, group.stage = led.version, "building"
    led.building += 1
    good = tuple(e.id for e in group.executions.values() if e.status is not None and e.status.trains)
    out = tuple(e.id for e in group.executions.values() if e.status is None or not e.status.trains)
    why = f"seat {len(led.seated)} of {w.config.groups_per_step} in step {led.version}"
    if out:
        why += f"; baseline over {len(good)} of {group.size} executions"
    w.note(group, "complete: {}", why)
    w.out.append(BuildGroup(group.id, led.version, good, out, why))


# --- cuts --------------------------------------------------------------------------------------------------


def cut_asked(w: World, ev: CutAsked) -> None:
    """Somebody wants an execution to end now."""
    execution = checks.execution(w, ev, ev.execution)
    if execution.cut:
        checks.refuse(DuplicateCommitError, w, ev, "it is being cut already", ev.execution)
    _cut(w, execution, ev.reason)


def _cut(w: World, execution: Execution, why: str) -> None:
    execution.cut = True
    w.note(execution, "cut: {}", why)
    w.out.append(CutExecution(execution.id, why))


def cut_due(w: World) -> None:
    """Cut what ran too long, and the last few executions that a starved step waits for."""
    while w.deadlines and w.deadlines[0][0] <= w.now:
        at, name = heapq.heappop(w.deadlines)
        execution = w.executions.get(name)
        if execution is not None and execution.running and execution.deadline == at and not execution.cut:
            _cut(w, execution, f"ran for {w.now - execution.started:.1f} s, limit {w.config.cut_after_s}")
    if w.config.cut_tail_share > 0 and w.dirty:
        _cut_tail(w)


def _cut_tail(w: World) -> None:
    """All seats but overdue ones are taken, nothing is left to train: cut the tail if it is small enough."""
    led, cfg = w.ledger, w.config
    if led.sealed or led.ready:
        return
    late = [g for g in led.outstanding.values() if g.version <= led.version - cfg.max_staleness]
    if not late or len(late) + len(led.seated) < cfg.groups_per_step:
        return
    live = [e for g in late for e in g.executions.values() if e.running and not e.cut]
    total = sum(g.size for g in late) + sum(g.size for g in led.seated.values())
    if live and len(live) <= cfg.cut_tail_share * total:
        for execution in live:
            _cut(w, execution, f"step {led.version} waits for its last {len(live)} of {total} executions")
