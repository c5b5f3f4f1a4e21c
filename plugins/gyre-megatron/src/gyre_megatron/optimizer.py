"""Megatron's optimizer over one model chunk, and where it keeps its state.

Invariant: clipping, dividing and reducing are done before; a step here is AdamW alone, with float32 masters where the
weights are narrower. Works with torch's AdamW as well as with the fused ones that Megatron takes when apex or
TransformerEngine are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW as Megatron makes it."""

    def __init__(self, options: Any, chunk: Any) -> None:
        library: Any = import_module("megatron.core.optimizer")
        narrow = options.dtype == "bfloat16"
        self._narrow = narrow
        config = library.OptimizerConfig(
            optimizer="adam", lr=options.learning_rate, min_lr=0.0, weight_decay=options.weight_decay,
            adam_beta1=options.beta1, adam_beta2=options.beta2, adam_eps=options.eps, clip_grad=0.0, bf16=narrow,
            params_dtype=torch.bfloat16 if narrow else torch.float32,
        )  # fmt: skip
        self._whole = library.get_megatron_optimizer(config, [chunk])

    def _inner(self) -> Iterator[Any]:
        """The plain optimizers inside."""
        for each in getattr(self._whole, "chained_optimizers", [self._whole]):
            if each.optimizer is not None:
                yield each.optimizer

    def _of(self, parameter: nn.Parameter) -> tuple[Any, Tensor]:
        """Which plain optimizer has a parameter, and as which tensor."""
        master: Any = getattr(parameter, "main_param", parameter) if self._narrow else parameter
        for inner in self._inner():
            if any(master is other for group in inner.param_groups for other in group["params"]):
                return inner, master
        raise ValueError(f"looking for a parameter of shape {tuple(parameter.shape)}: no optimizer has it")

    def reload(self) -> None:
        """Masters from weights."""
        self._whole.reload_model_params()

    def step(self, rate: float) -> None:
        """One step from the parameters' `main_grad`."""
        for inner in self._inner():
            for group in inner.param_groups:
                group["lr"] = rate
        done, _, _ = self._whole.step()
        self._whole.zero_grad()  # parameters hold their main_grad as .grad: the next backward would add it twice
        if not done:
            raise RuntimeError("Megatron's optimizer did not step though every gradient is finite")

    def states(self, parameters: Sequence[nn.Parameter]) -> Mapping[str, Sequence[Tensor]]:
        """Moments (zeros where there are none yet) and, with narrow weights, masters; one tensor a parameter."""
        found: dict[str, list[Tensor]] = {kind: [] for kind in MOMENTS}
        if self._narrow:
            found["master"] = []
        for parameter in parameters:
            inner, master = self._of(parameter)
            state = inner.state[master]
            for kind in MOMENTS:
                found[kind].append(state.setdefault(kind, torch.zeros_like(master)))
            if isinstance(inner, torch.optim.AdamW | torch.optim.Adam):
                state.setdefault("step", torch.tensor(0.0))
            if self._narrow:
                found["master"].append(master.data)
        return found

    def set_steps(self, steps: int) -> None:
        """As if `steps` had been done; torch counts a parameter, fused optimizers a group."""
        for inner in self._inner():
            for state in inner.state.values():
                if "step" in state:
                    state["step"] = torch.tensor(float(steps))
            for group in inner.param_groups:
                if "step" in group:
                    group["step"] = steps
