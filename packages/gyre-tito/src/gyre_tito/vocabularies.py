"""Tokenizers from vocabulary files that are no `tokenizer.json`: GGUF model files and tiktoken rank files.

Invariant: the tokenizer that is built encodes like the one the file came with (byte-level BPE). Reads the vocabulary
only, never weights.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from gyre_tito.tokenizer import FastTokenizer, FormatError

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_CONTROL = 3


def from_tiktoken(
    file: str | Path, special: Iterable[str], *, split: str = QWEN_SPLIT, eos: str = "<|im_end|>"
) -> FastTokenizer:
    """A byte-level BPE tokenizer from a rank file (`base64 rank` lines); `special` tokens follow the ranks in order."""
    ranks = {}
    for line in Path(file).read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    shown = _byte_alphabet()
    vocabulary = {"".join(shown[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            left, right = _last_merge(token, ranks)
            merges.append(("".join(shown[byte] for byte in left), "".join(shown[byte] for byte in right)))
    return _byte_level(vocabulary, merges, Regex(split), list(special), eos, None, Path(file).stem)


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces from which BPE makes `token` in its last step."""
    parts = [token[at : at + 1] for at in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, limit) for a, b in pairwise(parts)]
        at = min(range(len(pairs)), key=pairs.__getitem__)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def from_gguf(file: str | Path) -> FastTokenizer:
    """The tokenizer inside a GGUF model file (byte-level BPE ones), with its chat template."""
    data = read_gguf_metadata(file)
    if data.get("tokenizer.ggml.model") != "gpt2":
        raise FormatError(f"loading a tokenizer from {file}: {data.get('tokenizer.ggml.model')!r} is no byte-level BPE")
    tokens: list[str] = data["tokenizer.ggml.tokens"]
    kinds: list[int] = data["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in data["tokenizer.ggml.merges"]]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _GGUF_CONTROL]
    eos = tokens[data["tokenizer.ggml.eos_token_id"]]
    words = data.get("tokenizer.ggml.pre") == "smollm"
    split = Regex(r"\p{N}") if words else Regex(QWEN_SPLIT)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    template = data.get("tokenizer.chat_template")
    return _byte_level(vocabulary, merges, split, control, eos, template, Path(file).stem, words=words)


def _byte_level(
    vocabulary: dict[str, int],
    merges: list[Any],
    split: Any,
    special: list[str],
    eos: str,
    template: str | None,
    name: str,
    *,
    words: bool = False,
) -> FastTokenizer:
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words),
        ]
    )
    model.decoder = decoders.ByteLevel()
    markup = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
    model.add_tokens([AddedToken(text, normalized=False, special=text not in markup) for text in special])
    return FastTokenizer(
        model,
        name=name,
        eos_token=eos,
        special_tokens={"eos_token": eos, "bos_token": special[0] if special else ""},
        chat_template=template,
    )


def _byte_alphabet() -> dict[int, str]:
    """Byte to the printable character that byte-level BPE writes for it (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in kept}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(256 + number) for number, byte in enumerate(others)}


def read_gguf_metadata(file: str | Path) -> dict[str, Any]:
    """The key-value section of a GGUF file (version 2 or 3). Error: the file is something else."""
    with Path(file).open("rb") as handle:
        magic, version, _, count = struct.unpack("<4sIQQ", handle.read(24))
        if magic != b"GGUF" or version not in (2, 3):
            raise FormatError(f"reading {file}: no GGUF file of version 2 or 3 ({magic!r}, {version})")
        return {_gguf_text(handle): _gguf_value(handle, _gguf_number(handle, "I")) for _ in range(count)}


def _gguf_number(handle: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, handle.read(struct.calcsize("<" + code)))[0]


def _gguf_text(handle: BinaryIO) -> str:
    return handle.read(_gguf_number(handle, "Q")).decode("utf-8", "replace")


def _gguf_value(handle: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _gguf_text(handle)
    if kind == 9:
        inner = _gguf_number(handle, "I")
        return [_gguf_value(handle, inner) for _ in range(_gguf_number(handle, "Q"))]
    return _gguf_number(handle, _GGUF_SCALARS[kind])
