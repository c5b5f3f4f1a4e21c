"""Which weights sampled which token of a call.

Invariant: a token's label is fixed by its index alone: the version of the last change at or before it. A change is
entered while the server is paused, at the number of tokens sampled by then, so that tokens which arrive later but were
sampled before still get the old version. `check` compares with the server's own account when an answer ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from gyre_core import InfrastructureError

from gyre_vllm.wire import Span


class VersionLabels:
    """Versions of one call's sampled tokens, by index."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._versions: list[int] = []

    def change(self, start: int, version: int) -> None:
        """Tokens from index `start` on are sampled under `version`."""
        while self._starts and self._starts[-1] >= start:
            self._starts.pop()
            self._versions.pop()
        if not self._versions or self._versions[-1] != version:
            self._starts.append(start)
            self._versions.append(version)

    def of(self, start: int, count: int) -> tuple[int, ...]:
        """Versions of `count` tokens from index `start` on."""
        return tuple(self._versions[bisect_right(self._starts, i) - 1] for i in range(start, start + count))

    def check(self, spans: Sequence[Span], start: int, count: int, doing: str) -> None:
        """InfrastructureError when the server's spans of the answer that began at token `start` say otherwise."""
        if not spans:
            return
        told = [span.version for span in spans for _ in range(span.start, span.end)]
        ours = [str(version) for version in self.of(start, count)]
        if told != ours:
            at = next((i for i, (a, b) in enumerate(zip(told, ours, strict=False)) if a != b), min(len(told), count))
            raise InfrastructureError(
                doing,
                got=f"weight versions that differ from ours from token {start + at} on (server: {list(spans)})",
                expected=f"{ours[at : at + 1]}",
                fix="Somebody else changes this server's weights; give the run a server of its own.",
            )
