"""The reference of a run's events, generated from their dataclasses.

python -m gyre_rl.views.reference > docs/reference/events.md
"""

from __future__ import annotations

import inspect
import sys

from gyre_rl.config.reference import entries
from gyre_rl.views import events as ev

HEAD = """# Events of a run

A run appends its events to `events.jsonl` in the run directory, one JSON object a line: `time` (seconds since the
epoch), `kind` and `data`. Sinks get the same events while the run goes on. This page is generated from the dataclasses
in `gyre_rl.views.events`. A cell is named `name#incarnation`; durations are seconds. A reader skips kinds and fields
that it does not know.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    for kind, cls in ev.KINDS.items():
        parts += [f"## {kind}\n", f"{inspect.cleandoc(cls.__doc__ or '')}\n", "| field | value | |", "|---|---|---|"]
        for entry in entries(cls):
            if entry.name != "kind":
                parts.append(f"| `{entry.name}` | {entry.type} | {entry.text} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
