"""What is known of a model before it is served, and of a server once it answers. Pure: reads JSON into numbers.

Invariant: what a server can do is read from its own answer, never assumed from how it was asked to start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_core import ConfigError, EngineCapability, InfrastructureError

from gyre_sglang.options import DETERMINISTIC, WRITTEN_FOR, SGLangOptions

LOADER = "gyre_sglang_server.loader.take"
"""Our function inside the server that loads versions."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Numbers of a config.json."""

    vocab: int
    positions: int
    """Longest context the model was made for; 0 when it does not say."""
    layers: int
    experts_per_token: int
    """0 for a dense model."""
    tied: bool
    """Whether embedding and head are one tensor."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Numbers of a running server's /server_info."""

    version: str
    slots: int
    kv_tokens: int
    page_size: int
    max_prompt: int
    """Longest prompt it takes."""
    max_total: int
    """Most tokens of prompt and answer together."""
    incremental: bool
    """Streams what is new, not everything again with each event."""
    stream_interval: int
    overlap: bool
    deterministic: bool
    """Honours seeds."""
    memory_saver: bool
    """Can give memory back and stay alive."""
    routed_experts: bool
    loader: bool
    """Has Gyre's weight loader."""
    tp: int
    dp: int
    device: str
    seed: int | None = None
    """Its `--random-seed`."""


def read_model(location: str) -> ModelFacts:
    """From a model folder's config.json; ConfigError when it is missing or has no vocabulary."""
    path = Path(location) / "config.json"
    doing = f"reading the model {location}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(doing, got=str(error), expected="a folder with config.json and safetensors") from error
    text = data.get("text_config") or data
    vocab = text.get("vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise ConfigError(doing, got=f"vocab_size {vocab!r} in config.json", expected="a positive number")
    return ModelFacts(
        vocab,
        int(text.get("max_position_embeddings") or 0),
        int(text.get("num_hidden_layers") or 0),
        int(text.get("num_experts_per_tok") or 0),
        bool(text.get("tie_word_embeddings", data.get("tie_word_embeddings", False))),
    )


def read_server(info: Mapping[str, Any], url: str) -> ServerFacts:
    """From the answer of /server_info; InfrastructureError naming the field that is missing."""
    try:
        states = list(info["internal_states"])
        dp = int(info.get("dp_size") or 1)
        max_prompt = int(info["max_req_input_len"])
        return ServerFacts(
            version=str(info["version"]),
            slots=sum(int(state["effective_max_running_requests_per_dp"]) for state in states),
            kv_tokens=sum(int(state["memory_usage"]["token_capacity"]) for state in states),
            page_size=int(info["page_size"]),
            max_prompt=max_prompt - 1,
            max_total=max_prompt + 4,
            incremental=bool(info.get("incremental_streaming_output")),
            stream_interval=int(info.get("stream_interval") or 1),
            overlap=not info.get("disable_overlap_schedule", False),
            deterministic=bool(info.get("enable_deterministic_inference")),
            memory_saver=bool(info.get("enable_memory_saver")),
            routed_experts=bool(info.get("enable_return_routed_experts")),
            loader=LOADER in (info.get("custom_weight_loader") or ()),
            tp=int(info.get("tp_size") or 1),
            dp=dp,
            device=str(states[0].get("device") or info.get("device") or ""),
            seed=info.get("random_seed"),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InfrastructureError(
            f"reading what the server at {url} can do", got=f"/server_info without {error}",
            expected=f"the fields of SGLang {WRITTEN_FOR}", fix="Use the SGLang release this plugin was written for.",
        ) from error  # fmt: skip


def offered(options: SGLangOptions, facts: ServerFacts | None) -> frozenset[EngineCapability]:
    """What an engine offers on this server; without facts what it does unless the server turns out to lack it."""
    kinds = EngineCapability
    found = {kinds.PAUSE}
    if not options.url or facts is None or facts.memory_saver:
        found.add(kinds.SLEEP)
    if options.routed_experts if facts is None else facts.routed_experts:
        found.add(kinds.ROUTED_EXPERTS)
    if DETERMINISTIC in options.arguments if facts is None else facts.deterministic:
        found.add(kinds.SEED)
    return frozenset(found)


def version_warning(version: str) -> str | None:
    """What to say of a server of this version, None when it is the one this package was written for."""
    if _minor(version) == _minor(WRITTEN_FOR):
        return None
    return (
        f"the server is SGLang {version}; this plugin was written for {WRITTEN_FOR} and tested with it alone. "
        f"Run `pytest -m engine plugins/gyre-sglang` against it, or install {WRITTEN_FOR}."
    )


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:3])
