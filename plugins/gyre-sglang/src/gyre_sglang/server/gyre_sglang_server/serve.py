"""SGLang's stock HTTP server, startable beside a CPU build of torch: `python -m gyre_sglang_server.serve FLAGS`.

torchvision's wheels are built for CUDA and their operators do not load beside a CPU torch, but SGLang imports
torchvision whatever the model. Naming two operators' schemas is enough for that import, in each of the server's
processes: they are spawned, and run this module as `__mp_main__` first. Importing it does nothing.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import contextlib
import sys


def name_operators() -> None:
    """Tell torch the schemas of torchvision's operators that its Python part refers to."""
    import torch.library

    for operator in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # a torchvision that loads defines them itself
            schema = "(Tensor dets, Tensor scores, float threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)


def serve(argv: list[str]) -> None:
    """Run the server until it is ended."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(argv))


if __name__ in ("__main__", "__mp_main__"):
    name_operators()
if __name__ == "__main__":
    serve(sys.argv[1:])
