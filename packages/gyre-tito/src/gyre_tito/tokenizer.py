"""A tokenizer from a model folder, without transformers and without torch.

Wraps a `tokenizers.Tokenizer` with the surface that `renderers` asks of a tokenizer (encode, decode, ids of special
tokens, character offsets, chat template). Reads files; never the network. Special-token text in a message is encoded
as the special token, as the model's own chat template would do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from gyre_tito.template import ChatTemplate

_SHORT = 1024  # characters
_FRAME = 32  # characters: a format's frame around a message such as "assistant\n", the same at every call
_FRAMES = 1024


class FormatError(ValueError):
    """A model folder, tokenizer or chat format cannot be used; the message says what is missing."""


class FastTokenizer:
    """The tokenizer of one model."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str = "",
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._frame_ids = lru_cache(_FRAMES)(self._encode_frame)
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id = backend.token_to_id(eos_token) if eos_token else None
        added = backend.get_added_tokens_decoder()
        self.all_special_tokens = [token.content for token in added.values() if token.special]
        self._template = ChatTemplate(chat_template, special_tokens or {}) if chat_template else None

    @classmethod
    def from_folder(cls, folder: str | Path) -> FastTokenizer:
        """Load `tokenizer.json` and, where present, `tokenizer_config.json` and `chat_template.jinja`."""
        where = Path(folder)
        file = where / "tokenizer.json"
        if not file.is_file():
            raise FormatError(
                f"loading a tokenizer from {where}: there is no tokenizer.json; save the model's fast tokenizer there"
            )
        config = _read_json(where / "tokenizer_config.json")
        model = _read_json(where / "config.json")
        special = {
            name: _token_text(value) for name, value in config.items() if name.endswith("_token") and _token_text(value)
        }
        jinja = where / "chat_template.jinja"
        template = jinja.read_text("utf-8") if jinja.is_file() else _default_template(config.get("chat_template"))
        return cls(
            tokenizers.Tokenizer.from_file(str(file)),
            name=str(model.get("_name_or_path") or config.get("name_or_path") or where),
            eos_token=special.get("eos_token"),
            special_tokens=special,
            chat_template=template,
        )

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and, where there is one, `chat_template.jinja`."""
        where = Path(folder)
        self._backend.save(str(where / "tokenizer.json"))
        eos = None if self.eos_token_id is None else self._backend.id_to_token(self.eos_token_id)
        config = {"eos_token": eos, "name_or_path": self.name_or_path}
        (where / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        if self._template is not None:
            (where / "chat_template.jinja").write_text(self._template.source, "utf-8")

    @property
    def has_template(self) -> bool:
        """Whether the model brought a chat template."""
        return self._template is not None

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Ids of `text`; no tokens are added at its ends."""
        if len(text) <= _FRAME:
            return list(self._frame_ids(text))
        if len(text) < _SHORT:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        # The batch call lets other threads run meanwhile, and leaves out the character offsets: half the work.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _encode_frame(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text` and the characters (start, end) that each covers."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, token_ids: Iterable[int], *_: Any, **options: Any) -> str:
        """Text of `token_ids`; special tokens are kept unless `skip_special_tokens=True`."""
        skip = bool(options.get("skip_special_tokens", False))
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Id of a token (None if there is none), or a list of ids for a list."""
        if isinstance(tokens, str):
            return self._backend.token_to_id(tokens)
        return [self._backend.token_to_id(token) for token in tokens]

    def token_text(self, token_id: int) -> str:
        """How a client sees one token."""
        return str(self._backend.decode([token_id], skip_special_tokens=False))

    def with_offsets(self) -> OffsetTokenizer:
        """The same tokenizer, telling also which characters each token covers (slower)."""
        return OffsetTokenizer(self)

    def template_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **more: Any) -> str:
        """The chat template's text. Error: the model brought no template, or the template refused the messages."""
        if self._template is None:
            raise FormatError(
                f"rendering messages for {self.name_or_path!r}: the model folder has no chat template "
                "(tokenizer_config.json or chat_template.jinja); add one or choose a family"
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **more)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **more: Any
    ) -> list[int]:
        """Ids of the chat template's text."""
        for name in ("tokenize", "return_dict"):
            more.pop(name, None)
        return self.encode(self.template_text(messages, add_generation_prompt=add_generation_prompt, **more))


class OffsetTokenizer:
    """A `FastTokenizer` with character offsets, which `renderers` uses to tell a message's body from its frame.

    They cost more than the encoding itself, so prompts are rendered without them.
    """

    def __init__(self, inner: FastTokenizer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        """Ids with the characters that each one covers."""
        ids, offsets = self._inner.encode_with_offsets(text)
        return {"input_ids": ids, "offset_mapping": offsets}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    loaded = json.loads(file.read_text("utf-8"))
    return loaded if isinstance(loaded, dict) else {}


def _token_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return str(value.get("content", "")) if isinstance(value, dict) else ""


def _default_template(value: Any) -> str | None:
    """`chat_template` of a tokenizer config: a text, or a list of named ones of which `default` counts."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
