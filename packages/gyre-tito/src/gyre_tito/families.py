"""Choosing a model's chat format: by family name, by the model's published name, else its own chat template.

Import-light: no transformers, no torch; files only, never the network.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from gyre_tito.chat_format import ChatFormat, HistoryMode
from gyre_tito.tokenizer import FastTokenizer, FormatError, OffsetTokenizer


def load_format(
    model_dir: str | Path,
    *,
    family: str | None = None,
    history: HistoryMode = "exact",
    options: dict[str, Any] | None = None,
) -> ChatFormat:
    """The chat format of the model in a local folder (`tokenizer.json`, `tokenizer_config.json`, ...).

    `family`: a renderer of the `renderers` package (`qwen3`, `llama-3`, ...), or `default` for the folder's own chat
    template; None takes the renderer that `renderers` knows for the model's published name, else `default`.
    `history`: `exact` keeps what was sampled at every turn; `template` does to old turns what the template does (such
    prompts branch). `options`: settings of that renderer, e.g. `{"enable_thinking": False}`, or for `default` its
    `tool_parser` and `reasoning_parser`.
    """
    return make_format(FastTokenizer.from_folder(model_dir), family=family, history=history, options=options)


def make_format(
    tokenizer: FastTokenizer,
    *,
    family: str | None = None,
    history: HistoryMode = "exact",
    options: dict[str, Any] | None = None,
) -> ChatFormat:
    """The same for a tokenizer that is already there."""
    from renderers import base  # type: ignore[import-untyped]

    if history not in ("exact", "template"):
        raise FormatError(f"choosing a chat format: history must be 'exact' or 'template', got {history!r}")
    known = base.MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    name = family or known or "default"
    if name == "default" and not tokenizer.has_template:
        raise FormatError(
            f"choosing a chat format for {tokenizer.name_or_path!r}: no family was named and the folder has no chat "
            "template; pass family=..., or add chat_template.jinja"
        )
    plain = _renderer(tokenizer, name, history, options or {})
    marking = plain if name == "default" else _renderer(tokenizer.with_offsets(), name, history, options or {})
    return ChatFormat(tokenizer, plain, name, history, marking)


def check_family(name: str) -> None:
    """FormatError, which lists the families, when there is none of this name."""
    _config(name, {})


def _config(name: str, settings: dict[str, Any]) -> Any:
    from renderers.configs import config_from_name  # type: ignore[import-untyped]

    try:
        config = config_from_name(name)
        return type(config)(**settings)
    except (ValueError, TypeError) as error:
        raise FormatError(f"choosing chat format {name!r}: {error}") from error


def _renderer(
    tokenizer: FastTokenizer | OffsetTokenizer, name: str, history: HistoryMode, options: dict[str, Any]
) -> Any:
    from renderers import base

    settings = dict(options)
    if name == "default":
        settings.setdefault("tool_parser", "qwen3" if _has_calls(tokenizer) else None)
        settings.setdefault("reasoning_parser", "think")
    config = _config(name, settings)
    candidates = [config]
    if history == "exact" and name != "default":
        with contextlib.suppress(ValueError, TypeError):  # a renderer without this policy: its own bridge decides
            candidates.insert(0, type(config)(**{**settings, "thinking_retention": "all"}))
    failed: Exception | None = None
    for one in candidates:
        try:
            return base.create_renderer(tokenizer, one)
        except (AssertionError, ValueError, TypeError, NotImplementedError) as error:
            failed = error
    raise FormatError(
        f"choosing chat format {name!r} for {tokenizer.name_or_path!r}: {failed}; does the tokenizer have that "
        "family's special tokens?"
    ) from failed


def _has_calls(tokenizer: FastTokenizer | OffsetTokenizer) -> bool:
    return tokenizer.convert_tokens_to_ids("<tool_call>") is not None
