"""Objectives by name: what trainer options say, as gyre-loss's objects.

Invariant: every key of the options is used or refused with the nearest valid one; the formulas are gyre-loss's.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gyre_core import ConfigError
from gyre_loss.kl import k1, k2, k3
from gyre_loss.objective import KLPenalty, PolicyLoss
from gyre_loss.ratios import (
    ExecutionMasked,
    Masked,
    Truncated,
    behaviour_is_proximal,
    current_is_proximal,
    recorded_proximal,
)
from gyre_loss.surrogates import Clip, ClippedWeight, Reinforce, SequenceClip

SURROGATES: Mapping[str, Callable[..., Any]] = {
    "ppo": Clip,
    "dapo": lambda low=0.2, high=0.28, dual=None: Clip(low, high, dual),
    "gspo": SequenceClip,
    "cispo": ClippedWeight,
    "reinforce": Reinforce,
}
PROXIMAL = {"behaviour": behaviour_is_proximal, "recorded": recorded_proximal, "current": current_is_proximal}
CORRECTIONS: Mapping[str, Callable[..., Any]] = {
    "truncated": Truncated,
    "masked": Masked,
    "execution_masked": ExecutionMasked,
}
ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
_BOUNDS = ("low", "high", "dual")
_KEYS = (*_BOUNDS, "proximal", "correction", "correction_options", "kl", "kl_coefficient", "entropy_coefficient")


def make_objective(name: str, options: Mapping[str, Any]) -> PolicyLoss:
    """The objective `name` with `options`: "low", "high", "dual" of its surrogate; "proximal" (behaviour, recorded,
    current); "correction" (truncated, masked, execution_masked) and "correction_options"; "kl" (k1, k2, k3) and
    "kl_coefficient"; "entropy_coefficient". ConfigError for anything else."""
    doing = f"composing the objective {name!r}"
    for key in options:
        _pick(key, _KEYS, f"{doing}: an option")
    bounds = {key: options[key] for key in _BOUNDS if key in options}
    correction = options.get("correction")
    estimator = options.get("kl")
    if (estimator is None) != ("kl_coefficient" not in options):
        raise ConfigError(doing, got="only one of kl and kl_coefficient", expected="both or neither")
    try:
        return PolicyLoss(
            surrogate=SURROGATES[_pick(name, SURROGATES, "choosing an objective")](**bounds),
            proximal=PROXIMAL[_pick(options.get("proximal", "behaviour"), PROXIMAL, f"{doing}: proximal")],
            correction=None
            if correction is None
            else CORRECTIONS[_pick(correction, CORRECTIONS, f"{doing}: correction")](
                **options.get("correction_options", {})
            ),
            kl=None
            if estimator is None
            else KLPenalty(ESTIMATORS[_pick(estimator, ESTIMATORS, f"{doing}: kl")], float(options["kl_coefficient"])),
            entropy_coefficient=float(options.get("entropy_coefficient", 0.0)),
        )
    except (TypeError, ValueError) as error:
        known = _fields(SURROGATES[name])
        raise ConfigError(doing, got=str(error), expected=f"options that {name} takes{known}") from error


def _fields(surrogate: Callable[..., Any]) -> str:
    if not dataclasses.is_dataclass(surrogate):
        return ""
    return f" ({', '.join(field.name for field in dataclasses.fields(surrogate)) or 'none of its own'})"


def _pick(name: str, known: Iterable[str], doing: str) -> str:
    names = list(known)
    if name in names:
        return name
    near = difflib.get_close_matches(str(name), names, 1)
    raise ConfigError(
        doing,
        got=repr(name),
        expected=f"one of {', '.join(names)}",
        fix=f"Did you mean {near[0]!r}?" if near else "",
    )
