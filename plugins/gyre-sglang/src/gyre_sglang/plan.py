"""The launch plan of a server: flags and variables from options, model and cell. Pure.

Invariant: the same inputs give the same plan; what the user put into `arguments` comes last and wins. On a CPU the plan
uses the platform plugin in `server/`, on accelerators it uses SGLang as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gyre_core import ConfigError

from gyre_sglang.facts import LOADER, ModelFacts
from gyre_sglang.options import SGLangOptions

SERVER_SIDE = Path(__file__).parent / "server"
"""Put on the server's PYTHONPATH: a CPU platform, a launcher and a cache linker, found by SGLang as a plugin."""
COMMAND_GRACE_S = 30.0
SPARE_TOKENS = 8
"""SGLang keeps a few positions of its context for itself; it is asked for so many more than calls may use."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """On top of the inherited environment."""
    port: int
    spare_argv: tuple[str, ...] = ()
    """Starts a server that waits for its flags on standard input; empty where there is no such thing."""
    flags: tuple[str, ...] = ()
    """What such a server is told."""
    seed: int | None = None
    """By which the server is known to be this plan's; None when the user's `arguments` name another."""
    grace_s: float = 0.0
    """How long what was started may take to end what it started in its turn, elsewhere, such as a container."""


def launch_plan(
    options: SGLangOptions, model: ModelFacts, *,
    python: str, location: str, version: int, port: int, device: str, accelerators: int, threads: int, seed: int,
    orders: str, shared: str = "",
) -> LaunchPlan:  # fmt: skip
    """How to serve the model at `location` under policy version `version` on 127.0.0.1:`port`.

    `device` is torch's name ("cpu", "cuda"); `accelerators` counts the cell's own, 0 on a CPU; `orders` is a folder for
    what the weight loader is to do, `shared` one for pages that servers share. ConfigError when the parallel sizes do
    not fit the accelerators.
    """
    cpu = device.partition(":")[0] == "cpu"
    tp = _tensor_parallel(options, 1 if cpu else max(1, accelerators))
    module = "gyre_sglang_server.serve" if cpu else "sglang.launch_server"
    start = options.command or (python, "-m", module)
    seed &= 0x7FFFFFFF
    flags = [
        "--model-path", location, "--host", "127.0.0.1", "--port", str(port),
        "--weight-version", str(version), "--random-seed", str(seed),
        "--dtype", options.dtype, "--page-size", str(options.page_size),
        "--skip-tokenizer-init", "--incremental-streaming-output", "--enable-cache-report", "--skip-server-warmup",
        "--log-level-http", "warning",
    ]  # fmt: skip
    flags += _sizes(options, model, cpu)
    flags += [] if options.overlap else ["--disable-overlap-schedule"]
    flags += ["--tp-size", str(tp)] if tp > 1 else []
    flags += ["--dp-size", str(options.dp)] if options.dp > 1 else []
    flags += ["--ep-size", str(options.ep)] if options.ep > 1 else []
    flags += ["--enable-return-routed-experts"] if options.routed_experts else []
    flags += _sharing(options, shared, cpu)
    if not options.command and options.dp == 1:  # SGLang gives tensors to no replicas: they load versions from disk
        flags += ["--custom-weight-loader", LOADER]
    flags += ["--api-key", options.api_key] if options.api_key else []
    flags += ["--device", "cpu", "--attention-backend", "torch_native"] if cpu else ["--enable-memory-saver"]
    flags += ["--sleep-on-idle"] if cpu else []  # its scheduler else spins on a core that others need
    words = (*flags, *options.arguments)
    spare = (*start, "--spare") if cpu and options.cpu_spare and not options.command else ()
    return LaunchPlan(
        (*start, *words), _variables(cpu, threads, orders), port, spare, words,
        seed=None if any(word.startswith("--random") for word in options.arguments) else seed,
        grace_s=COMMAND_GRACE_S if options.command else 0.0,
    )  # fmt: skip


def require_sizes(options: SGLangOptions, device: str, accelerators: int) -> None:
    """ConfigError, before anything starts, when no server of these sizes can be in the cell."""
    cpu = device.partition(":")[0] == "cpu"
    _tensor_parallel(options, 1 if cpu else max(1, accelerators))
    _sharing(options, "", cpu)


def _tensor_parallel(options: SGLangOptions, accelerators: int) -> int:
    tp = options.tp or max(1, accelerators // options.dp)
    if tp * options.dp > accelerators or (options.tp == 0 and accelerators % options.dp):
        raise ConfigError(
            "planning the launch of SGLang",
            got=f"tp {options.tp or 'automatic'}, dp {options.dp} on {accelerators} accelerator(s)",
            expected="tp * dp accelerators in the cell", fix="Change engine.tp, engine.dp or cells.accelerators.",
        )  # fmt: skip
    if tp % options.ep:
        raise ConfigError(
            "planning the launch of SGLang", got=f"ep {options.ep}", expected=f"a divisor of the {tp} of tp",
            fix="Change engine.ep.",
        )  # fmt: skip
    return tp


def _sizes(options: SGLangOptions, model: ModelFacts, cpu: bool) -> list[str]:
    flags: list[str] = []
    if options.context_length:
        asked = options.context_length + SPARE_TOKENS
        flags += ["--context-length", str(min(asked, model.positions) if model.positions else asked)]
    running = options.max_running or (32 if cpu else 0)
    flags += ["--max-running-requests", str(running)] if running else []
    pool = options.kv_tokens or (32768 if cpu else 0)
    flags += ["--max-total-tokens", str(-(-pool // options.page_size) * options.page_size)] if pool else []
    fraction = options.mem_fraction_static or (0.3 if cpu else 0.0)
    flags += ["--mem-fraction-static", str(fraction)] if fraction else []
    return flags


def _sharing(options: SGLangOptions, folder: str, cpu: bool) -> list[str]:
    if not options.kv_share_gb:
        return []
    if not cpu:
        raise ConfigError(
            "planning the launch of SGLang", got=f"kv_share_gb {options.kv_share_gb} on accelerators",
            expected="0: our linker copies pages of CPU pools only", fix="Leave engine.kv_share_gb out.",
        )  # fmt: skip
    config = {
        "linker": "SharedPages",
        "linker_module_path": "gyre_sglang_server.pages",
        "linker_extra_config": {"folder": folder, "limit_bytes": int(options.kv_share_gb * 2**30)},
    }
    return [
        "--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic",
        "--unified-cache-external-linker-config", json.dumps(config),
    ]  # fmt: skip


def _variables(cpu: bool, threads: int, orders: str) -> dict[str, str]:
    always = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "PYTHONPATH": str(SERVER_SIDE),
        "GYRE_SGLANG_ORDERS": orders,
    }
    if not cpu:
        return always
    many = str(max(1, threads))
    return always | {
        "SGLANG_PLATFORM": "gyre_cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": many,
        "MKL_NUM_THREADS": many,
    }
