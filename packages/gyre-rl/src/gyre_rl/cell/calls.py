"""A model call on its way between the proxy and a cell: length-prefixed msgpack frames in one HTTP answer.

Invariant: every sampled token arrives once and in order, and an answer that ends without a `finish` is an error, never
a short answer. Closing the client's iterator closes the connection, which aborts the call on the cell.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
from aiohttp import web
from gyre_core import (
    CellLostError,
    Engine,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InfrastructureError,
)

from gyre_rl.cell.messages import CallBody, ChunkBody
from gyre_rl.procs.wire import Fault, pack, unpack


class CellRefusesError(InfrastructureError):
    """The cell takes no calls now (drain, role switch); another route is needed."""


_LENGTH = struct.Struct("<I")


def body_of(request: GenerateRequest) -> CallBody:
    """The request as it travels."""
    prompt = np.ascontiguousarray(request.prompt_ids, "<i4").tobytes()
    return CallBody(
        request.request_id, request.session, prompt, request.sampling, request.routed_experts, request.routed_from
    )


def request_of(body: CallBody) -> GenerateRequest:
    """The request as the engine takes it; `prompt_ids` is a list of ints."""
    prompt = np.frombuffer(body.prompt, "<i4").tolist()
    return GenerateRequest(body.request_id, body.session, prompt, body.sampling, body.routed_experts, body.routed_from)


def _chunk_body(chunk: GenerateChunk) -> ChunkBody:
    routed = chunk.routed_experts
    return ChunkBody(
        chunk.token_ids,
        chunk.logprobs,
        chunk.versions,
        chunk.finish.value if chunk.finish else None,
        chunk.cached_tokens,
        None if routed is None else np.asarray(routed, "<i4").tobytes(),
        () if routed is None else tuple(routed.shape),
        chunk.routed_from,
    )


def _chunk_of(body: ChunkBody) -> GenerateChunk:
    routed = None if body.routed is None else np.frombuffer(body.routed, "<i4").reshape(body.routed_shape)
    finish = FinishReason(body.finish) if body.finish else None
    return GenerateChunk(
        body.token_ids, body.logprobs, body.versions, finish, body.cached_tokens, routed, body.routed_from
    )


async def answer_call(request: web.Request, engine: Engine, body: CallBody) -> web.StreamResponse:
    """Run the call and stream its chunks; an engine's error is the last frame."""
    response = web.StreamResponse()
    await response.prepare(request)
    chunks = engine.generate(request_of(body))
    try:
        async for chunk in chunks:
            await _write(response, _chunk_body(chunk))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # noqa: BLE001 - boundary: the caller is told; the engine goes on for others
        with contextlib.suppress(ConnectionError):
            await _write(response, ChunkBody(error=Fault.of(error)))
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
    return response


async def _write(response: web.StreamResponse, body: ChunkBody) -> None:
    data = pack(body)
    await response.write(_LENGTH.pack(len(data)) + data)


async def call_cell(
    http: aiohttp.ClientSession, base_url: str, token: str, request: GenerateRequest
) -> AsyncIterator[GenerateChunk]:
    """The chunks of a call. Raises CellLostError when the cell dies, InfrastructureError when the call fails there."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    headers = {"authorization": f"Bearer {token}"}
    doing = f"a model call of {request.session} on {base_url}"
    try:
        async with http.post(
            base_url + "/generate", data=pack(body_of(request)), headers=headers, timeout=timeout
        ) as response:
            if response.status == 409:
                raise CellRefusesError(doing, got=await response.text())
            if response.status != 200:
                raise InfrastructureError(doing, got=f"HTTP {response.status}: {(await response.text())[:200]}")
            finished = False
            while not finished:
                (length,) = _LENGTH.unpack(await response.content.readexactly(_LENGTH.size))
                body = unpack(await response.content.readexactly(length), ChunkBody)
                if body.error is not None:
                    raise body.error.error()
                finished = body.finish is not None
                yield _chunk_of(body)
    except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
        raise CellLostError(doing, got=f"{type(error).__name__}: {error}") from error
