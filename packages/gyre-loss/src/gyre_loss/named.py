"""Objectives by name and options, as a configuration file says them; metrics as flat numbers.

The invariant: every key of the options is used or refused with the nearest valid one. The formulas are in the modules
that are named here; an objective of somebody else's is named by where it is defined.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gyre_loss._check import fail
from gyre_loss.kl import k1, k2, k3
from gyre_loss.metrics import LossMetrics
from gyre_loss.objective import KLPenalty, Objective, PolicyLoss
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


def make_objective(name: str, options: Mapping[str, Any]) -> Objective:
    """The objective ``name`` (ppo, dapo, gspo, cispo, reinforce) with ``options``: ``low``, ``high``, ``dual`` of its
    surrogate; ``proximal`` (behaviour, recorded, current); ``correction`` (truncated, masked, execution_masked) and
    ``correction_options``; ``kl`` (k1, k2, k3) and ``kl_coefficient``; ``entropy_coefficient``. A name
    ``"module:Class"`` is an objective of your own, ``Class(**options)``. Raises ValueError for anything else.
    """
    doing = f"composing the objective {name!r}"
    if ":" in name:
        return _imported(name, options, doing)
    for key in options:
        _pick(key, _KEYS, f"{doing}: an option")
    bounds = {key: options[key] for key in _BOUNDS if key in options}
    correction, estimator = options.get("correction"), options.get("kl")
    if (estimator is None) != ("kl_coefficient" not in options):
        fail(doing, "only one of kl and kl_coefficient", "both or neither")
    surrogate = SURROGATES[_pick(name, SURROGATES, "choosing an objective")]
    try:
        return PolicyLoss(
            surrogate=surrogate(**bounds),
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
    except TypeError as error:
        return fail(doing, str(error), f"options that {name} takes{_fields(surrogate)}")


def _imported(path: str, options: Mapping[str, Any], doing: str) -> Objective:
    module, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - boundary: a foreign module may fail with anything while it is imported
        return fail(doing, f"{type(error).__name__}: {error}", f"a module {module} that can be imported")
    try:
        made = getattr(found, attribute)(**options)
    except (AttributeError, TypeError) as error:
        return fail(doing, f"{type(error).__name__}: {error}", "an importable module:Class that takes these options")
    if not isinstance(made, Objective):
        return fail(doing, f"a {type(made).__name__}", "needs_entropy, whole_executions and a call (Objective)")
    return made


def flat_metrics(metrics: LossMetrics) -> dict[str, float]:
    """Metrics as flat numbers: sums under their name, their counts under ``<name>:count``, maxima under ``<name>:max``,
    entries of policy version v under ``version:<v>``. All but maxima add up over micro-batches."""
    found: dict[str, float] = dict(metrics.sums)
    found |= {f"{name}:count": float(count) for name, count in metrics.counts.items()}
    found |= {f"{name}:max": value for name, value in metrics.maxima.items()}
    found |= {f"version:{version}": float(count) for version, count in metrics.versions.items()}
    return found


def _fields(surrogate: Callable[..., Any]) -> str:
    if not dataclasses.is_dataclass(surrogate):
        return ""
    return f" ({', '.join(field.name for field in dataclasses.fields(surrogate)) or 'none of its own'})"


def _pick(name: str, known: Iterable[str], doing: str) -> str:
    names = list(known)
    if name in names:
        return name
    near = difflib.get_close_matches(str(name), names, 1)
    return fail(doing, repr(name), f"one of {', '.join(names)}", f"Did you mean {near[0]!r}?" if near else "")
