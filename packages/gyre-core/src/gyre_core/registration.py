"""How a plugin says what it brings: strings only, so that listing plugins imports nothing heavy.

Invariant (a house rule of CONTRIBUTING.md): a `Registration` names its class as "module:Class"; importing the module
named in an entry point must not import torch, an engine or a trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Kinds of components a plugin can bring."""

    ENGINE = "engine"
    TRAINER = "trainer"
    SCORER = "scorer"
    HARNESS = "harness"
    SANDBOX = "sandbox"
    TASKSET = "taskset"
    TRANSPORT = "transport"
    LAUNCHER = "launcher"
    POLICY = "policy"
    OBJECTIVE = "objective"
    SINK = "sink"


@dataclass(frozen=True, slots=True)
class Registration:
    """One component of a plugin.

    `target` is "module:Class". The class is made by `Class(options, context)`, where `options` is an instance of the
    frozen dataclass named by `options` ("module:Class", import-light; defaults give a usable component) and `context` a
    `ComponentContext`.
    """

    kind: Kind
    name: str
    target: str
    options: str | None = None
    summary: str = ""
    requires: tuple[str, ...] = ()
    """Modules that must be importable for it to work; checked without importing them."""

    def __post_init__(self) -> None:
        for what, text in (("target", self.target), ("options", self.options)):
            if text is not None and (text.count(":") != 1 or not all(text.split(":"))):
                raise ValueError(
                    f"registering {self.kind} {self.name!r}: {what} is {text!r}, expected 'module:Class' "
                    "(a string, so that listing plugins imports nothing)"
                )


@dataclass(frozen=True, slots=True)
class ComponentContext:
    """What a component may know of where it runs."""

    run_dir: str
    name: str
    """Of the process or cell it lives in."""
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    accelerators: int = 0
    """Accelerators that are this cell's own (the process sees no others); 0 on CPU."""
    base_dir: str = "."
    """Folder of the run's configuration file: relative paths in options mean this folder."""
    address: str = "127.0.0.1"
    """This machine's address for the other machines of the run; the loopback one when there are none."""
    extra: Mapping[str, Any] = field(default_factory=dict)
