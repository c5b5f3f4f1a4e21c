"""Entry point of the plugin: names the engine; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from gyre_core import Kind, Registration, hookimpl


@hookimpl
def gyre_register() -> Iterable[Registration]:
    """The engine "vllm"."""
    return [
        Registration(
            Kind.ENGINE,
            "vllm",
            "gyre_vllm.engine:VLLMEngine",
            options="gyre_vllm.options:VLLMOptions",
            summary="vLLM 0.32 over HTTP: started in an environment of its own, or running already",
            requires=("aiohttp", "numpy"),
        )
    ]
