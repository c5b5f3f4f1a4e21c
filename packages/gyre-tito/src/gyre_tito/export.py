"""Trajectories out of a store: JSON lines and Parquet.

Both hold the same rows, one for every call: the execution's facts, where the call's prompt comes from, its new context
ids, sampled ids, logprobs and policy versions. That is the whole store; a tree can be rebuilt from either. With a
tokenizer the ids are also told as text, for reading; it is no source of tokens. Parquet needs the extra `parquet`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gyre_tito.store import Store

EXPORT_VERSION = 1


Decode = Callable[[Sequence[int]], str]


def rows(
    store: Store,
    *,
    step: int | None = None,
    group: str | None = None,
    execution: str | None = None,
    decode: Decode | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for every call of the chosen executions."""
    for info in store.executions(step=step, group=group, execution=execution):
        base = {
            "format": f"gyre-tito-export-v{EXPORT_VERSION}",
            "execution": info.execution,
            "task": info.task,
            "group": info.group,
            "step": info.step,
            "purpose": info.purpose,
            "status": str(info.status),
            "score": None if info.score is None else info.score.value,
        }
        for call in store.calls(info.execution):
            yield {
                **base,
                "call": call.index,
                "session": call.session,
                "parent": call.parent,
                "prefix_len": call.prefix_len,
                "link": str(call.link),
                "finish": call.finish,
                "cached_tokens": call.cached_tokens,
                "started_at": call.started_at,
                "ended_at": call.ended_at,
                "context_ids": call.context_ids.tolist(),
                "sampled_ids": call.sampled_ids.tolist(),
                "logprobs": call.logprobs.tolist(),
                "versions": call.versions.tolist(),
                "context_text": None if decode is None else decode(call.context_ids.tolist()),
                "sampled_text": None if decode is None else decode(call.sampled_ids.tolist()),
            }


def export(store: Store, target: str | Path, **chosen: Any) -> int:
    """Write Parquet or JSON lines, by the file's ending; returns the number of rows. `chosen`: see `rows`.

    Error: ValueError for another ending.
    """
    ending = Path(target).suffix
    if ending not in (".parquet", ".jsonl"):
        raise ValueError(f"exporting to {target}: the file's ending says the format; use .parquet or .jsonl")
    return (to_parquet if ending == ".parquet" else to_jsonl)(store, target, **chosen)


def to_jsonl(store: Store, target: str | Path, **chosen: Any) -> int:
    """Write JSON lines; returns the number of rows. NaN logprobs (unknown) become null."""
    count = 0
    encode = msgspec.json.Encoder().encode
    with Path(target).open("wb") as file:
        for row in rows(store, **chosen):
            row["logprobs"] = [None if math.isnan(value) else value for value in row["logprobs"]]
            file.write(encode(row) + b"\n")
            count += 1
    return count


def to_parquet(store: Store, target: str | Path, *, batch: int = 512, **chosen: Any) -> int:
    """Write Parquet (zstd); returns the number of rows. Error: ImportError without the extra `parquet`."""
    try:
        import pyarrow as pa  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet as pq  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise ImportError("Parquet export needs pyarrow: pip install 'gyre-tito[parquet]'") from error
    ids, text = pa.list_(pa.int32()), pa.string()
    schema = pa.schema(
        [(name, text) for name in ("format", "execution", "task", "group")]
        + [("step", pa.int64()), ("purpose", text), ("status", text), ("score", pa.float64())]
        + [("call", pa.int32()), ("session", text), ("parent", pa.int32()), ("prefix_len", pa.int64())]
        + [("link", text), ("finish", text), ("cached_tokens", pa.int64())]
        + [("started_at", pa.float64()), ("ended_at", pa.float64())]
        + [("context_ids", ids), ("sampled_ids", ids), ("logprobs", pa.list_(pa.float32())), ("versions", ids)]
        + [("context_text", text), ("sampled_text", text)]
    )
    count = 0
    waiting: list[dict[str, Any]] = []
    with pq.ParquetWriter(str(target), schema, compression="zstd") as writer:
        for row in rows(store, **chosen):
            waiting.append(row)
            count += 1
            if len(waiting) >= batch:
                writer.write_table(pa.Table.from_pylist(waiting, schema))
                waiting = []
        writer.write_table(pa.Table.from_pylist(waiting, schema))
    return count
