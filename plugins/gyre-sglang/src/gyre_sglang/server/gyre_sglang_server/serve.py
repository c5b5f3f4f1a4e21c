"""SGLang's stock HTTP server on a CPU: `python -m gyre_sglang_server.serve FLAGS`, or `... serve --spare` for one that
imports everything and reads its flags, a JSON list on one line, from standard input when it is needed.

Two things differ from `python -m sglang.launch_server`. torchvision's wheels are built for CUDA and their operators do
not load beside a CPU torch, but SGLang imports torchvision whatever the model: naming two operators' schemas is enough
for that import. And the server's processes are forked, not spawned: they share the memory of what was imported, and
start at once (there is no accelerator whose driver would mind). Invariant: importing this module does nothing.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys

SPARE = "--spare"


def name_operators() -> None:
    """Tell torch the schemas of torchvision's operators that its Python part refers to."""
    import torch.library

    for operator in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # a torchvision that loads defines them itself
            schema = "(Tensor dets, Tensor scores, float threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)


def fork_children() -> None:
    """Have the server's processes forked; SGLang asks for "spawn" while it launches."""
    choose = multiprocessing.set_start_method

    def always_fork(method: str | None, force: bool = False) -> None:
        choose("fork", force=True)

    multiprocessing.set_start_method = always_fork


def main(argv: list[str]) -> None:
    """Run the server until it is ended."""
    name_operators()
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401 - for the children
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    fork_children()
    if SPARE in argv:
        line = sys.stdin.readline()
        if not line:
            return  # not needed any more
        argv = json.loads(line)
    run_server(prepare_server_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
