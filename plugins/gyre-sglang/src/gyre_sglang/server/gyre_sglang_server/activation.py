"""SGLang on plain torch on a CPU: the entry point and what SGLang asks a platform.

SGLang's own CPU backend needs kernels that are on no package index. An out-of-tree platform with the dispatch key
"native" makes every fused operation take its torch form instead. Invariant: without SGLANG_PLATFORM=gyre_cpu nothing
here takes part, so a machine with accelerators is untouched. Not here: anything about speed.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from gyre_sglang_server.settings import wanted_platform

NAME = "gyre_cpu"


def activate() -> str | None:
    """For the entry-point group `sglang.srt.platforms`: the class to use, None to stay out of it."""
    return "gyre_sglang_server.cpu.CpuPlatform" if wanted_platform() == NAME else None
