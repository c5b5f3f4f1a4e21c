"""KL estimators from one sample's log-probabilities: KL(policy || reference), Schulman's k1, k2, k3.

``logp`` [E] with gradient, ``reference`` [E] constant, results [E]. Source: J. Schulman, "Approximating KL
divergence" (2020). What each gives as a loss differs from what it gives as a number: the gradient of k2 is that of
the KL (on-policy); that of k1 is zero in expectation; that of k3 is the gradient of KL(reference || policy).
docs/why/loss-objectives.md says more.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(logp: Tensor, reference: Tensor) -> Tensor:
    """logp - ref: unbiased, can be negative.

    >>> k1(torch.tensor([-1.0]), torch.tensor([-1.5])).tolist()
    [0.5]
    """
    return logp - reference


def k2(logp: Tensor, reference: Tensor) -> Tensor:
    """(logp - ref)^2 / 2: biased, never negative.

    >>> k2(torch.tensor([-1.0]), torch.tensor([-1.5])).tolist()
    [0.125]
    """
    return 0.5 * (logp - reference).square()


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """exp(ref - logp) - 1 - (ref - logp): unbiased, never negative.

    >>> round(k3(torch.tensor([-1.0]), torch.tensor([-1.5])).item(), 6)
    0.106531
    """
    log_ratio = reference - logp
    return torch.expm1(log_ratio) - log_ratio
