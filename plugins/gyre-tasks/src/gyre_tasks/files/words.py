"""Names and words the family is made of. Each is one token of the quickstart's vocabulary."""

from __future__ import annotations

BRIEFS: tuple[str, ...] = ("TODO", "PLAN", "NOTES", "JOBS", "BRIEF", "ORDERS")
"""Names the brief may have; the agent finds out which by looking around."""


def _names(stems: str, form: str = "{}") -> tuple[str, ...]:
    return tuple(form.format(stem) for stem in stems.split())


SOURCES: tuple[str, ...] = _names(
    "ant bee cod cow doe eel elk emu fox gnu hen jay koi owl pig ram rat yak crab dove frog goat lynx moth", "{}.txt"
)
"""Data files."""

TARGETS: tuple[str, ...] = _names(
    "ash bay box elm fir fig gum ivy nut oak pea rye sap tea yew bean corn dill fern leek mint palm rose sage", "out/{}"
)
"""Result files."""

WORDS: tuple[str, ...] = _names(
    "amber brass chalk cloud creek dune ember field flint frost glade gorge grass gravel harbor hill island "
    "lake marsh mist north ocean opal pearl pond quartz rain reef ridge sand shore slate snow stone storm "
    "topaz valley wave wind zinc"
)
"""Lines of the data files."""
