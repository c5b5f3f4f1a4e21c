"""What a trainer says of its model, against the folder that the engine loads: asked before the first step.

Most faults that make a trainer train another model than the one that sampled show in a few numbers: parameters, tied
embeddings, the vocabulary and its padding, rope. Invariant: a difference stops the run and names the fact. Needs the
standard library alone. Not here: log-probabilities, which the ring compares on the first step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gyre_core.errors import InfrastructureError
from gyre_core.facts import ModelFacts, counted, experts_of, rope_of
from gyre_core.ranks.tensorfile import TensorFile, files_of

_HEAD = "lm_head.weight"


def facts_at(folder: Path) -> ModelFacts:
    """What a Hugging Face folder holds, as far as its files tell; InfrastructureError when it is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        vocabulary = int(config.get("vocab_size", 0))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InfrastructureError(
            f"reading {folder / 'config.json'}", got=f"{type(error).__name__}: {error}", expected="a configuration"
        ) from error  # fmt: skip
    entries = {name: entry for path in files_of(folder) for name, entry in TensorFile(path).entries.items()}
    tied = bool(config.get("tie_word_embeddings", _HEAD not in entries))
    trained = [name for name in entries if counted(name, config) and not (tied and name == _HEAD)]
    return ModelFacts(
        architecture=(config.get("architectures") or [""])[0], parameters=sum(entries[name].count for name in trained),
        tied=tied, vocabulary=vocabulary, padded_vocabulary=vocabulary, rope=rope_of(config),
        experts=experts_of(config),
    )  # fmt: skip


def require_facts(found: ModelFacts, folder: Path, *, replay: bool) -> None:
    """InfrastructureError that names the first fact in which the trainer's model is not the one in `folder`; what the
    folder does not tell is not compared. `replay`: the engine records which experts it used, to be used again."""
    wanted = facts_at(folder)
    nested = any(isinstance(value, Mapping) for value in found.rope.values())  # which older folders say in other words
    rope = dict(wanted.rope) if nested else {key: found.rope.get(key) for key in wanted.rope}
    told: list[tuple[str, object, object]] = [
        ("architecture", found.architecture, wanted.architecture or found.architecture),
        ("tied embeddings", found.tied, wanted.tied),
        ("vocabulary", found.vocabulary, wanted.vocabulary or found.vocabulary),
        ("padded vocabulary", found.padded_vocabulary, max(found.padded_vocabulary, wanted.vocabulary)),
        ("rope", rope, dict(wanted.rope)),
        ("experts", found.experts, wanted.experts),
        ("parameters", found.parameters, wanted.parameters),
        ("router replay", found.router_replay, found.router_replay or bool(replay and wanted.experts)),
    ]
    for fact, mine, theirs in told:
        if mine != theirs:
            raise InfrastructureError(
                f"comparing the trainer's model with the one that the engine loads from {folder}",
                got=f"{fact} {mine!r} in the trainer", expected=f"{theirs!r}",
                fix="Nothing was stepped: the two would not be the same policy. Look at the trainer's options and at "
                "its mapping of this model family.",
            )  # fmt: skip
