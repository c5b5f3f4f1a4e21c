"""Megatron-Core on a machine without a GPU, for tests: an import hook that rewrites where it calls torch.cuda.

It edits the source text of `megatron.core` modules as they are imported, line by line, so tracebacks stay right. What
changes is where tensors are placed, the names of tensor types, and calls about streams and random states; no arithmetic
and no collective does. torch is not touched. Only the option `cpu_shim` installs it, it must run before Megatron is
imported, and on a machine with a GPU it refuses. Not here: anything that runs in production.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from gyre_core import ConfigError

RULES: tuple[tuple[str, str], ...] = (
    (r"""device=(['"])cuda\1""", 'device="cpu"'),
    (r"torch\.cuda\.current_device\(\)", '"cpu"'),
    (r"""\.cuda\((?:"cpu")?\)""", ".cpu()"),
    (r"""(['"])torch\.cuda\.(Float|Half|BFloat16)Tensor\1""", r"\1torch.\2Tensor\1"),
    (r"torch\.cuda\.random\.get_rng_state\(device=device\)", "torch.get_rng_state()"),
    (r"torch\.cuda\.get_rng_state\b", "torch.get_rng_state"),
    (r"torch\.cuda\.manual_seed\b", "torch.manual_seed"),
    (r"torch\.cuda\.synchronize\(\)", "None"),
    (r"torch\.cuda\.(current_stream|Stream)\(\)", '__import__("gyre_megatron.cpu_shim").cpu_shim.NO_STREAM'),
    (r"torch\.cuda\.stream\(", '__import__("contextlib").nullcontext('),
    (r"if torch\.is_tensor\(tensor\) and tensor\.is_cuda:", "if torch.is_tensor(tensor):"),
)
_APPENDED = {
    "megatron.core.tensor_parallel.random": (
        "\ndef _set_cuda_rng_state(new_state, device=-1, graph_safe=False):\n    torch.set_rng_state(new_state)\n"
    )
}
_LEFT_ALONE = (
    "megatron.core.inference",
    "megatron.core.datasets",
    "megatron.core.export",
    "megatron.core.distributed.fsdp",
)


class _NoStream:
    """Stands for a stream where everything is in order anyway."""

    def wait_stream(self, *ignored: Any) -> _NoStream:
        """Nothing to wait for; also as the event that it records."""
        return self

    wait_event = record_event = synchronize = wait_stream


NO_STREAM = _NoStream()


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        for pattern, text in RULES:
            source = re.sub(pattern, text, source)
        return compile(source + _APPENDED.get(fullname, ""), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core") or fullname.startswith(_LEFT_ALONE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def install() -> None:
    """Rewrite from now on; ConfigError on a machine with a GPU or after Megatron was imported."""
    import torch

    doing = "preparing Megatron-Core for a CPU"
    if torch.cuda.is_available():
        raise ConfigError(doing, got="a machine with a GPU", expected="none", fix="Leave cpu_shim out.")
    if "megatron.core" in sys.modules:
        raise ConfigError(doing, got="Megatron-Core imported already", expected="this first")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
