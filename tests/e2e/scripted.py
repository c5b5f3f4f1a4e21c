"""The plugin of these tests' own components, by which a run must come to what a test is about: names, as strings."""

from __future__ import annotations

from collections.abc import Iterator

from gyre_core import Kind, Registration, hookimpl


@hookimpl
def gyre_register() -> Iterator[Registration]:
    """Register policy and trainer."""
    yield Registration(Kind.POLICY, "turning", "turning:Turning", summary="turns a cell while sessions rest on it")
    yield Registration(
        Kind.TRAINER,
        "unfinished",
        "unfinished:Unfinished",
        options="gyre_local.options:LocalTrainerOptions",
        summary="whose satellites never finish",
    )
