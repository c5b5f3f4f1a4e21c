"""The launch plan: how `vllm serve` is called for a model on a cell's accelerators.

Invariant: pure; the same options, model and place give the same words and variables, and nothing is started or read
here but the existence of an interpreter (`interpreter`). What the plan decides: parallel sizes from the number of
accelerators, the memory share that leaves room for training residents, the flags a CPU needs, and the switches this
plugin relies on (token ids only, raw logprobs, cached-token counts, our worker extension).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from gyre_core import ConfigError
from gyre_core.environments import find, read_spec

from gyre_vllm.options import VLLMOptions

ENVIRONMENT = Path(__file__).with_name("environment.toml")
SERVER_MODULES = Path(__file__).with_name("inside")
"""Put on the server's path: what runs inside it. Imports nothing of Gyre."""
EXTENSION = "gyre_vllm_worker.GyreWorker"
MODEL_NAME = "gyre"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server runs. `host` is that of its HTTP interface; `accelerators` 0 means CPU; `seed` steers calls
    without a seed of their own."""

    host: str
    port: int
    accelerators: int = 0
    threads: int = 1
    seed: int = 0
    side_host: str = "127.0.0.1"
    side_port: int = 0
    """Where the NIXL connectors of two servers find each other; only with `transfers`."""
    side_interface: str = ""
    """Name of the interface with that address; empty: not known."""
    name: str = MODEL_NAME
    """Under which it serves the model; one of its own tells it from another server on its port."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Words and variables of the server's process; the variables come on top of the inherited ones."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    url: str


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallel sizes; their product is the number of accelerators (1 on a CPU)."""

    tensor: int
    pipeline: int
    data: int


def degrees(options: VLLMOptions, accelerators: int) -> Degrees:
    """The parallel sizes of a cell. ConfigError if they do not multiply to its accelerators."""
    rest = options.pipeline_parallel * options.data_parallel
    have = max(accelerators, 1)
    tensor = options.tensor_parallel or have // rest
    if accelerators == 0 and not options.tensor_parallel:
        tensor = 1
    if tensor < 1 or (accelerators > 0 and tensor * rest != have):
        raise ConfigError(
            "planning the vLLM server of a cell",
            got=f"tensor {options.tensor_parallel or tensor} x pipeline {options.pipeline_parallel} x data "
            f"{options.data_parallel} on {accelerators} accelerators",
            expected="a product equal to the cell's accelerators",
            fix="Change the degrees in [engine] or `accelerators` in [cells]; tensor_parallel 0 takes the rest.",
        )
    return Degrees(tensor, options.pipeline_parallel, options.data_parallel)


def memory_share(options: VLLMOptions) -> float:
    """vLLM's `gpu_memory_utilization`: what may be used of a device, less what the trainer keeps on it."""
    resident = options.resident_gb / options.device_memory_gb if options.resident_gb else 0.0
    share = round(options.gpu_memory_utilization - resident, 4)
    if share <= 0:
        raise ConfigError(
            "planning the vLLM server's memory",
            got=f"{options.resident_gb} GiB of {options.device_memory_gb} GiB kept by training",
            expected=f"less than {options.gpu_memory_utilization:.0%}",
        )
    return share


def interpreter(options: VLLMOptions, base: str = ".") -> tuple[str, ...]:
    """The words that start `vllm serve`; a relative `python` means the folder `base`. ConfigError if no environment has
    been built or named."""
    if options.command:
        return options.command
    python = Path(base, options.python) if options.python else find("vllm", spec=read_spec(ENVIRONMENT))
    if python is None or not python.exists():
        raise ConfigError(
            "looking for an environment with vLLM",
            got=f"{python or 'none that is built'}",
            expected="a Python interpreter that has it",
            fix="Build one with `tools/engine_env.py vllm`, or set `python`, `command` or `url` in [engine].",
        )
    return (str(python), "-m", "vllm.entrypoints.cli.main", "serve")


def seed_of(seed: int, name: str) -> int:
    """The server's own seed: two cells, or two lives of one, must not sample the same tokens."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "big") >> 1


def launch_plan(options: VLLMOptions, model: str, start: tuple[str, ...], place: Place) -> LaunchPlan:
    """How to serve the model folder `model` at `place`; `start` comes from `interpreter`."""
    sizes = degrees(options, place.accelerators)
    words = [*start, model, "--served-model-name", place.name, "--host", place.host, "--port", str(place.port)]
    words += ["--tokens-only", "--skip-tokenizer-init", "--generation-config", "vllm", "--seed", str(place.seed)]
    words += ["--logprobs-mode", "raw_logprobs", "--enable-prompt-tokens-details", "--worker-extension-cls", EXTENSION]
    words += ["--dtype", options.dtype, "--max-num-seqs", str(options.max_running)]
    if options.max_context:
        words += ["--max-model-len", str(options.max_context)]
    for flag, size in (("tensor", sizes.tensor), ("pipeline", sizes.pipeline), ("data", sizes.data)):
        if size > 1:
            words += [f"--{flag}-parallel-size", str(size)]
    if sizes.data > 1:  # left alone vLLM starts one for each replica, and an abort reaches the calls of one alone
        words += ["--api-server-count", "1"]
    if options.expert_parallel:
        words.append("--enable-expert-parallel")
    if options.routed_experts:
        words.append("--enable-return-routed-experts")
    if options.transfers:
        words += ["--kv-transfer-config", _NIXL]
    words += _memory_words(options, place)
    if options.eager or not place.accelerators:
        words.append("--enforce-eager")
    env = _variables(place) | (_side(place) if options.transfers else {}) | dict(options.environment)
    url = f"http://[{place.host}]:{place.port}" if ":" in place.host else f"http://{place.host}:{place.port}"
    return LaunchPlan((*words, *options.arguments), tuple(sorted(env.items())), url)


_NIXL = (
    '{"kv_connector":"NixlConnector","kv_connector_module_path":"gyre_vllm_connector","kv_role":"kv_both",'
    '"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"enforce_handshake_compat":false}}'
)
"""Our own form of the stock connector. Not `bidirectional_kv_xfer`: what a server has fetched it would hold for a fetch
back that nobody makes, and step all that time without work. Its compatibility hash has the model's folder in it, which
is another one for each version that a server was started with; what else it has is the same for all cells of a run."""


def _side(place: Place) -> dict[str, str]:
    """Where others find this server's connector and, on a CPU, by which interface NIXL's UCX sends: left to itself it
    listens on every one but the loopback, also where the cells are all on this machine. With accelerators it has better
    ways than an interface with an address, and only the machine's owner knows them (`environment` in [engine])."""
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": place.side_host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.side_port)}
    if not place.accelerators and place.side_interface:
        env["UCX_NET_DEVICES"] = place.side_interface
    return env


def _memory_words(options: VLLMOptions, place: Place) -> list[str]:
    size = options.kv_cache_gb or (0.0 if place.accelerators else 1.0)
    words = ["--kv-cache-memory-bytes", str(int(size * GIB))] if size else []
    if place.accelerators:
        words += ["--gpu-memory-utilization", str(memory_share(options))]
        words += [] if options.transfers else ["--enable-sleep-mode"]
    return words


def _variables(place: Place) -> dict[str, str]:
    """`VLLM_SERVER_DEV_MODE` opens pause, resume, sleep and worker calls; the rest keeps a server quiet and local."""
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(SERVER_MODULES),
        "PYTHONUNBUFFERED": "1",
    }
    if not place.accelerators:
        env |= {
            "OMP_NUM_THREADS": str(place.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    return env
