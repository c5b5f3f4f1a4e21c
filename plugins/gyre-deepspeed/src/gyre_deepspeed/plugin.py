"""Entry point of the plugin: names its components; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from gyre_core import Kind, Registration, hookimpl


@hookimpl
def gyre_register() -> Iterable[Registration]:
    """The trainer "deepspeed"."""
    return [
        Registration(
            Kind.TRAINER,
            "deepspeed",
            "gyre_deepspeed.trainer:DeepSpeedTrainer",
            options="gyre_deepspeed.options:DeepSpeedTrainerOptions",
            summary="transformers models under DeepSpeed ZeRO 1, 2 or 3, in rank processes of their own environment",
            requires=("gyre_loss",),
        )
    ]
