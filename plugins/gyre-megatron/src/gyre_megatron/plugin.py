"""Entry point of the plugin: names its components; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from gyre_core import Kind, Registration, hookimpl


@hookimpl
def gyre_register() -> Iterable[Registration]:
    """The trainer "megatron"."""
    return [
        Registration(
            Kind.TRAINER,
            "megatron",
            "gyre_megatron.trainer:MegatronTrainer",
            options="gyre_megatron.options:MegatronTrainerOptions",
            summary="Megatron-Core on trees: tensor, pipeline, expert and data parallel; Qwen3, Qwen2, Llama",
            requires=("gyre_loss",),
        )
    ]
