"""Options of the SGLang engine; import-light.

Invariant: the defaults serve on the cell's accelerators, or on a CPU; a combination that cannot keep the engine
protocol's promises is refused when the options are made, with the field's name.
"""

from __future__ import annotations

from dataclasses import dataclass

WRITTEN_FOR = "0.5.23"
"""The SGLang release whose interface this package was written and tested against."""
DETERMINISTIC = "--enable-deterministic-inference"
"""What lets a server honour seeds, given in `arguments`."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
ON_UPDATE = ("keep", "recompute")


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """Where the server comes from and how it is sized. Counts are of tokens unless said otherwise."""

    python: str = ""
    """Interpreter of the environment SGLang is installed in. Empty: the environment named "sglang" in the cache folder
    (`tools/engine_env.py sglang` builds it)."""
    command: tuple[str, ...] = ()
    """What starts the server instead of `python -m sglang.launch_server`; the flags are put behind it."""
    url: str = ""
    """A server that runs already, such as http://host:30000. It must be this cell's alone."""
    api_key: str = ""
    arguments: tuple[str, ...] = ()
    """Further flags of the server, put last."""

    dtype: str = "auto"
    context_length: int = 0
    """Prompt plus sampled tokens of one call; 0 means all the model and the KV pool allow."""
    max_running: int = 0
    """Calls in one batch; 0 leaves it to the server (32 on a CPU)."""
    kv_tokens: int = 0
    """Size of the KV pool; 0 sizes it by `mem_fraction_static` (32768 on a CPU)."""
    page_size: int = 16
    """Prompt tokens are found in the prefix cache in multiples of this."""
    mem_fraction_static: float = 0.0
    """Share of an accelerator's memory for weights and KV, the rest is left for the trainer's residents; 0 leaves it to
    the server."""
    tp: int = 0
    """Tensor parallel size; 0 means the cell's accelerators divided by `dp`."""
    dp: int = 1
    """Replicas of the model in one server; more than one load versions from disk alone, and not by Gyre's loader."""
    ep: int = 1
    """Expert parallel size; must divide the accelerators."""
    routed_experts: bool = False
    """Record the experts every token was routed to (MoE), for the trainer to replay."""
    overlap: bool = False
    """SGLang's overlapped scheduler. It has one forward pass in flight when it is paused, whose token it then marks
    with the policy version that comes after; so with it, updates must "recompute"."""
    on_update: str = "keep"
    """What running calls do when the weights change: "keep" their KV and go on, or "recompute" it under the new
    weights."""
    cpu_spare: bool = True
    """On a CPU, `sleep` ends the server, since SGLang cannot give host memory back. With this a new one is started at
    once up to where it would load a model, so that `wake` is short; it holds the memory of its imports."""

    kv_share_gb: float = 0.0
    """Gigabytes of KV pages that the cells of a run on one machine leave in shared memory for one another, so that a
    session that is re-routed is not prefilled again; 0 shares nothing. CPU only."""
    kv_share_folder: str = ""
    """Instead of shared memory: a folder that all machines of the run see, so that all their cells share pages."""

    start_timeout_s: float = 600.0
    request_timeout_s: float = 60.0
    """Of a control request (pause, flush, load); weights and generation have no such limit."""
    weights_timeout_s: float = 600.0
    stall_s: float = 180.0
    """Calls fail when the server says nothing at all for so long while it has calls to run."""
    chunk_s: float = 0.1
    """A call's answer is read so often, and what has come by then is handed out together; its first token and its end
    are handed out at once."""

    def __post_init__(self) -> None:
        if self.url and (self.python or self.command or self.arguments or self.kv_share_gb):
            raise _wrong("url", self.url, "no python, command, arguments or kv_share_gb: the server runs already")
        if self.kv_share_folder and not self.kv_share_gb:
            raise _wrong("kv_share_folder", self.kv_share_folder, "kv_share_gb, how much may lie in it")
        if self.dtype not in DTYPES:
            raise _wrong("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.on_update not in ON_UPDATE:
            raise _wrong("on_update", self.on_update, f"one of {', '.join(ON_UPDATE)}")
        if self.overlap and self.on_update == "keep":
            raise _wrong("overlap", True, 'on_update = "recompute", or overlap = false')
        if not 0 <= self.mem_fraction_static < 1:
            raise _wrong("mem_fraction_static", self.mem_fraction_static, "at least 0 and less than 1")
        for name in ("context_length", "max_running", "kv_tokens", "tp", "kv_share_gb", "chunk_s"):
            if getattr(self, name) < 0:
                raise _wrong(name, getattr(self, name), "0 or more")
        if self.chunk_s >= self.stall_s:
            raise _wrong(
                "chunk_s", self.chunk_s, "less than stall_s, after which a server that is not heard has failed"
            )
        for name in ("page_size", "dp", "ep", "start_timeout_s", "request_timeout_s", "weights_timeout_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise _wrong(name, getattr(self, name), "more than 0")


def _wrong(name: str, got: object, expected: str) -> ValueError:
    return ValueError(f"options of SGLangOptions: {name} is {got!r}, expected {expected}")
