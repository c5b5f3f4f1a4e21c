"""Whether trainer and engine agree on what the policy says, asked before the first optimizer step.

Both compute the log-probability of the same sampled tokens under the same weights; where they differ by more than the
number format explains, the loss is about another model than the one that acted (rope settings, a missing norm, padded
vocabulary, wrong temperature, unreplayed routing). Invariant: the figures come from the step's own gradients, so asking
costs no forward pass. Pure. Not here: what a later step's gap says, which is staleness too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gyre_core import InfrastructureError

from gyre_rl.run.metrics import COUNT, MAX

GAP = "gap_abs"
"""Name of gyre-loss's metric: |trainer - engine| log-probability in nats."""


@dataclass(frozen=True, slots=True)
class Parity:
    """The gap over `tokens` sampled tokens, in nats."""

    mean: float
    largest: float
    tokens: int


def measure(parts: Iterable[Mapping[str, float]]) -> Parity | None:
    """The gap out of the metrics of a step's contributions; None when the trainer does not report it."""
    total, tokens, largest = 0.0, 0.0, 0.0
    for part in parts:
        total += part.get(GAP, 0.0)
        tokens += part.get(GAP + COUNT, 0.0)
        largest = max(largest, part.get(GAP + MAX, 0.0))
    return Parity(total / tokens, largest, int(tokens)) if tokens else None


def require(parity: Parity, bound: float) -> None:
    """Raise InfrastructureError when the mean gap is above `bound` nats, or is no number."""
    if parity.mean <= bound:
        return
    raise InfrastructureError(
        "comparing trainer and engine before the first step",
        got=f"log-probabilities of the same {parity.tokens} tokens that differ by {parity.mean:.4g} nats on average "
        f"and {parity.largest:.4g} at most",
        expected=f"a mean of at most {bound:g} (loss.max_logprob_gap)",
        fix="Nothing was stepped. The two do not compute the same model: compare rope settings, tied embeddings, "
        "vocabulary padding, sampling temperature and routed experts, and the number formats of both.",
    )
