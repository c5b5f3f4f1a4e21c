"""When cells turn: pure functions from a view to the turns to begin now.

A policy is called after every event that may matter, again after each turn it began, until it begins none. It holds
no state; all it may know is in the ``View``. Any callable of this shape is a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .ids import CellId, CellState, Role
from .view import CellView, View

__all__ = ["POLICIES", "Policy", "Turn", "colocate", "cost_aware", "static", "watermark"]


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn ``cell`` to ``role``; ``reason`` carries the numbers."""

    cell: CellId
    role: Role
    reason: str


Policy: TypeAlias = Callable[[View], Sequence[Turn]]


def static(view: View) -> Sequence[Turn]:
    """Nobody turns: the split in which the cells joined stays. The asynchronous baseline."""
    del view
    return ()


def watermark(view: View) -> Sequence[Turn]:
    """One cell at a time: release the idlest below the low mark while data waits, claim back above the high mark."""
    if view.transit_room <= 0:
        return ()
    claim = _claim(view)
    return claim or _release(view)


def _claim(view: View) -> Sequence[Turn]:
    cfg = view.config
    load = view.utilisation()
    if load > cfg.high:
        cell = view.satellite(idle_only=False)
        if cell is not None and _time_for_a_loan(view):
            return (Turn(cell.id, Role.ROLLOUT, f"demand {load:.2f} is above the high mark {cfg.high}"),)
    elif load > _idle_mark(view) and not view.ready_tokens:
        cell = view.satellite(idle_only=True)
        if cell is not None and _time_for_a_loan(view):
            why = f"nothing to train, and demand {load:.2f} is above {_idle_mark(view)}"
            return (Turn(cell.id, Role.ROLLOUT, why),)
    return ()


def _time_for_a_loan(view: View) -> bool:
    """Whether the open step lasts long enough for a cell to go to the other role and come back."""
    return view.step_left_s() > view.config.switch_margin * view.costs.round_trip()


def _idle_mark(view: View) -> float:
    mark = view.config.claim_idle
    return view.config.low if mark is None else mark


def _release(view: View) -> Sequence[Turn]:
    cfg = view.config
    if not view.ready_tokens or view.rollout_count <= cfg.keep_rollout:
        return ()
    trainers = view.train_count + view.arriving_train
    backlog = view.costs.train_seconds(view.ready_tokens)
    price = cfg.switch_margin * view.costs.round_trip()
    if backlog <= trainers * price:
        return ()
    cell = view.idlest()
    if cell is None:
        return ()
    load = view.utilisation(without=cell, arriving=False)
    if load > cfg.low:
        return ()
    why = (
        f"{view.ready_tokens} tokens ready ({backlog:.1f} s for one cell, {trainers} train, a loan costs "
        f"{price:.1f} s); without it demand is {load:.2f} of capacity, low mark {cfg.low}"
    )
    return (Turn(cell.id, Role.TRAIN, why),)


def colocate(view: View) -> Sequence[Turn]:
    """All cells sample, then all train: the synchronous baseline. The core cell turns with the others."""
    if (
        view.rollout_count
        and view.live_executions == 0
        and (view.undone_batches or view.sealed or view.building_groups)
    ):
        return tuple(
            Turn(cell.id, Role.TRAIN, "everything admitted has ended")
            for cell in view.cells()
            if cell.state is CellState.ROLLOUT
        )
    trained = not (view.undone_batches or view.sealed or view.building_groups or view.held_groups)
    if view.train_count and trained and view.live_executions and view.published == view.step:
        return tuple(
            Turn(cell.id, Role.ROLLOUT, "everything that ended has trained")
            for cell in view.cells()
            if cell.state is CellState.TRAIN
        )
    return ()


def cost_aware(view: View) -> Sequence[Turn]:
    """Watermarks, but a cell turns only when the step is predicted to end sooner by more than the turn costs.

    The step ends when both its training and the sampling it waits for are done: ``max(W/n, tail)`` with ``W`` seconds
    of training for one cell, ``n`` trainers and the predicted tail of the groups that must be in it.
    """
    if view.transit_room <= 0:
        return ()
    cfg, costs = view.config, view.costs
    if cfg.lend_core:
        lent = _lend_core(view)
        if lent:
            return lent
    trainers = max(1, view.train_count + view.arriving_train)
    work = costs.train_seconds(view.ready_tokens + view.leased_tokens)
    load = view.utilisation()
    if load > cfg.high:
        cell = view.satellite(idle_only=False)
        if cell is None or not _time_for_a_loan(view):
            return ()
        tail = view.tail_s()
        if cell.lease is not None and trainers > 1:
            later = work / (trainers - 1) + costs["to_rollout_s"]
            if later > max(work / trainers, tail) and tail > 0 and load < 2.0 * cfg.high:
                return ()
        why = f"demand {load:.2f} is above the high mark {cfg.high}; training left {work / trainers:.1f} s"
        return (Turn(cell.id, Role.ROLLOUT, f"{why}, predicted tail {tail:.1f} s"),)
    claim = _claim(view)
    if claim:
        return claim
    if not view.ready_tokens or view.rollout_count <= cfg.keep_rollout:
        return ()
    price = cfg.switch_margin * costs.round_trip()
    gain = work / trainers - (work + price) / (trainers + 1)
    if gain <= 0 or costs.train_seconds(view.ready_tokens) <= trainers * price:
        return ()
    idlest = view.idlest()
    if idlest is None:
        return ()
    without = view.utilisation(without=idlest, arriving=False)
    critical = work / trainers > view.tail_s()
    if without > (cfg.high if critical else cfg.low):
        return ()
    why = f"the step's training ends {gain:.1f} s sooner; without it demand is {without:.2f} of capacity"
    return (Turn(idlest.id, Role.TRAIN, why),)


def _lend_core(view: View) -> Sequence[Turn]:
    """The core samples while nothing is there to train, and comes back once what waits is worth the way."""
    core = view.core()
    if core is None:
        return ()
    work = view.costs.train_seconds(view.ready_tokens)
    price = view.config.switch_margin * view.costs.round_trip()
    if core.state is CellState.ROLLOUT:
        trainers = view.train_count + view.arriving_train
        enough = work > price * max(1, trainers)
        starved = not view.tail_s() and view.live_executions == 0
        if view.sealed or enough or (work > 0 and starved):
            return (Turn(core.id, Role.TRAIN, f"{work:.1f} s of training wait for it"),)
        return ()
    quiet = not (view.undone_batches or view.sealed or view.applying or view.building_groups)
    if core.state is CellState.TRAIN and core.lease is None and quiet and view.live_executions:
        return _loan_of_core(view, core, price)
    return ()


def _loan_of_core(view: View, core: CellView, price: float) -> Sequence[Turn]:
    """The turn, if sampling ends sooner by more than the core's way back and the training that waits for it meanwhile
    (up to ``price``: with more it comes back).

    One more cell helps work that waits for a slot. Below capacity every session is in a call or in its tool already,
    the step takes as long as its longest execution, and all a loan does is put training behind sampling.
    """
    load = view.utilisation()
    if load <= 1.0:
        return ()
    costs = view.costs
    sooner = (view.step_left_s() - costs.round_trip()) / (view.rollout_count + view.arriving_rollout + 1)
    if sooner <= costs["to_train_s"] + price:
        return ()
    why = f"nothing to train, demand is {load:.2f} of capacity; sampling ends {sooner:.1f} s sooner"
    return (Turn(core.id, Role.ROLLOUT, f"{why}, which is more than its way back and the work it leaves"),)


POLICIES: dict[str, Policy] = {"static": static, "colocate": colocate, "watermark": watermark, "cost-aware": cost_aware}
"""Policies by name."""
