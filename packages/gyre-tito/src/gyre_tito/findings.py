"""What `check` can find: one entry for every kind of fault, with the law it breaks and its likely cause.

Invariant: a code means the same forever; tools may rely on it. Data only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault. `faults`: numbers of the public reports of such faults that it stands for."""

    severity: Severity
    law: str
    cause: str


KINDS: dict[str, Kind] = {
    # tokens along a path
    "retokenized": Kind(
        "error",
        "5.1",
        "sampled text was decoded and encoded again; the same text split into other tokens. Keep sampled ids",
    ),
    "turn-end": Kind(
        "error",
        "5.1",
        "stop token and the newline after it are on one side only. Record the sampled stop token; add the template's "
        "newline as context",
    ),
    "tool-call-rendered": Kind(
        "error", "5.1", "a tool call was parsed and rendered back with other spacing, key order, numbers or name"
    ),
    "tool-call-dropped": Kind("error", "5.1", "the next prompt lacks a tool call that was sampled; the parser lost it"),
    "reasoning-stripped": Kind(
        "error", "5.1", "the template removed old reasoning; that is a branch, not a continuation"
    ),
    "prompt-diverges": Kind(
        "error", "5.1", "the next prompt does not continue what was sampled; the history was rewritten without a branch"
    ),
    "context-trains": Kind(
        "error", "5.6", "tokens that the policy did not sample (tool output, template text) carry loss"
    ),
    "sampled-does-not-train": Kind("note", "5.2", "sampled tokens that carry no loss; intended masks only"),
    "token-out-of-range": Kind("error", "5.1", "a token id is negative or outside the vocabulary"),
    "no-tokens": Kind(
        "warning", "5.1", "the file has text only; any training tokens would be encoded again, which is not what ran"
    ),
    # sampled tokens
    "length-mismatch": Kind("error", "5.2", "tokens, logprobs, versions or masks of one call differ in length"),
    "logprob-missing": Kind(
        "error", "5.2", "sampled tokens without a behaviour logprob; off-policy correction is blind"
    ),
    "logprob-impossible": Kind("error", "5.2", "a logprob above 0, or infinite"),
    "logprob-padding": Kind("error", "5.2", "runs of exactly 0.0 logprobs: padding, or context counted as sampled"),
    "logprob-gap": Kind(
        "warning",
        "5.2",
        "engine and trainer do not agree on the tokens that were sampled: other weights, kernels or precision, or a "
        "temperature that one side leaves out",
    ),
    "version-missing": Kind("warning", "5.2", "sampled tokens without a policy version; staleness cannot be bounded"),
    "version-mixed": Kind(
        "warning",
        "5.2",
        "one rollout spans several policy versions; fine if every token says which and it is corrected for",
    ),
    "version-decreases": Kind("error", "5.2", "the policy version goes down along a path; an engine kept old weights"),
    "cache-across-versions": Kind(
        "warning",
        "5.6",
        "the prefix cache was not emptied when the weights changed; keys and values of an old policy were used",
    ),
    "finish-mismatch": Kind("warning", "5.6", "the finish reason and the last sampled token contradict each other"),
    # executions and groups
    "truncated-as-completed": Kind(
        "error", "8", "an execution whose last call ran into a limit is recorded as finished"
    ),
    "failed-with-score": Kind(
        "error", "8", "a failure of the infrastructure carries a score; it must be in no baseline and never a zero"
    ),
    "cut-in-baseline": Kind(
        "warning", "8", "a cut execution is masked out of the loss but its reward still counts in the group's baseline"
    ),
    "unfinished": Kind("note", "11", "an execution without an end; a resumed run must go on with it"),
    "group-of-one": Kind(
        "error", "6", "every group has one member: groups are keyed by the attempt, nothing is centred"
    ),
    "group-mixed": Kind("error", "6", "one group holds different tasks; its baseline compares what cannot be compared"),
    "group-uneven": Kind(
        "warning", "6", "groups of one step and purpose have different sizes; check that reductions are per group"
    ),
    "rows-count-twice": Kind(
        "error", "6", "one execution has several rows with a reward each; it counts several times in the baseline"
    ),
    "group-flat": Kind("note", "6", "all scores of a group are equal; it has no gradient, or only one from shaping"),
    "group-missing": Kind("warning", "6", "rollouts without a group; no baseline can be formed"),
    # files
    "damaged": Kind("error", "5.4", "data in the store cannot be read back"),
    "broken-link": Kind("error", "5.1", "a call's parent or prefix does not exist"),
    "extends-too-little": Kind(
        "error", "5.3", "a call marked as a continuation does not continue its parent's whole path"
    ),
    "unknown-session": Kind("warning", "5.3", "a call belongs to a session that is not recorded"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken law at one place. `tokens`: ids around the place, where that helps. `level`: how bad this one is,
    where it is less or more than its kind."""

    code: str
    execution: str
    message: str
    place: str = ""
    call: int | None = None
    token: int | None = None
    tokens: tuple[int, ...] = ()
    level: Severity | None = None

    @property
    def severity(self) -> Severity:
        """How bad it is."""
        return self.level or KINDS[self.code].severity

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        kind = KINDS[self.code]
        return {
            "code": self.code,
            "severity": self.severity,
            "law": kind.law,
            "execution": self.execution,
            "place": self.place,
            "call": self.call,
            "token": self.token,
            "tokens": list(self.tokens),
            "message": self.message,
            "cause": kind.cause,
        }
