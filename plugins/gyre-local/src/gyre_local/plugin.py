"""Entry point of the plugin: names the embedded engine and trainer.

Invariant: imports neither torch nor transformers, so that listing plugins stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterable

from gyre_core import Kind, Registration, hookimpl

NEEDS = ("torch", "safetensors", "numpy")


@hookimpl
def gyre_register() -> Iterable[Registration]:
    """The engine "local" and the trainer "local"."""
    return [
        Registration(
            Kind.ENGINE,
            "local",
            "gyre_local.serve.engine:LocalEngine",
            options="gyre_local.options:LocalEngineOptions",
            summary="embedded inference engine in plain torch: Qwen3, Qwen2 and Llama; CPU or one GPU",
            requires=NEEDS,
        ),
        Registration(
            Kind.TRAINER,
            "local",
            "gyre_local.train.trainer:LocalTrainer",
            options="gyre_local.options:LocalTrainerOptions",
            summary="embedded trainer: tree losses on a transformers model, AdamW, gradient contributions",
            requires=(*NEEDS, "transformers", "gyre_loss"),
        ),
    ]
