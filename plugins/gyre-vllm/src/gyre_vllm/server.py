"""One server, ours or somebody's: reached, asked what it is, and watched.

Invariant: `Facts` are probed from the running server, never assumed from its version. A server of ours ends with
`end`; a foreign one is only let go. Not here: calls and policy versions.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gyre_core import ComponentContext, InfrastructureError

from gyre_vllm.client import RESTING, RPC, ServerClient
from gyre_vllm.launch import MODEL_NAME, Place, interpreter, launch_plan, seed_of
from gyre_vllm.network import free_port, interface_of, is_loopback
from gyre_vllm.options import WRITTEN_FOR, VLLMOptions
from gyre_vllm.process import ServerProcess
from gyre_vllm.wire import GENERATE

log = logging.getLogger("gyre.vllm")
LOOPBACK = "127.0.0.1"
PORT_TRIES = 3
"""A port that is free when it is chosen may be taken by the time a server has imported all it needs."""
PORT_TAKEN = "address already in use"


class PortTakenError(InfrastructureError):
    """The server's port is somebody else's."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a running server is and can do."""

    version: str
    model: str
    max_context: int
    vocab: int
    """0 when the server does not tell."""
    max_running: int
    logprobs: str
    """What its logprobs are of: "tempered" (by our extension), "raw_logprobs" or "processed_logprobs"."""
    extension: bool
    """Our worker extension is in it."""
    counts: bool
    """It can tell how many tokens each call has sampled."""
    device: str
    sleeps: bool
    """It can give its memory back while it runs."""
    connector: bool
    takes: bool = False
    """Its connector is ours: a running call can be ended so that its KV is held (`inside/gyre_vllm_connector.py`)."""
    experts: bool | None = None
    """It tells the experts of its passes; None when it does not tell whether."""
    asleep: bool = False
    """It was left asleep by an engine before this one."""
    kv_tokens: int = 0
    """Tokens that it can hold KV of; without our extension what its calls may have together."""
    kv_token_bytes: int = 0
    """KV bytes of a token on all its workers; 0 when the server does not tell."""


class Server:
    """A server that is up. `process` is None for a foreign one; `machine` is the address of where it runs, for the
    run's other machines."""

    def __init__(self, client: ServerClient, process: ServerProcess | None, facts: Facts, machine: str) -> None:
        self.client, self.process, self.facts, self.machine = client, process, facts, machine
        self.ending = False

    def story(self) -> str:
        """What is known of its end."""
        return self.process.story() if self.process else f"{self.client.url} is not ours; look at its log"

    @property
    def alive(self) -> bool:
        """False only when a process of ours has ended."""
        return self.process is None or self.process.alive

    async def end(self) -> None:
        """End it if it is ours; close connections."""
        self.ending = True
        try:
            await self.client.close()
        finally:
            if self.process is not None:
                await self.process.end()


async def launch(options: VLLMOptions, context: ComponentContext, model: str, life: int) -> Server:
    """Start `vllm serve` for the folder `model`, or reach the server at `options.url`; returns when it is ready.

    `life` counts the servers of this engine: each has its own sampling seed.
    """
    if options.url:
        client = ServerClient(options.url, options.control_timeout_s)
        try:
            return Server(client, None, await probe(client, options), machine_of(options.url, context.address))
        except BaseException:
            await client.close()
            raise
    tries = 1 if options.port else PORT_TRIES
    for left in reversed(range(tries)):
        try:
            return await _launched(options, context, model, life)
        except PortTakenError as error:
            if not left:
                raise
            log.warning("vLLM is started again at another port: %s", error)
    raise AssertionError("unreachable")


async def _launched(options: VLLMOptions, context: ComponentContext, model: str, life: int) -> Server:
    start = interpreter(options, context.base_dir)
    accelerators = accelerators_of(context)
    seed = seed_of(context.seed, f"{context.name} {life}")
    place = place_of(options, context.address, accelerators, context.threads, seed)
    plan = launch_plan(options, model, start, place)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", context.name)
    process = await ServerProcess.start(plan, Path(context.run_dir) / "logs" / f"{name}-vllm.log")
    client = ServerClient(plan.url, options.control_timeout_s)
    try:
        await _until_ready(client, process, options.start_timeout_s, place.name)
        return Server(client, process, replace(await probe(client, options), model=place.name), context.address)
    except BaseException:
        await client.close()
        await process.end()
        raise


def machine_of(url: str, address: str) -> str:
    """The machine of a running server, seen from this one, whose own address for others is `address`."""
    host = urlsplit(url).hostname or ""
    return address if is_loopback(host) else host


def accelerators_of(context: ComponentContext) -> int:
    """Of the cell; 0 means CPU."""
    return context.accelerators or int(context.device != "cpu")


def place_of(options: VLLMOptions, address: str, accelerators: int, threads: int, seed: int) -> Place:
    """Hosts and ports of a server on this machine, whose address for the run's other machines is `address`."""
    host, side_host = options.host or LOOPBACK, options.host or address
    name = f"{MODEL_NAME}-{secrets.token_hex(4)}"
    place = Place(host, options.port or free_port(host), accelerators, threads, seed, name=name)
    if not options.transfers:
        return place
    return replace(place, side_host=side_host, side_port=free_port(side_host), side_interface=interface_of(side_host))


async def _until_ready(client: ServerClient, process: ServerProcess, timeout_s: float, name: str) -> None:
    """Return when our server, which serves under this name, answers."""
    doing = f"starting vLLM at {client.url}"
    try:
        async with asyncio.timeout(timeout_s):
            while not await client.alive():
                if not process.alive:
                    story = process.story()
                    kind = PortTakenError if PORT_TAKEN in story.lower() else InfrastructureError
                    raise kind(doing, got=story, expected="a server that gets ready")
                await asyncio.sleep(0.25)
            found, _ = await client.model()
            if found != name:
                raise PortTakenError(doing, got=f"another server, of {found!r}", expected=f"ours, of {name!r}")
    except TimeoutError as error:
        raise InfrastructureError(
            doing,
            got=f"not ready after {timeout_s:.0f} s; {process.story()}",
            expected="a ready server",
            fix="Raise start_timeout_s if the model is large; compilation and warm-up take long.",
        ) from error


async def probe(client: ServerClient, options: VLLMOptions) -> Facts:
    """Ask a server what it is. InfrastructureError when it lacks what this plugin cannot do without."""
    paths = await client.paths()
    missing = [path for path in (GENERATE, *RESTING, RPC) if path not in paths]
    if missing:
        raise InfrastructureError(
            f"asking {client.url} what it can do",
            got=f"a server without {', '.join(missing)}",
            expected="vLLM's token and RL interfaces",
            fix="Start it with --tokens-only (or --enable-scale-out) and VLLM_SERVER_DEV_MODE=1.",
        )
    version = await client.version()
    warn_of_version(version)
    model, max_context = await client.model()
    told = await _workers(client, needed=not options.url)
    ours = bool(told)
    if not ours:
        told = await _configuration(client)
    device = str(told.get("device", "unknown"))
    replicas = max(1, int(told.get("data_parallel", options.data_parallel)))
    kv_tokens, max_running = int(told.get("kv_tokens", 0)), replicas * int(told.get("max_running", options.max_running))
    return Facts(
        version=version,
        model=model if options.url else MODEL_NAME,
        max_context=int(told.get("max_context", max_context)),
        vocab=int(told.get("vocab", 0)),
        max_running=max_running,
        logprobs="tempered" if ours else str(told.get("logprobs", "raw_logprobs")),
        extension=ours,
        counts=bool(told.get("counts")),
        device=device,
        sleeps=_sleeps(told, paths, ours),
        connector=bool(told.get("connector")),
        takes=bool(told.get("takes")),
        experts=told.get("experts"),
        asleep=bool(told.get("asleep")),
        kv_tokens=kv_tokens or max_context * max_running,
        kv_token_bytes=int(told.get("kv_bytes", 0)) // kv_tokens if kv_tokens else 0,
    )


def _sleeps(told: dict[str, Any], paths: frozenset[str], ours: bool) -> bool:
    """Whether the server can give its memory back and live. Not with a connector, which told others where its blocks
    are: asleep they would be gone, and elsewhere afterwards."""
    device = str(told.get("device"))
    if told.get("connector"):
        return False
    if device.startswith("cuda"):
        return "/sleep" in paths and bool(told.get("sleep_mode"))
    return ours and device == "cpu"


def sleep_way(options: VLLMOptions, facts: Facts | None) -> str | None:
    """How an engine sleeps: "memory", "restart", or None when it cannot; without `facts`, what is to be expected."""
    if options.sleep in ("auto", "memory") and (facts is None or facts.sleeps):
        return "memory"
    return None if options.sleep == "memory" or options.url else "restart"


async def _workers(client: ServerClient, *, needed: bool) -> dict[str, Any]:
    """What our extension says of itself on the first worker, KV bytes on all; empty when it is not there, which where
    it is `needed` is an InfrastructureError."""
    try:
        told = await client.rpc("gyre_prepare")
    except InfrastructureError:
        if needed or not await client.alive():
            raise
        log.warning(
            "%s runs without Gyre's worker extension: calls that run through a change of weights are computed again, "
            "and top-k or top-p together with a temperature other than 1 is refused",
            client.url,
        )
        return {}
    if not told or not isinstance(told[0], dict):
        return {}
    return dict(told[0]) | {"kv_bytes": sum(int(worker.get("kv_bytes", 0)) for worker in told)}


async def _configuration(client: ServerClient) -> dict[str, Any]:
    """What a server without our extension says of its configuration."""
    config = await client.configuration()
    return {
        "device": config.get("device_config", {}).get("device", "unknown"),
        "logprobs": config.get("model_config", {}).get("logprobs_mode", "raw_logprobs"),
        "max_running": config.get("scheduler_config", {}).get("max_num_seqs", 0),
        "experts": config.get("aux_output_config", {}).get("enable_return_routed_experts"),
        "data_parallel": config.get("parallel_config", {}).get("data_parallel_size", 1),
        "sleep_mode": config.get("model_config", {}).get("enable_sleep_mode", False),
        "connector": config.get("kv_transfer_config") is not None,
    }


def warn_of_version(version: str) -> bool:
    """Log a warning when `version` is of another minor than this plugin was written for; whether it did."""
    found = re.match(r"(\d+)\.(\d+)", version)
    written = ".".join(map(str, WRITTEN_FOR))
    if found and (int(found[1]), int(found[2])) == WRITTEN_FOR:
        return False
    log.warning(
        "vLLM %s: this release of gyre-vllm was written and tested for %s; run its conformance suite, or use %s",
        version or "of unknown version", written, written,
    )  # fmt: skip
    return True
