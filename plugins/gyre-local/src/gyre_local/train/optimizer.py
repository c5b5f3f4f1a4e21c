"""The step's sum and the optimizer: only the core has one.

Invariants: a micro-batch counts once; contributions are summed in the order of their ids, so that the result does not
depend on when they arrived; the sum is divided once; a gradient that is not finite steps nothing and is named.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from gyre_core import Contribution, StepResult
from torch import nn

from gyre_local.options import LocalTrainerOptions
from gyre_local.train.contributions import Gradients

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class _Added:
    contribution: Contribution
    gradients: Gradients


class Optimizer:
    """AdamW over named parameters, with float32 master weights where the model's are narrower."""

    def __init__(self, options: LocalTrainerOptions, parameters: Mapping[str, nn.Parameter]) -> None:
        self.options = options
        self._parameters = dict(parameters)
        self._masters = {name: _master(p) for name, p in parameters.items()}
        self._adam = torch.optim.AdamW(
            [
                {"params": [m for m in self._masters.values() if m.ndim > 1], "weight_decay": options.weight_decay},
                {"params": [m for m in self._masters.values() if m.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
        )
        self.steps = 0
        self._added: dict[str, _Added] = {}

    # The step's sum

    def add(self, contribution: Contribution, gradients: Gradients, version: int) -> None:
        """Take a contribution; ValueError when it or one of its batches was counted, or it is of another version."""
        doing = f"adding contribution {contribution.id!r} of step {contribution.step}"
        if contribution.version != version:
            raise ValueError(f"{doing}: got gradients of policy version {contribution.version}, expected {version}")
        if contribution.id in self._added:
            raise ValueError(f"{doing}: it was added already")
        steps = {entry.contribution.step for entry in self._added.values()}
        if steps and contribution.step not in steps:
            raise ValueError(f"{doing}: expected step {min(steps)}, which the others of the sum have")
        counted = {batch for entry in self._added.values() for batch in entry.contribution.batch_ids}
        twice = sorted(counted & set(contribution.batch_ids))
        if twice or len(set(contribution.batch_ids)) < len(contribution.batch_ids):
            raise ValueError(f"{doing}: got micro-batches that were counted already ({twice[:5]}), expected new ones")
        self._added[contribution.id] = _Added(contribution, gradients)

    def clear(self) -> None:
        """Forget the step's sum."""
        self._added = {}

    def step(self, divisor: float, version: int) -> StepResult:
        """Divide, clip, step. The version rises by one in any case: a step without contributions (every group had equal
        scores) or with a gradient that is not finite leaves the weights as they are and says so in `skipped`.
        """
        started = time.perf_counter()
        if not (math.isfinite(divisor) and divisor > 0):
            raise ValueError(f"stepping: got divisor {divisor}, expected a positive number")
        rate = self._learning_rate()
        if not self._added:
            return StepResult(version + 1, 0.0, rate, time.perf_counter() - started, skipped="no contribution")
        blame = self._blame()
        norm = float("nan") if blame else self._set_gradients(divisor)
        if not blame and not math.isfinite(norm):
            blame = "the norm of the summed gradient is not finite though each contribution is"
        if blame:
            self.clear()
            self._adam.zero_grad(set_to_none=True)
            return StepResult(version + 1, norm, rate, time.perf_counter() - started, skipped=blame)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._publish_masters()
        self.steps += 1
        self.clear()
        return StepResult(version + 1, norm, rate, time.perf_counter() - started)

    def _learning_rate(self) -> float:
        options = self.options
        warm = min(1.0, (self.steps + 1) / options.warmup_steps) if options.warmup_steps else 1.0
        return options.learning_rate * warm

    def _blame(self) -> str:
        """Which contributions are not finite, and whose micro-batches; empty when all are."""
        guilty = []
        for name, entry in sorted(self._added.items()):
            if not all(bool(torch.isfinite(g).all()) for g in entry.gradients.tensors.values()):
                suspects = "; ".join(map(str, entry.gradients.suspects)) or "no micro-batch stood out"
                guilty.append(f"contribution {name} has a gradient that is not finite: {suspects}")
        return "; ".join(guilty)

    @torch.no_grad()
    def _set_gradients(self, divisor: float) -> float:
        """Sum in the order of ids, divide once, clip; the norm before clipping."""
        ordered = [entry.gradients.tensors for _, entry in sorted(self._added.items())]
        for name, master in self._masters.items():
            total = ordered[0][name].to(master.device, master.dtype, copy=True)
            for tensors in ordered[1:]:
                total += tensors[name].to(master.device, master.dtype)
            master.grad = total.div_(divisor)
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
        bound = self.options.max_grad_norm
        if bound and norm > bound:
            for gradient in gradients:
                gradient.mul_(bound / norm)
        return norm

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    # At rest

    def state(self) -> dict[str, torch.Tensor]:
        """All of the optimizer's state as named tensors: moments, step counts, master weights."""
        found: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            kept = self._adam.state.get(master, {})
            for moment in MOMENTS:
                found[f"{moment}/{name}"] = kept.get(moment, torch.zeros_like(master))
            found[f"step/{name}"] = torch.as_tensor(kept.get("step", 0.0), dtype=torch.float64)
            if master is not self._parameters[name]:
                found[f"master/{name}"] = master
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """What `state` gave. KeyError when a tensor is missing."""
        self.clear()
        self.steps = steps
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.copy_(state[f"master/{name}"])
            moments = {
                moment: state[f"{moment}/{name}"].to(master.device, master.dtype, copy=True) for moment in MOMENTS
            }
            step = torch.tensor(float(state[f"step/{name}"]), dtype=torch.float32)
            self._adam.state[master] = {"step": step, **moments}

    def move(self, device: torch.device) -> None:
        """Moments and separate masters to another device (masters that are the model's move with it)."""
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.data = master.data.to(device)
            for moment in MOMENTS:
                if moment in self._adam.state.get(master, {}):
                    self._adam.state[master][moment] = self._adam.state[master][moment].to(device)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))
