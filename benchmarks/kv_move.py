"""How fast a session's KV moves between two processes of one host, beside memcpy, raw NIXL and plain sockets.

All in one run. `paged` is the whole move (connect, offer, reserve, read, commit, release) of 8,192 scattered pieces
of 16 KB; raw NIXL is its transfer alone, lists prepared before. `digest`: the same move checked, by a source that
digests each block as it fills; what that costs there is `digest_fill`. `digest_late`: the same, by a source that begins
to sum when the move does. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gyre_kvxfer import HostPool, KVLayout, MigrationServer, MovePolicy, Region, migrate
from gyre_kvxfer.blocks import block_digests
from gyre_kvxfer.plan import Runs
from gyre_kvxfer.transports import nixl
from gyre_kvxfer.transports.process_vm import ProcessVmExporter, ProcessVmReader

KEY = b"benchmark"
LAYOUT = KVLayout(layers=8, kv_heads=8, head_dim=64, block_size=16, num_blocks=1024, dtype="float16", axes="BHTD")
TOKENS = 512 * 16
PIECE = 16 << 10
CONTIGUOUS = 128 << 20


def scattered_pool(seed: int, digest: str = "") -> HostPool:
    """A pool whose free blocks come in random order, its pages touched."""
    pool = HostPool(LAYOUT, version=1, digest=digest)
    np.random.default_rng(seed).shuffle(pool._free)
    for b in pool.buffers:
        b[::4096] = 1
    return pool


# -- the source's process -------------------------------------------------------------------------------------------


async def serve() -> None:
    """Sessions to move, contiguous memory to read, blocks to ask for; told what to do on stdin."""
    pool, late = scattered_pool(1, digest="fast"), scattered_pool(2)
    flat = np.random.default_rng(0).integers(0, 255, CONTIGUOUS, dtype=np.uint8)
    kv = np.random.default_rng(2).integers(0, 60000, TOKENS * LAYOUT.token_nbytes // 2, dtype=np.uint16)
    agent, _ = raw_nixl(flat, pool, True) if nixl.flavour() else (None, None)
    async with MigrationServer(pool, key=KEY) as server, MigrationServer(late, key=KEY) as late_server:
        exporter = ProcessVmExporter()
        plain = socket.create_server(("127.0.0.1", 0))
        loop = asyncio.get_running_loop()
        hello = {
            "fill": server.endpoint,
            "fill late": late_server.endpoint,
            "meta": exporter.meta(),
            "flat": flat.ctypes.data,
            "pools": [b.ctypes.data for b in pool.buffers],
            "nixl": agent.get_agent_metadata().hex() if agent else "",
            "plain": plain.getsockname()[1],
        }
        print("READY" + json.dumps(hello), flush=True)
        while True:
            command = (await loop.run_in_executor(None, sys.stdin.readline)).strip()
            if command.startswith("fill"):
                one = pool if command == "fill" else late
                while "s" in one.sessions():  # the last move's source learns of its end a moment later
                    await asyncio.sleep(0.002)
                one.append("s", np.arange(TOKENS, dtype=np.int32), kv.view(np.uint8))
                print("READY{}", flush=True)
            elif command == "sockets":
                await asyncio.to_thread(answer_plain, plain, pool)
                print("READY{}", flush=True)
            else:
                return


def answer_plain(listener: socket.socket, pool: HostPool) -> None:
    """Plain sockets: `1` asks for one block (naive), `2` for a list sent with sendmsg."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    views = [memoryview(b) for b in pool.buffers]
    with sock:
        while head := sock.recv(12, socket.MSG_WAITALL):
            kind, region, block = struct.unpack("<III", head)
            if kind == 1:
                sock.sendall(views[region][block * PIECE : (block + 1) * PIECE])
                continue
            ids = np.frombuffer(sock.recv(8 * block, socket.MSG_WAITALL), np.uint32).reshape(-1, 2).tolist()
            pieces = [views[r][b * PIECE : (b + 1) * PIECE] for r, b in ids]
            for at in range(0, len(pieces), 512):
                send_all(sock, pieces[at : at + 512])


def send_all(sock: socket.socket, pieces: list[memoryview]) -> None:
    """`sendmsg` until all is sent."""
    while pieces:
        n = sock.sendmsg(pieces)
        while pieces and n >= len(pieces[0]):
            n -= len(pieces.pop(0))
        if n:
            pieces[0] = pieces[0][n:]


def raw_nixl(flat: np.ndarray, pool: HostPool, progress: bool) -> tuple[object, list[object]]:
    """A NIXL agent with both memories registered."""
    module = __import__(nixl.flavour())
    name = f"bench-{os.getpid()}"
    agent = module.nixl_agent(name, module.nixl_agent_config(enable_prog_thread=progress, backends=["UCX"]))
    areas = [(flat.ctypes.data, len(flat), 0, "")] + [(b.ctypes.data, len(b), 0, "") for b in pool.buffers]
    return agent, [agent.register_memory(areas, "DRAM")]


# -- the destination's process --------------------------------------------------------------------------------------


class Peer:
    """The source's process."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self.read()

    def read(self) -> dict:
        while not (line := self.process.stdout.readline()).startswith("READY"):
            if not line:
                raise RuntimeError("the source ended")
        return json.loads(line[5:])

    def ask(self, command: str) -> dict:
        self.tell(command)
        return self.read()

    def tell(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def run_nixl(agent, handle) -> None:
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(state)


Bench = Callable[[], None]


def nixl_benches(peer: Peer, flat: np.ndarray, pool: HostPool) -> dict[str, Bench]:
    """Raw NIXL: one contiguous read, and 8,192 prepared scattered ones."""
    if not nixl.flavour():
        return {}
    agent, _ = raw_nixl(flat, pool, False)
    other = agent.add_remote_agent(bytes.fromhex(peer.hello["nixl"]))
    one = agent.get_xfer_descs([(flat.ctypes.data, CONTIGUOUS, 0)], "DRAM")
    two = agent.get_xfer_descs([(peer.hello["flat"], CONTIGUOUS, 0)], "DRAM")
    whole = agent.initialize_xfer("READ", one, two, other)
    rng = np.random.default_rng(3)
    picks = [np.concatenate([r * 1024 + rng.permutation(1024)[:512] for r in range(16)]) for _ in range(2)]

    def prepare(name, bases):
        rows = np.array([[b, PIECE, 0, PIECE, 1024] for b in bases], np.uint64)
        return agent.prep_xfer_dlist(name, rows, "DRAM")

    mine = prepare("NIXL_INIT_AGENT", [b.ctypes.data for b in pool.buffers])
    theirs = prepare(other, peer.hello["pools"])
    indices = [p.astype(np.int32) for p in picks]
    paged = agent.make_prepped_xfer("READ", mine, indices[0], theirs, indices[1], b"")
    return {"nixl_contiguous": lambda: run_nixl(agent, whole), "nixl_paged": lambda: run_nixl(agent, paged)}


def plain_benches(sock: socket.socket, pool: HostPool) -> dict[str, Bench]:
    """Plain sockets: one message a block, and sendmsg/recvmsg_into of many pieces."""
    rng = np.random.default_rng(4)
    ids = np.array([(r, b) for r in range(16) for b in rng.permutation(1024)[:512]], np.uint32)
    views = [memoryview(b) for b in pool.buffers]

    def naive() -> None:
        for r, b in ids.tolist():
            sock.sendall(struct.pack("<III", 1, r, b))
            into = views[r][b * PIECE : (b + 1) * PIECE]
            while into:
                into = into[sock.recv_into(into) :]

    def vectored() -> None:
        sock.sendall(struct.pack("<III", 2, 0, len(ids)) + ids.tobytes())
        pieces = [views[r][b * PIECE : (b + 1) * PIECE] for r, b in ids.tolist()]
        at = 0
        while at < len(pieces):
            n = sock.recvmsg_into(pieces[at : at + 512])[0]
            while at < len(pieces) and n >= len(pieces[at]):
                n -= len(pieces[at])
                at += 1
            if n:
                pieces[at] = pieces[at][n:]

    return {"naive": naive, "sockets": vectored}


MOVES = {
    "paged": ("fill", "process_vm", MovePolicy()),
    "digest": ("fill", "process_vm", MovePolicy(digest="fast")),
    "digest_late": ("fill late", "process_vm", MovePolicy(digest="fast")),
    "tcp": ("fill", "tcp", MovePolicy()),
    "shm": ("fill", "shm", MovePolicy()),
}


async def move(peer: Peer, pool: HostPool, name: str) -> float:
    """Seconds of a whole move: direct, over another transport, or with digests."""
    source, transport, policy = MOVES[name]
    peer.ask(source)
    report = await migrate("s", peer.hello[source], pool, key=KEY, transport=transport, policy=policy)
    if not report.carried or report.transport != transport:
        raise RuntimeError(str(report))
    pool.drop("s")
    return report.seconds


def fill_costs(turns: int = 400) -> dict[str, float]:
    """What digests cost where they are made: a source adds 16 tokens, one block, at a time. Medians a block."""
    pools = {"fill_us_per_block": scattered_pool(5), "both": scattered_pool(5, digest="fast")}
    kv = np.random.default_rng(6).integers(0, 255, LAYOUT.block_nbytes, dtype=np.uint8)
    tokens, took = np.arange(LAYOUT.block_size, dtype=np.int32), {name: [] for name in pools}
    for _ in range(turns):
        for name, pool in pools.items():
            began = time.perf_counter()
            pool.append("s", tokens, kv)
            took[name].append(time.perf_counter() - began)
    plain, both = (float(np.median(took[name])) * 1e6 for name in pools)
    pool = pools["both"]
    blocks = pool.sessions()["s"].blocks
    whole = timed(lambda: block_digests("fast", LAYOUT, pool.buffers, blocks, 0, turns, turns * LAYOUT.block_size))
    return {
        "block_bytes": LAYOUT.block_nbytes,
        "fill_us_per_block": round(plain, 1),
        "digest_us_per_block": round(both - plain, 1),
        "digest_many_us_per_block": round(whole / turns * 1e6, 1),
    }


async def read_whole(reader: ProcessVmReader, flat: np.ndarray) -> float:
    """Seconds of one contiguous read through our direct transport."""
    runs = Runs(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([CONTIGUOUS], np.int64))
    began = time.perf_counter()
    await reader.read("", runs, runs, [Region(flat.ctypes.data, CONTIGUOUS)])
    return time.perf_counter() - began


def timed(call: Bench) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


async def one_round(peer: Peer, flat: np.ndarray, pool: HostPool, direct: dict[str, Bench], reader: ProcessVmReader):
    """Each way once, those that are compared next to each other: name -> seconds."""
    out = {name: timed(call) for name, call in direct.items()}
    out["contiguous"] = await read_whole(reader, flat)
    for name in MOVES:
        out[name] = await move(peer, pool, name)
    peer.tell("sockets")
    with socket.create_connection(("127.0.0.1", peer.hello["plain"])) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, call in plain_benches(sock, pool).items():
            out[name] = timed(call)
    peer.read()
    return out


async def measure(repeat: int) -> dict:
    """Rounds of all ways in turn, so that what else the machine does meets them alike; the best time of each counts."""
    peer = Peer()
    try:
        flat, copy = np.ones(CONTIGUOUS, np.uint8), np.ones(CONTIGUOUS, np.uint8)
        pool = scattered_pool(7)
        direct = {"memcpy": lambda: np.copyto(copy, flat), **nixl_benches(peer, flat, pool)}
        reader = ProcessVmReader.probe(peer.hello["meta"], [Region(peer.hello["flat"], CONTIGUOUS)])
        first = await move(peer, pool, "paged")
        rounds = [await one_round(peer, flat, pool, direct, reader) for _ in range(repeat)]
        fill = fill_costs()
    finally:
        peer.end()
    nbytes = TOKENS * LAYOUT.token_nbytes
    best = {name: min(r[name] for r in rounds) for name in rounds[0]}
    out = {
        "bytes": nbytes,
        "pieces": nbytes // PIECE,
        "rounds": repeat,
        "gb_per_s": {name: round(nbytes / seconds / 1e9, 3) for name, seconds in best.items()},
        "paged_vs_naive": round(best["naive"] / best["paged"], 2),
        "tcp_vs_sockets": round(best["sockets"] / best["tcp"], 2),
        "digest_overhead": round(best["digest"] / best["paged"] - 1, 3),
        "digest_late_overhead": round(best["digest_late"] / best["paged"] - 1, 3),
        "digest_fill": fill,
        "first_move_s": round(first, 4),
    }
    if "nixl_paged" in best:
        out["contiguous_vs_nixl"] = round(best["nixl_contiguous"] / best["contiguous"], 2)
        out["paged_vs_nixl"] = round(best["nixl_paged"] / best["paged"], 2)
    return out


def hardware() -> dict:
    """What it ran on."""
    model = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    return {"cpu": model, "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
        return
    result = asyncio.run(measure(args.repeat)) | {"hardware": hardware()}
    if not args.json:
        for name, value in result["gb_per_s"].items():
            print(f"{name:18} {value:8.3f} GB/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
