"""Readers for the rollout files that other frameworks write: verifiers, prime-rl, slime, verl.

Formats as their public code writes and wrote them (2025-2026); one module for each. What a format cannot say stays
unknown. Pickles are read by an unpickler that builds plain data only and runs no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gyre_tito.foreign import prime_rl, slime, verifiers, verl
from gyre_tito.foreign.base import ForeignFileError, lines
from gyre_tito.rollouts import Rollout

__all__ = ["FORMATS", "ForeignFileError", "read_rollouts"]

FORMATS: dict[str, Callable[[Path], Iterator[Rollout]]] = {
    "verifiers": verifiers.read,
    "prime-rl": prime_rl.read,
    "slime": slime.read,
    "verl": verl.read,
}


def read_rollouts(path: str | Path, form: str | None = None) -> tuple[str, list[Rollout]]:
    """(format, rollouts) of a file; `form` is one of `FORMATS`, None looks at the content."""
    where = Path(path)
    name = form or _guess(where)
    if name not in FORMATS:
        raise ForeignFileError(f"reading {where}: format {name!r} is unknown; use {', '.join(FORMATS)}")
    try:
        return name, list(FORMATS[name](where))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ForeignFileError(f"reading {where} as {name}: {type(error).__name__}: {error}") from error


def _guess(where: Path) -> str:
    if where.suffix == ".pt":
        return "slime"
    if where.suffix in (".bin", ".msgpack"):
        return "prime-rl"
    first = next(lines(where), None)
    if first is None:
        raise ForeignFileError(f"reading {where}: the file is empty")
    _, row = first
    if "traces" in row or "nodes" in row or "trajectory" in row or "example_id" in row:
        return "verifiers"
    if "token_ids" in row and "inference_logprobs" in row:
        return "prime-rl"
    if "tokens" in row and "response_length" in row:
        return "slime"
    if "input" in row and "output" in row:
        return "verl"
    raise ForeignFileError(
        f"reading {where}: the fields {', '.join(sorted(row)[:8])} fit none of {', '.join(FORMATS)}; name the format"
    )
