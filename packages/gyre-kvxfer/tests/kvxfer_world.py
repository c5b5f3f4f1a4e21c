"""A world of one session, two machines and a hostile network, explored state by state.

The network is the set of all messages ever sent: any of them may be delivered at any time, again, or never. That is
loss, duplication and reordering in one. Engine calls end when the world says so, well or badly; either side may die;
a side may be told that the other is dead, after it died.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import numpy as np
from gyre_kvxfer import destination as d
from gyre_kvxfer import source as s
from gyre_kvxfer.engine import Pinned
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.messages import Offer
from gyre_kvxfer.naming import TokenDigest

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, block_size=2, num_blocks=8, dtype="float32")
TOKENS = np.arange(5, dtype=np.int32)
LEASE = 3


@dataclass(frozen=True)
class Scenario:
    """`freeze_below` 0: pre-copy first. `until`: the clock's end. `deaths`, `faults`: whether sides die, engine calls
    fail.
    """

    freeze_below: int = 0
    until: int = 4
    deaths: bool = False
    faults: bool = False
    give_up: float = 3.0


@dataclass
class World:
    """Everything there is. `ops_*`: engine calls under way. `frozen`, `gone`: the source engine's session."""

    scenario: Scenario
    src: s.SourceMachine
    dst: d.DestinationMachine
    now: int = 0
    ticked: tuple[int, int] = (0, 0)
    alive: tuple[bool, bool] = (True, True)
    to_src: tuple = ()
    to_dst: tuple = ()
    ops_src: tuple = ()
    ops_dst: tuple = ()
    frozen: bool = False
    gone: bool = False
    pins: frozenset = frozenset()
    next_pin: int = 1
    copied_badly: bool = False
    problems: tuple = ()
    entered: bool = False
    trace: tuple = field(default=(), compare=False)

    @classmethod
    def start(cls, scenario: Scenario) -> World:
        policy = d.MovePolicy(
            freeze_below=scenario.freeze_below, settle_below=8, max_rounds=3, reply_s=1.0, give_up_s=scenario.give_up
        )
        world = cls(
            scenario,
            s.SourceMachine("m" * 32, LEASE),
            d.DestinationMachine("m" * 32, "session", "dest", LAYOUT, policy),
        )
        world.run_dst(world.dst.handle(d.Begin(0)))
        return world

    def key(self) -> tuple:
        return (
            _slots(self.src),
            _slots(self.dst),
            self.now,
            self.ticked,
            self.alive,
            frozenset(map(_text, self.to_src)),
            frozenset(map(_text, self.to_dst)),
            tuple(map(repr, self.ops_src)),
            tuple(o[0] + str(o[2]) for o in self.ops_dst),
            self.frozen,
            self.gone,
            self.pins,
            self.copied_badly,
            self.entered,
        )

    def fork(self, label: str) -> World:
        other = copy.copy(self)
        other.src, other.dst = copy.copy(self.src), copy.copy(self.dst)
        if other.dst._digest is not None:
            other.dst._digest = other.dst._digest.copy()
        other.trace = (*self.trace, label)
        return other

    # -- who decodes ---------------------------------------------------------------------------------------------
    @property
    def source_decodes(self) -> bool:
        return self.alive[0] and not self.frozen and not self.gone

    @property
    def destination_decodes(self) -> bool:
        return self.alive[1] and self.dst.may_decode

    def check(self) -> list[str]:
        out = list(self.problems)
        if self.source_decodes and self.destination_decodes:
            out.append("two owners")
        if self.source_decodes and not self.src.may_decode and self.src.state != "freezing":
            out.append(f"the source decodes in state {self.src.state}")
        if self.destination_decodes and not self.entered:
            out.append("the destination owns a session whose KV it does not hold")
        return out

    # -- actions -------------------------------------------------------------------------------------------------
    def run_src(self, actions: list) -> None:
        for a in actions:
            match a:
                case s.Send(m):
                    self.to_dst = _add(self.to_dst, m)
                case s.SendOffer():
                    p = a.pinned
                    self.to_dst = _add(
                        self.to_dst,
                        Offer(
                            "m" * 32,
                            a.seq,
                            "session",
                            p.generation,
                            p.version,
                            a.frozen,
                            a.have,
                            len(p.token_ids),
                            2,
                            a.token_digest,
                            LAYOUT.fingerprint(),
                            LEASE * 1000,
                            "",
                            p.token_ids[a.have :],
                            p.block_ids[a.have // 2 :],
                        ),
                    )
                case s.DoPin():
                    self.ops_src = (*self.ops_src, "pin")
                case s.DoFreeze():
                    self.ops_src = (*self.ops_src, "freeze")
                case s.DoRelease(generation, forget):
                    if generation not in self.pins:
                        self.problems = (*self.problems, f"released pin {generation} that is not held")
                    self.pins -= {generation}
                    self.gone |= forget
                    if not self.pins:
                        self.taint()
                case s.DoUnfreeze():
                    self.frozen = False
        return

    def taint(self) -> None:
        """Blocks under a read may now hold anything."""
        self.ops_dst = tuple((n, a, bad or n == "copy") for n, a, bad in self.ops_dst)

    def run_dst(self, actions: list) -> None:
        for a in actions:
            match a:
                case s.Send(m):
                    self.to_src = _add(self.to_src, m)
                case d.DoReserve():
                    self.ops_dst = (*self.ops_dst, ("reserve", a, False))
                case d.DoCopy():
                    self.ops_dst = (*self.ops_dst, ("copy", a, not self.pins))
                case d.DoEnter():
                    if self.copied_badly:
                        self.problems = (*self.problems, "KV read outside the pins was entered")
                    self.ops_dst = (*self.ops_dst, ("enter", a, False))
                case d.DoCancel():
                    self.ops_dst = ()

    # -- steps ---------------------------------------------------------------------------------------------------
    def steps(self) -> list[World]:
        """Every world one event away."""
        out = []
        if self.alive[0]:
            out += [self.step_src(f"deliver {_text(m)}", s.Received(m, self.now)) for m in self.to_src]
            for i in range(len(self.ops_src)):
                out.append(self.end_src(i, True))
                if self.scenario.faults:
                    out.append(self.end_src(i, False))
            if self.ticked[0] < self.now:
                w = self.step_src("tick source", s.Tick(self.now))
                w.ticked = (self.now, w.ticked[1])
                out.append(w)
        if self.alive[1]:
            out += [self.step_dst(f"deliver {_text(m)}", s.Received(m, self.now)) for m in self.to_dst]
            for i in range(len(self.ops_dst)):
                if self.alive[0] or self.ops_dst[i][0] != "copy":  # a dead process's memory cannot be read
                    out.append(self.end_dst(i, True))
                if self.scenario.faults or not self.alive[0]:
                    out.append(self.end_dst(i, False))
            if self.ticked[1] < self.now:
                w = self.step_dst("tick destination", s.Tick(self.now))
                w.ticked = (w.ticked[0], self.now)
                out.append(w)
        if self.now < self.scenario.until:
            w = self.fork("time")
            w.now += 1
            out.append(w)
        if self.scenario.deaths:
            out += self.deaths()
        return out

    def deaths(self) -> list[World]:
        out = []
        if self.alive == (True, True):
            for side in (0, 1):
                w = self.fork(f"side {side} dies")
                w.alive = (side != 0, side != 1)
                if side == 0:
                    w.ops_src, w.pins = (), frozenset()
                    w.taint()
                else:
                    w.ops_dst = ()
                out.append(w)
        elif self.alive == (False, True):
            out.append(self.step_dst("fence source", s.Fenced()))
        else:
            out.append(self.step_src("fence destination", s.Fenced()))
        return out

    def step_src(self, label: str, event) -> World:
        w = self.fork(label)
        w.run_src(w.src.handle(event))
        return w

    def step_dst(self, label: str, event) -> World:
        w = self.fork(label)
        w.run_dst(w.dst.handle(event))
        return w

    def end_src(self, i: int, well: bool) -> World:
        name = self.ops_src[i]
        w = self.fork(f"{name} {'ends' if well else 'fails'}")
        w.ops_src = self.ops_src[:i] + self.ops_src[i + 1 :]
        if not well:
            w.run_src(w.src.handle(s.ActionFailed(name, "engine", "failed")))
            return w
        n = 4 if name == "pin" else 5
        pinned = Pinned(7, TOKENS[:n], np.arange(3, dtype=np.int32)[: -(-n // 2)], w.next_pin)
        w.pins, w.next_pin = w.pins | {w.next_pin}, w.next_pin + 1
        digest = TokenDigest(LAYOUT.fingerprint(), 7).update(TOKENS[:n]).hex()
        if name == "pin":
            w.run_src(w.src.handle(s.PinDone(pinned, digest, n * 8)))
        else:
            w.frozen = True
            w.run_src(w.src.handle(s.FreezeDone(pinned, digest)))
        return w

    def end_dst(self, i: int, well: bool) -> World:
        name, action, bad = self.ops_dst[i]
        w = self.fork(f"{name} {'ends' if well else 'fails'}")
        w.ops_dst = self.ops_dst[:i] + self.ops_dst[i + 1 :]
        if not well:
            w.run_dst(w.dst.handle(s.ActionFailed(name, "engine", "failed")))
            return w
        if name == "reserve":
            event = d.Reserved(np.arange(-(-action.n_tokens // 2), dtype=np.int32), w.now)
        elif name == "copy":
            w.copied_badly |= bad
            event = d.Copied(w.now)
        else:
            w.entered = True
            event = d.Entered(w.now)
        w.run_dst(w.dst.handle(event))
        return w

    def settle(self) -> World:
        """From here on nothing is lost and nobody fails: deliver and finish everything, let time pass."""
        w = replace_scenario(self)
        done: set = set()
        for _ in range(400):
            progress = False
            for side, box in (("src", w.to_src), ("dst", w.to_dst)):
                for m in box:
                    if (side, _text(m)) not in done and w.alive[side == "dst"]:
                        done.add((side, _text(m)))
                        step = w.step_src if side == "src" else w.step_dst
                        w = step("settle", s.Received(m, w.now))
                        progress = True
            while w.ops_src and w.alive[0]:
                w, progress = w.end_src(0, True), True
            while w.ops_dst and w.alive[1]:
                w, progress = w.end_dst(0, not w.ops_dst[0][2] or w.alive[0]), True
            if not progress:
                if w.now > 60:
                    return w
                w = w.fork("time")
                w.now += 1
                w = w.step_src("t", s.Tick(w.now)) if w.alive[0] else w
                w = w.step_dst("t", s.Tick(w.now)) if w.alive[1] else w
                done = set()  # the network delivers again what is sent again
        return w


def replace_scenario(w: World) -> World:
    other = w.fork("settle")
    other.scenario = replace(w.scenario, deaths=False, faults=False)
    return other


def _add(box: tuple, m) -> tuple:
    return box if any(_text(x) == _text(m) for x in box) else (*box, m)


def _text(m) -> str:
    extra = f"/{m.generation}/{m.frozen}/{m.have}" if isinstance(m, Offer) else f"/{getattr(m, 'generation', '')}"
    return f"{type(m).__name__}#{m.seq}{extra}{getattr(m, 'code', '')}"


def _slots(machine) -> tuple:
    out = []
    for name in type(machine).__slots__:
        value = getattr(machine, name)
        if isinstance(value, np.ndarray):
            value = value.tobytes()
        elif name == "_digest" and isinstance(value, TokenDigest):
            value = value.hex()
        elif name in ("_offer", "_request"):
            value = _text(value) if value is not None else None
        elif name == "_policy":
            continue
        elif name == "_pinned":
            value = tuple(p.generation for p in value)
        elif name == "_answered":
            value = value is not None
        out.append(value)
    return tuple(out)


def explore(scenario: Scenario, limit: int, settle_every: int = 0):
    """Breadth first over all reachable worlds: yields (world, problems). Stops after `limit` worlds."""
    first = World.start(scenario)
    seen = {first.key()}
    frontier = [first]
    count = 0
    while frontier:
        following = []
        for world in frontier:
            count += 1
            problems = world.check()
            if settle_every and count % settle_every == 0:
                problems += after_settling(world)
            yield world, problems
            if count >= limit:
                return
            for other in world.steps():
                key = other.key()
                if key not in seen:
                    seen.add(key)
                    following.append(other)
        frontier = following


def after_settling(world: World) -> list[str]:
    """Problems once everything still under way has ended."""
    end = world.settle()
    out = end.check()
    owners = end.source_decodes + end.destination_decodes
    if world.alive == (True, True) and owners != 1:
        out.append(f"{owners} owners in the end: source {end.src.state}, destination {end.dst.state}")
    if world.alive == (True, False) and end.src.state not in ("moved", "given") and owners != 1:
        out.append(f"the destination died before it was given the session, and the source ended {end.src.state}")
    return out
