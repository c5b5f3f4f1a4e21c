"""The platform class; imported by SGLang alone, and only when it was asked for (see `activation`)."""

# mypy: disable-error-code="import-not-found,misc"
from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Torch operations only: no Triton, no compiler, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities(supports_triton=False)

    def get_dispatch_key_name(self) -> str:
        """Which form of a fused operation to run."""
        return "native"

    def get_default_attention_backend(self) -> str:
        """Scaled dot product attention of torch."""
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """None that needs a C compiler."""
        return "eager"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is no driver to pin for."""
        return False

    def get_torch_profiler_activity_str(self) -> str:
        """For profiles asked for by name."""
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        """For profiles."""
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Called once in every process of the server."""
        from sglang.srt.mem_cache.pool_host import common

        # The host buffer that captures routed experts would be registered with a CUDA driver otherwise.
        common.ALLOC_MEMORY_FUNCS["cpu"] = _plain_buffer


def _plain_buffer(
    dims: Any, dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any, granularity: int | None = None
) -> torch.Tensor:
    return torch.zeros(dims, dtype=dtype)
