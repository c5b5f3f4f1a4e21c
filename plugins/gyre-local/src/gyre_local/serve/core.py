"""The engine without threads: calls in, forward passes, tokens out.

Everything that touches calls, blocks or weights happens between two passes, on the thread that steps, so nothing
here locks. Invariants: a block is held by calls, pins and reservations alone; a call that fails or ends gives back
all it held; cached prefixes are of the present version. Not here: what is in a pass (`serve.passes`), threads and
asyncio (`serve.engine`), KV for movers (`serve.sessions`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from gyre_core import EngineLoad, FinishReason

from gyre_local.kv.pool import BlockPool
from gyre_local.kv.prefix import Match, PrefixTree
from gyre_local.kv.slots import Resident, SlotCache
from gyre_local.model.architecture import Architecture
from gyre_local.model.weights import Weights
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.calls import Call, Outcome
from gyre_local.serve.meter import Meter
from gyre_local.serve.sessions import Sessions


class EngineCore:
    """State of one engine between two forward passes. `outbox` gathers what is to be handed to callers."""

    def __init__(self, weights: Weights, version: int, options: LocalEngineOptions) -> None:
        self.weights, self.version, self.options = weights, version, options
        blocks = math.ceil(options.kv_tokens / options.block_tokens)
        dtype, device = weights.embed.dtype, weights.embed.device
        self.pool = BlockPool(weights.arch, blocks, options.block_tokens, dtype, device)
        self.tree = PrefixTree(self.pool, version)
        self.slots = SlotCache(weights.arch, options.max_running, dtype, device)
        self.sessions = Sessions(self.pool, self.tree)
        self.meter = Meter()
        self.running: list[Call] = []
        """In order of admission: the last one is preempted first."""
        self.waiting: deque[Call] = deque()
        self.outbox: list[tuple[Call, Outcome]] = []
        self.max_tokens = context_limit(weights.arch, options)

    # Calls

    def add(self, call: Call) -> None:
        """Queue a call, or hold or refuse it as its session's state says."""
        if any(call.id == other.id for other in self.calls()):
            self.outbox.append((call, ValueError(f"call {call.id!r}: a call with this request_id is running already")))
            return
        if not self.sessions.hold_if_frozen(call):
            self.waiting.append(call)

    def calls(self) -> list[Call]:
        """Running, waiting and held calls."""
        return [*self.running, *self.waiting, *self.sessions.held_calls()]

    def finish(self, call: Call, reason: FinishReason) -> None:
        """End a call: its KV stays as a cached prefix, its last chunk goes out."""
        if call in self.running:
            self._leave(call, keep=True)
        elif call in self.waiting:
            self.waiting.remove(call)
        else:
            self.sessions.drop_held(call)
        self.outbox.append((call, call.chunk(reason)))

    def fail(self, call: Call, error: Exception) -> None:
        """End a call that went wrong: nothing of it is cached, what only it held is zeroed."""
        if call in self.running:
            mine = [b for b in call.blocks if self.pool.references(b) == 1 and not self.tree.names(b)]
            self.pool.clear(mine)
            self.slots.clear(call.slot)
            self._leave(call, keep=False)
        self.outbox.append((call, error))

    def abort_all(self) -> None:
        """End every call with ABORT."""
        for call in self.calls():
            self.finish(call, FinishReason.ABORT)

    def preempt(self, call: Call) -> None:
        """Take a running call's blocks back; it comes first when there is room again."""
        self.meter.preemptions += 1
        self._leave(call, keep=True)
        self.waiting.appendleft(call)

    def _leave(self, call: Call, *, keep: bool) -> None:
        """Give back slot and blocks of a running call; with `keep` its KV is named, if it is of one version."""
        self.running.remove(call)
        tokens = call.tokens[: call.computed].copy()
        whole = keep and call.kv_version == self.version and call.computed > 0
        if whole:
            self.tree.insert(tokens, call.blocks, partial=True)
            self.sessions.remember(call.session, tokens)
        self.pool.release(call.blocks)
        self.slots.release(call.slot, Resident(call.session, tokens) if whole else None)
        call.blocks, call.slot, call.computed, call.kv_version = [], -1, 0, None

    # Sessions

    def requeue(self, calls: Iterable[Call]) -> None:
        """Calls that were held may run now."""
        self.waiting.extend(calls)

    def release_pin(self, session: str, generation: int, *, forget: bool) -> None:
        """Drop a pin; held calls run, or are refused when the session has left with `forget`."""
        queue, refuse = self.sessions.release(session, generation, forget=forget)
        self.requeue(queue)
        for call in refuse:
            self.outbox.append((call, self.sessions.moved_away(call)))

    # Admission

    def admit(self, call: Call) -> bool:
        """Give a waiting call its cached prefix, blocks and a slot; False when there is no room yet."""
        match = self.tree.match(call.tokens, call.length - 1)
        fresh = self._take_blocks(call, match)
        if fresh is None and match.tail is not None:
            match = match.without_tail()  # its block may be the very one that is missing
            fresh = self._take_blocks(call, match)
        if fresh is None:
            return False
        call.blocks = [*match.blocks, *fresh]
        call.computed, call.kv_version = match.tokens, self.version
        call.slot = self.slots.claim(call.session)
        self.slots.load(call.slot, self.pool, call.blocks, call.tokens[: call.computed])
        if call.cached_tokens is None:
            call.cached_tokens = match.tokens
            self.meter.cached += match.tokens
        self.running.append(call)
        return True

    def _take_blocks(self, call: Call, match: Match) -> list[int] | None:
        """Hold the matched blocks and take the others that the call's tokens need; the first of these gets a copy of
        the matched tail. None, with nothing held, when there are too few."""
        cached = [*match.blocks] if match.tail is None else [*match.blocks, match.tail]
        need = math.ceil(call.length / self.pool.block_tokens) - len(match.blocks)
        self.pool.hold(cached)
        spare = len(self.running)  # one block of growth for each running call, or they preempt one another
        fresh = self.pool.take(need) if self.pool.available >= need + spare else None
        if fresh is None:
            self.pool.release(cached)
        elif match.tail is not None:
            self.pool.copy_block(match.tail, fresh[0], match.tail_tokens)
            self.pool.release([match.tail])
        return fresh

    def grow(self, call: Call) -> bool:
        """Make sure a running call has a block for its next token, preempting the youngest when KV runs out; False
        when the call itself had to go."""
        while call.computed >= len(call.blocks) * self.pool.block_tokens:
            fresh = self.pool.take(1)
            if fresh is not None:
                call.blocks += fresh
                continue
            victim = self.running[-1]
            self.preempt(victim)
            if victim is call:
                return False
        return True

    def note_filled(self, call: Call, before: int) -> None:
        """The call's KV has grown from `before` tokens: digest the blocks that are full now, if anybody wants that."""
        size, digests = self.pool.block_tokens, self.pool.digests
        new = call.computed // size - before // size
        if digests is not None and new and call.kv_version == self.version:
            digests.fill(call.blocks[: call.computed // size], new)

    # Weights and cache

    def swap_weights(self, weights: Weights, version: int) -> None:
        """Change policy between two passes. Calls that have sampled go on over their old ("mixed") KV; calls still in
        their prompt start it again; every cached prefix is forgotten."""
        self.weights, self.version = weights, version
        for call in [c for c in reversed(self.running) if not c.sampled]:
            self._leave(call, keep=False)
            call.cached_tokens = None
            self.waiting.appendleft(call)
        for call in self.running:
            call.kv_version = None
        self.tree.forget_all(version)
        self.slots.forget_residents()
        self.sessions.forget_tokens()
        if self.pool.digests is not None:
            self.pool.digests.drop_all()

    def flush_cache(self) -> None:
        """Forget every cached prefix; what running calls use stays with them."""
        self.tree.forget_all(self.version)
        self.slots.forget_residents()

    def drop(self) -> None:
        """Let go of weights and KV storage; the core is of no use afterwards."""
        del self.weights
        self.pool.drop()
        self.slots.drop()

    def load(self) -> EngineLoad:
        """Counts of now."""
        size = self.pool.block_tokens
        return EngineLoad(
            slots_total=self.options.max_running,
            slots_running=len(self.running),
            waiting=len(self.waiting) + len(self.sessions.held_calls()),
            kv_tokens_total=self.pool.blocks * size,
            kv_tokens_used=self.pool.held * size,
            version=self.version,
            prefill_tokens_per_s=self.meter.prefill_rate,
            decode_tokens_per_s=self.meter.decode_rate,
            prefilled_tokens=self.meter.prefilled,
            cached_tokens=self.meter.cached,
            sampled_tokens=self.meter.sampled,
        )


def context_limit(arch: Architecture, options: LocalEngineOptions) -> int:
    """Most tokens one call may have, prompt included: the model's, the option's and the pool's bound."""
    blocks = math.ceil(options.kv_tokens / options.block_tokens)
    model = arch.max_positions
    return min(options.max_context or model, model, blocks * options.block_tokens)
