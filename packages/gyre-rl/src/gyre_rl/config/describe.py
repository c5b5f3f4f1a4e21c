"""Types in words, for error messages and for the reference page.

Invariant: the same annotation reads the same in both places. Pure text.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal

from msgspec import Meta

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "nothing",
    Any: "any value",
}


def describe(annotation: Any) -> str:
    """What a value of this annotation is, as the end of "expected ..."."""
    if hasattr(annotation, "__metadata__"):
        bare, *metadata = typing.get_args(annotation)
        return describe(bare) + "".join(_bounds(m) for m in metadata if isinstance(m, Meta))
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return _one_of([json.dumps(a) for a in arguments])
    if isinstance(annotation, types.UnionType) or origin is typing.Union:
        return " or ".join(describe(a) for a in arguments if a is not type(None))
    if origin in (tuple, list, Sequence, set, frozenset):
        return f"a list of: {describe(arguments[0])}" if arguments else "a list"
    if origin in (dict, Mapping) or annotation in (dict, Mapping):
        return "a table"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _one_of([json.dumps(member.value) for member in annotation])
    if dataclasses.is_dataclass(annotation):
        return "a table"
    return getattr(annotation, "__name__", str(annotation))


def _one_of(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def _bounds(meta: Meta) -> str:
    lows = [f"at least {meta.ge}"] if meta.ge is not None else [f"above {meta.gt}"] if meta.gt is not None else []
    highs = [f"at most {meta.le}"] if meta.le is not None else [f"below {meta.lt}"] if meta.lt is not None else []
    both = " and ".join(lows + highs)
    return f", {both}" if both else ""
