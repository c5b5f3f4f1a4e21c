"""The records that cross this package's borders: executions, sessions, scores, calls.

Invariant: every record is plain, immutable data that the store can write and read back unchanged. No behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Purpose = Literal["train", "eval"]
SessionKind = Literal["main", "sub_agent"]


class Status(StrEnum):
    """How an execution stands or ended. `failed` is ours (sandbox, engine, network), never the agent's fault."""

    OPEN = "open"
    COMPLETED = "completed"
    TIMEOUT = "timeout"
    TRUNCATED = "truncated"
    FAILED = "failed"
    STALE = "stale"


class Link(StrEnum):
    """How a call's prompt relates to what its execution had recorded before.

    `start`: the first call of a session. `extend`: recorded tokens plus new messages. `retry`: the same prompt again.
    `rewrite`: the agent changed its history; a branch from the longest true prefix. `compaction`: a rewrite that
    dropped turns (all but the instructions, or the latest ones). `template`: the chat template itself rewrote old
    turns. `unknown`: imported from a file that does not say.
    """

    START = "start"
    EXTEND = "extend"
    RETRY = "retry"
    REWRITE = "rewrite"
    COMPACTION = "compaction"
    TEMPLATE = "template"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Prescribed:
    """Sampling that holds for every call of an execution, whatever its agent asks for.

    The loss needs the distribution that the trainer computes. An agent's own temperature, filters (top-k, min-p),
    penalties and logit biases would draw from another one; they are set aside. Lengths, stops, seeds and n are its own.
    """

    temperature: float
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class ExecutionSpec:
    """What the caller knows when it opens an execution: attempt number `execution` (a unique name) at `task`."""

    execution: str
    task: str = ""
    group: str = ""
    step: int = 0
    purpose: Purpose = "train"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prescribed: Prescribed | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """A scorer's verdict: `value` (usually 0 to 1) and, by name, the share of every milestone that was reached."""

    value: float
    milestones: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenedExecution:
    """The way in for one agent: give it `api_key` and `base_url` (or only `keyed_base_url`, which holds the key)."""

    execution: str
    api_key: str
    base_url: str
    keyed_base_url: str


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A conversation of an execution. `inferred`: the proxy told it apart by itself, nobody labelled it."""

    session: str
    kind: SessionKind = "main"
    parent: str | None = None
    inferred: bool = False


@dataclass(frozen=True, slots=True)
class ExecutionInfo:
    """An execution as the store knows it. Times are seconds since the epoch; `closed_at` is None while open."""

    execution: str
    task: str
    group: str
    step: int
    purpose: Purpose
    metadata: Mapping[str, Any]
    status: Status
    score: Score | None
    cause: str
    opened_at: float
    closed_at: float | None
    calls: int
    context_tokens: int
    sampled_tokens: int
    prescribed: Prescribed | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CallRecord:
    """One answered (or cut) call, exactly as the engine saw it; the unit that is on disk before an answer leaves.

    Its prompt is the first `prefix_len` tokens of call `parent`'s path (that call's prompt followed by what it
    sampled; `parent=-1`: the empty path) followed by `context_ids` int32[C]. `sampled_ids` int32[S], `logprobs`
    float32[S], `versions` int32[S] are what came back. `finish`: the engine's reason, `stop_string` when the proxy
    stopped it, `disconnect` when the client went away, `error` when the engine failed. `routed_experts` int16[S or
    more, layers, top_k] starts at absolute position `routed_from`. `meta` is what only people read (dialect, latency,
    branch details).
    """

    index: int
    session: str
    parent: int
    prefix_len: int
    context_ids: NDArray[np.int32]
    sampled_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: str
    link: Link = Link.UNKNOWN
    cached_tokens: int | None = None
    started_at: float = 0.0
    ended_at: float = 0.0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: NDArray[np.int16] | None = None
    routed_from: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_len(self) -> int:
        """Tokens of the whole prompt."""
        return self.prefix_len + len(self.context_ids)

    @property
    def path_len(self) -> int:
        """Tokens of prompt and sampled together."""
        return self.prompt_len + len(self.sampled_ids)
