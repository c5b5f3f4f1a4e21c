"""Options of the vLLM engine; import-light.

Invariant: a combination that cannot work is refused when the options are made, with the fields' names. What depends on
the machine (free memory, number of accelerators) is decided in `gyre_vllm.launch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

WRITTEN_FOR = (0, 32)
"""Major and minor version of vLLM whose interface this plugin was written and tested for."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
ON_UPDATE = ("keep", "recompute")
SLEEP = ("auto", "memory", "restart")


@dataclass(frozen=True, slots=True)
class VLLMOptions:
    """Where the server comes from and how it is sized. Counts are of tokens unless said otherwise."""

    python: str = ""
    """Interpreter of the environment that has vLLM. Empty: the environment the engine tool built."""
    command: tuple[str, ...] = ()
    """Instead of `python`: the words that start `vllm serve` (a container, a wrapper); model and arguments follow."""
    url: str = ""
    """Instead of both: a server that runs already, such as "http://node7:8000". It is never started or ended by us."""
    arguments: tuple[str, ...] = ()
    """More arguments for `vllm serve`, put last."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More environment variables for the server."""
    dtype: str = "auto"
    max_context: int = 0
    """Prompt plus sampled tokens of one call; 0 means all the model allows."""
    max_running: int = 64
    """Calls in one batch."""
    kv_cache_gb: float = 0.0
    """Size of the KV cache in GiB; 0 lets vLLM fill what is left on an accelerator, and means 1 GiB on a CPU."""
    gpu_memory_utilization: float = 0.9
    """Share of an accelerator's memory the server may use, training residents included."""
    resident_gb: float = 0.0
    """Memory of each accelerator that stays with the trainer of this cell while the engine is awake; needs
    `device_memory_gb`."""
    device_memory_gb: float = 0.0
    """Memory of one accelerator in GiB; only needed with `resident_gb`."""
    tensor_parallel: int = 0
    """0: the cell's accelerators divided by the other degrees."""
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    """Spread a mixture's experts over the tensor- and data-parallel ranks."""
    eager: bool = False
    """No CUDA graphs and no compilation; always so on a CPU."""
    stream_tokens: int = 1
    """Sampled tokens gathered by the server before it sends them; the first and the last are sent at once."""
    on_update: str = "keep"
    """Calls that run through a change of weights: "keep" their KV, or "recompute" all of it under the new weights."""
    sleep: str = "auto"
    """How memory is given back: "memory" inside the running server (sleep mode on accelerators, our worker extension on
    a CPU; neither with `transfers`, whose connector needs its blocks where they are), "restart" ends the server and
    starts it again, "auto" takes the first that the server offers."""
    routed_experts: bool = False
    """Let the server return the experts each token was routed to."""
    transfers: bool = False
    """Start the server with its NIXL connector, so that sessions can be handed to another vLLM with their KV."""
    host: str = ""
    """An address of this machine that the server listens on. Empty: its HTTP on 127.0.0.1, and what servers of other
    cells must reach (`transfers`) on the address from which this machine reaches the run's."""
    port: int = 0
    """0: a free one."""
    start_timeout_s: float = 900.0
    control_timeout_s: float = 120.0
    """For pause, resume, abort and the like; loading weights has `start_timeout_s`."""
    stall_s: float = 600.0
    """The engine counts as hung when calls run and none of them gets a token for so long."""

    def __post_init__(self) -> None:
        self._positive("max_running", "gpu_memory_utilization", "pipeline_parallel", "data_parallel", "stream_tokens")
        self._positive("start_timeout_s", "control_timeout_s", "stall_s")
        for name, allowed in (("dtype", DTYPES), ("on_update", ON_UPDATE), ("sleep", SLEEP)):
            if getattr(self, name) not in allowed:
                raise ValueError(_wrong(name, repr(getattr(self, name)), f"one of {', '.join(allowed)}"))
        given = [name for name in ("python", "command", "url") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(_wrong(" and ".join(given), "all of them", "one way to the server"))
        if self.url and urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(_wrong("url", repr(self.url), "an address such as http://node7:8000"))
        if self.transfers and self.host in ("0.0.0.0", "::"):
            raise ValueError(_wrong("host", repr(self.host), "an address that servers of other cells can be told"))
        if self.url and self.sleep == "restart":
            raise ValueError(_wrong("sleep", "'restart' for a server that is not ours", "'auto' or 'memory'"))
        if self.transfers and self.sleep == "memory":
            raise ValueError(_wrong("sleep", "'memory' with transfers", "'auto' or 'restart': NIXL keeps KV in place"))
        if min(self.max_context, self.kv_cache_gb, self.resident_gb, self.device_memory_gb, self.tensor_parallel) < 0:
            raise ValueError(_wrong("sizes", "a negative number", "0 or more"))
        if self.gpu_memory_utilization > 1:
            raise ValueError(_wrong("gpu_memory_utilization", str(self.gpu_memory_utilization), "a share up to 1"))
        if self.resident_gb and self.device_memory_gb <= self.resident_gb:
            raise ValueError(_wrong("device_memory_gb", str(self.device_memory_gb), "more than resident_gb"))

    def _positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(_wrong(name, str(getattr(self, name)), "more than 0"))


def _wrong(name: str, came: str, expected: str) -> str:
    return f"options of VLLMOptions: {name}: got {came}, expected {expected}"
