"""Entry point of the plugin: names the engine; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from gyre_core import Kind, Registration, hookimpl


@hookimpl
def gyre_register() -> Iterable[Registration]:
    """The engine "sglang"."""
    return [
        Registration(
            Kind.ENGINE,
            "sglang",
            "gyre_sglang.engine:SGLangEngine",
            options="gyre_sglang.options:SGLangOptions",
            summary="SGLang 0.5.23 in an environment of its own, over HTTP; GPU, or CPU in plain torch",
            requires=("aiohttp", "numpy"),
        )
    ]
