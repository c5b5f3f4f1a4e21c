"""A source in a process of its own, for tests and benchmarks: `python kvxfer_peer.py CONFIG-JSON`.

Prints its endpoint and then obeys lines on stdin: `append SESSION N`, `state`, `quit`.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
from gyre_kvxfer import HostPool, KVLayout, MigrationServer

KEY = b"a shared secret of the tests"


def tokens_of(session: str, n: int) -> np.ndarray:
    """The session's first n tokens."""
    return np.random.default_rng(len(session)).integers(0, 50000, n).astype(np.int32)


def kv_of(layout: KVLayout, session: str, start: int, stop: int) -> np.ndarray:
    """uint8 bytes of [layer, kind, stop - start, head, element]: a function of session and token alone."""
    per = layout.token_nbytes // layout.layers // layout.kinds
    out = np.zeros((layout.layers * layout.kinds, stop - start, per), np.uint8)
    for t in range(start, stop):
        rng = np.random.default_rng([len(session), t])
        values = rng.standard_normal(out.shape[0] * per // layout.itemsize).astype(np.float32)
        if layout.dtype == "float16":
            values = values.astype(np.float16)
        elif layout.dtype == "bfloat16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        out[:, t - start] = values.view(np.uint8).reshape(out.shape[0], per)
    return out.reshape(-1)


def fill(pool: HostPool, session: str, n: int) -> None:
    had = len(pool.sessions()[session].tokens) if session in pool.sessions() else 0
    pool.append(session, tokens_of(session, had + n)[had:], kv_of(pool.layout(), session, had, had + n))


async def serve(config: dict) -> None:
    pool = HostPool(KVLayout.from_dict(config["layout"]), version=config.get("version", 3))
    for session, n in config["sessions"].items():
        fill(pool, session, n)
    options = {k: config[k] for k in ("listen", "lease_s") if k in config}
    if config.get("transports"):
        options["transports"] = tuple(config["transports"])
    async with MigrationServer(pool, key=KEY, **options) as server:
        print(server.endpoint, flush=True)
        loop = asyncio.get_running_loop()
        while True:
            line = (await loop.run_in_executor(None, sys.stdin.readline)).split()
            if not line or line[0] == "quit":
                return
            if line[0] == "append":
                fill(pool, line[1], int(line[2]))
            said = {name: [len(s.tokens), s.frozen, s.pins] for name, s in pool.sessions().items()}
            print(
                json.dumps({"sessions": said, "free": pool.free_blocks, "moves": list(server.moves().values())}),
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
