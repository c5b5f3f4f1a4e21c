"""One execution inside the proxy: from a request to exact prompt ids, and from an answer back into the tree.

Invariant (law 5.1): a prompt is recorded tokens followed by the tokens of new messages, or a fresh rendering that
branches from the longest recorded prefix. Nothing that was sampled is encoded again on the way. A turn costs work for
what is new: prompts are views of a buffer that grows, not copies.

Everything here runs on the proxy's event loop; only rendering long text goes to a thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gyre_tito.chat_format import TAIL_TOKENS, ChatFormat, ParsedTurn
from gyre_tito.growable import Growable
from gyre_tito.matching import Match, Matcher, Recorded, TextHistory
from gyre_tito.messages import Message, reasoning_digest
from gyre_tito.notes import Note, RetryNote, TextNote, pack_note, read_note
from gyre_tito.records import CallRecord, ExecutionInfo, Link, SessionInfo
from gyre_tito.requests import Transcript, invalid
from gyre_tito.retries import Attempts
from gyre_tito.tree import TrajectoryTree, common_prefix

T = TypeVar("T")
_BUFFERS = 8
_BUFFER_TOKENS = 524_288
_INLINE = 8_192
_NOTHING = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class SessionState:
    """A session as the proxy follows it. `head`: digest of its instructions and tools."""

    info: SessionInfo
    stored: bool = False
    head: bytes = b""
    last_call: int = -1
    count: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A call that is ready to go: exact prompt ids int32[P] and how they lie in the tree.

    `forced`: ids at the prompt's end that belong to the answer's text (a prefill). `match`: None for plain completions,
    for which `text` is the prompt if it came as text.
    """

    index: int
    session: SessionState
    parent: int
    prefix_len: int
    context_ids: NDArray[np.int32]
    prompt_ids: NDArray[np.int32]
    new_from: int
    link: Link
    buffer: Growable[np.int32]
    match: Match | None
    forced: NDArray[np.int32]
    text: str | None = None


class Execution:
    """State of one open execution."""

    def __init__(self, info: ExecutionInfo, chat: ChatFormat, sessions: Sequence[SessionInfo] = ()) -> None:
        self.info = info
        self.chat = chat
        self.tree = TrajectoryTree()
        self.sessions = {one.session: SessionState(one, stored=True) for one in sessions}
        self.active: set[asyncio.Task[None]] = set()
        self.lost = ""  # why the store has lost a call of this execution, if it has
        self._matcher = Matcher()
        self._texts = TextHistory()
        self._prompts: dict[bytes, int] = {}
        self._buffers: OrderedDict[int, Growable[np.int32]] = OrderedDict()
        self._session_of: dict[int, str] = {}
        self.attempts = Attempts()
        self._next = 0
        self._recent = ""

    # -- restoring -----------------------------------------------------------------------------------------------

    def restore(self, call: CallRecord, note: bytes) -> None:
        """Take in a call that an earlier life of the proxy recorded."""
        self.tree.insert(call)
        self._next = max(self._next, call.index + 1)
        state = self._session(call.session)
        state.last_call = call.index
        self._session_of[call.index] = call.session
        kept = read_note(note)
        if kept.retry is not None:
            self.attempts.restore(call.index, kept.retry)
        if kept.text is not None:
            self._texts.restore(kept.text.size, kept.text.digest, call.index, kept.text.tokens)
        if not kept.request:
            return
        state.head, state.count = kept.head, kept.count
        self._prompts.setdefault(kept.request, call.index)
        if kept.answer:
            self._matcher.restore(kept.answer, Recorded(call.index, call.session, kept.reasoning))

    def next_answer_id(self) -> str:
        """A name for an answer that is about to be made."""
        return f"{self.info.execution}-{self._next}"

    # -- planning ------------------------------------------------------------------------------------------------

    async def plan(self, transcript: Transcript, session: str | None, n: int, pool: Executor) -> list[Plan]:
        """Plans for `n` answers to one request. Errors: `HistoryError`, and the dialect's own."""
        found = self._matcher.match(transcript)
        if found.count == len(transcript.preface):
            raise invalid("the list of messages is empty; send at least one", "messages")
        new: tuple[Message, ...] | None = found.new
        ids, parent, prefix = None, -1, 0
        if found.recorded is not None:
            parent, prefix = found.recorded.call, self.tree.place(found.recorded.call).path_len
            ids = await self._extension(found, transcript, pool)
        if ids is None:
            new = (*transcript.preface, *transcript.decode(transcript.raw))
            rendered = await self._render(new, transcript, pool)
            parent, prefix = self.tree.longest_prefix(rendered)
            ids = rendered[prefix:]
        state = self._choose_session(session, found)
        link = self._link(state, found, rendered=new is not found.new)
        forced = self.chat.encode(transcript.prefill) if transcript.prefill else _NOTHING
        context = np.concatenate([ids, forced]) if len(forced) else ids
        state.head, state.count = found.head, found.count
        return self._plans(state, parent, prefix, context, link, found, forced, n)

    def plan_text(self, prompt: str | tuple[int, ...], session: str | None, n: int) -> list[Plan]:
        """Plans for a plain completion. Text that a recorded call ends with is not encoded again."""
        if isinstance(prompt, str):
            parent, prefix, rest = self._texts.longest(prompt)
            more = self.chat.encode(rest)
            ids = np.concatenate([self.tree.path_ids(parent, prefix), more]) if prefix else more
        else:
            ids = np.asarray(prompt, dtype=np.int32)
        return self._plan_ids(ids, session, n, prompt if isinstance(prompt, str) else None)

    def _plan_ids(self, ids: NDArray[np.int32], session: str | None, n: int, text: str | None) -> list[Plan]:
        parent, prefix = self.tree.longest_prefix(ids)
        state = self._choose_session(session or "main", None)
        grew = parent >= 0 and prefix == self.tree.place(parent).path_len
        link = Link.EXTEND if grew else Link.START if state.last_call < 0 else Link.REWRITE
        return self._plans(state, parent, prefix, ids[prefix:], link, None, _NOTHING, n, text)

    def _plans(
        self,
        state: SessionState,
        parent: int,
        prefix: int,
        context: NDArray[np.int32],
        link: Link,
        match: Match | None,
        forced: NDArray[np.int32],
        n: int,
        text: str | None = None,
    ) -> list[Plan]:
        if prefix + len(context) == 0:
            raise invalid("the prompt is empty; send at least one message or token")
        buffer = self._buffer(parent, prefix)
        buffer.extend(context)
        prompt = buffer.view(0, prefix + len(context))
        new_from = self._known_to(state, parent, prefix)
        plans = []
        for _ in range(n):
            plan = Plan(self._next, state, parent, prefix, context, prompt, new_from, link, buffer, match, forced, text)
            plans.append(plan)
            self._next += 1
        self._recent = state.info.session
        return plans

    def _known_to(self, state: SessionState, parent: int, prefix: int) -> int:
        """How many of the first `prefix` tokens of `parent`'s path this session has sent or sampled before."""
        if state.last_call < 0 or prefix == 0:
            return 0
        if self._session_of.get(parent) == state.info.session:
            return prefix
        own = self.tree.path_ids(state.last_call, min(prefix, self.tree.place(state.last_call).path_len))
        return common_prefix(own, self.tree.path_ids(parent, prefix))

    async def _extension(self, found: Match, transcript: Transcript, pool: Executor) -> NDArray[np.int32] | None:
        assert found.recorded is not None
        place = self.tree.place(found.recorded.call)
        path = self.tree.tail_ids(found.recorded.call, TAIL_TOKENS + place.path_len - place.prompt_len)
        size = place.path_len - place.prompt_len
        tail, sampled = path[: len(path) - size], path[len(path) - size :]
        extend = partial(self.chat.extend, tail, sampled, found.new, transcript.tools)
        return await _off_loop(pool, sum(len(one.content) for one in found.new), extend)

    async def _render(self, messages: tuple[Message, ...], transcript: Transcript, pool: Executor) -> NDArray[np.int32]:
        size = len(transcript.raw) + len(transcript.tools_raw)
        return await _off_loop(pool, size, partial(self.chat.render, messages, transcript.tools))

    def _buffer(self, parent: int, prefix: int) -> Growable[np.int32]:
        """A buffer that holds exactly the first `prefix` tokens of `parent`'s path, reused when one is there."""
        kept = self._buffers.pop(parent, None)
        if kept is not None and len(kept) == prefix:
            return kept
        fresh: Growable[np.int32] = Growable(np.int32, capacity=prefix + prefix // 8 + 1024)
        if prefix:
            fresh.extend(self.tree.path_ids(parent, prefix))
        return fresh

    # -- sessions ------------------------------------------------------------------------------------------------

    def _session(self, name: str) -> SessionState:
        state = self.sessions.get(name)
        if state is None:
            first = not self.sessions
            info = SessionInfo(name, "main" if first else "sub_agent", None if first else self._recent, True)
            state = self.sessions[name] = SessionState(info)
        return state

    def label(self, info: SessionInfo) -> SessionState:
        """Set what is known of a session; called before the agent uses it, or to correct an inferred label."""
        state = self.sessions.get(info.session)
        if state is None:
            state = self.sessions[info.session] = SessionState(info, stored=True)
        state.info = info
        return state

    def introduce(self, session: str, parent: str) -> None:
        """A request says whose sub-agent its session is; heard once, when the session begins."""
        if session not in self.sessions:
            self.sessions[session] = SessionState(SessionInfo(session, "sub_agent", parent))

    def _choose_session(self, named: str | None, found: Match | None) -> SessionState:
        """The named one; else the one that the history belongs to; else one with the same instructions that is idle
        (the agent compacted its history); else a new one."""
        if named:
            return self._session(named)
        if found is not None and found.recorded is not None:
            return self.sessions[found.recorded.session]
        alike = [
            state
            for state in self.sessions.values()
            if found is not None and (state.head == found.head or not state.head) and state.in_flight == 0
        ]
        if alike:
            return max(alike, key=lambda state: state.last_call)
        return self._session("main" if not self.sessions else f"auto-{len(self.sessions)}")

    def _link(self, state: SessionState, found: Match, *, rendered: bool) -> Link:
        if found.chain in self._prompts:
            return Link.RETRY
        if state.last_call < 0:
            return Link.START
        if not rendered and not any(message.role == "assistant" for message in found.new):
            assert found.recorded is not None
            if found.recorded.call == state.last_call or found.count > state.count:
                return Link.EXTEND
        if self.chat.history == "template" and found.recorded is not None and not found.broken:
            return Link.TEMPLATE
        return Link.COMPACTION if found.count < state.count else Link.REWRITE

    # -- recording -----------------------------------------------------------------------------------------------

    def record(self, plan: Plan, call: CallRecord, turn: ParsedTurn | None, retry: RetryNote | None = None) -> bytes:
        """Put a finished call into the tree; `turn` is what the client is told (None: it is told nothing).

        Returns the note that belongs with the call in the store.
        """
        place = self.tree.insert(call)
        plan.session.last_call = max(plan.session.last_call, call.index)
        self._session_of[call.index] = call.session
        if len(plan.buffer) == place.prompt_len:
            plan.buffer.extend(call.sampled_ids)
            self._keep_buffer(call.index, plan.buffer)
        if plan.match is None:
            return pack_note(Note(retry=retry, text=self._note_text(plan, call, turn)))
        name, reasoning = b"", b""
        if turn is not None:
            name, reasoning = self._note_turn(plan.match.chain, call, turn)
        self._prompts.setdefault(plan.match.chain, call.index)
        return pack_note(Note(plan.match.chain, name, reasoning, plan.match.head, plan.match.count, retry))

    def _keep_buffer(self, call: int, buffer: Growable[np.int32]) -> None:
        """Keep this prompt to grow on, and the latest few others while they are small together."""
        room = _BUFFER_TOKENS
        for place, other in enumerate(reversed(tuple(self._buffers)), start=1):
            room -= len(self._buffers[other])
            if room < 0 or place >= _BUFFERS:
                del self._buffers[other]
        self._buffers[call] = buffer

    def _note_turn(self, chain: bytes, call: CallRecord, turn: ParsedTurn) -> tuple[bytes, bytes]:
        """Recognise this turn from now on; (name of the history that it ends, digest of its reasoning)."""
        message = Message("assistant", turn.content, turn.reasoning, turn.tool_calls)
        reasoning = reasoning_digest(turn.reasoning)
        return self._matcher.answered(chain, message, Recorded(call.index, call.session, reasoning)), reasoning

    def _note_text(self, plan: Plan, call: CallRecord, turn: ParsedTurn | None) -> TextNote | None:
        if plan.text is None or turn is None:
            return None
        stopped = call.finish == "stop" and int(call.sampled_ids[-1]) in self.chat.stop_ids
        size, digest = self._texts.add(plan.text + turn.content, call.index, call.path_len - stopped)
        return TextNote(size, digest, call.path_len - stopped)

    # -- telling again -------------------------------------------------------------------------------------------

    def plan_again(self, call: CallRecord, forced: str) -> Plan:
        """The plan of a call that is recorded; `forced` is the text that its prompt ended with."""
        return Plan(
            index=call.index,
            session=self.sessions[call.session],
            parent=call.parent,
            prefix_len=call.prefix_len,
            context_ids=call.context_ids,
            prompt_ids=self.tree.path_ids(call.index, call.prompt_len),
            new_from=0,
            link=call.link,
            buffer=Growable(np.int32),
            match=None,
            forced=self.chat.encode(forced) if forced else _NOTHING,
        )

    def told_again(self, call: CallRecord, note: Note, turn: ParsedTurn) -> None:
        """A client was told a recorded answer again; how it reads now is recognised too."""
        if note.request:
            self._note_turn(note.request, call, turn)

    def closed(self, info: ExecutionInfo) -> None:
        """Take over the final verdict and drop what only a running execution needs."""
        self.info = replace(info)
        self._buffers.clear()


async def _off_loop(pool: Executor, size: int, work: Callable[[], T]) -> T:
    """Do tokenizing `work` of `size` characters: long ones in the pool, so that other agents need not wait for it."""
    if size < _INLINE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(pool, work)
