"""One worker process: a job in, an answer out, and nothing left behind.

Invariant: the worker's environment holds no more than it needs; its process group ends with the call. That it cannot
start, or does not answer as agreed, is our fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Mapping
from typing import Any

from gyre_core import InfrastructureError

from gyre_harnesses.foreign import interpreter
from gyre_harnesses.options import VerifiersOptions

_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
_LINE_BYTES = 1 << 26
_FIX = "Install verifiers 0.4 and the environment's package there, or set the option python to where they are."


def environment(options: VerifiersOptions, python: str, home: str, key: str) -> dict[str, str]:
    """What the worker's process sees; its PATH begins where `python` is, where the package finds the uv beside it."""
    path = os.pathsep.join([os.path.dirname(python), os.defpath])
    base = {"PATH": path, "HOME": home, "LANG": "C.UTF-8", "GYRE_VF_KEY": key}
    return {**base, **options.env}


def environment_config(options: VerifiersOptions) -> dict[str, Any]:
    """The package's `[env]` table: the task set by id, our defaults for its one agent, the user's own over them."""
    agent = {"harness": {"id": options.harness}, "runtime": {"type": options.runtime}}
    table: dict[str, Any] = {"taskset": {"id": options.environment, **options.arguments}, "agent": agent}
    return {**table, **options.table}


async def ask(options: VerifiersOptions, job: Mapping[str, Any], key: str, timeout_s: float | None) -> dict[str, Any]:
    """The worker's answer; TimeoutError when it takes longer."""
    python = interpreter(options.python, "verifiers")
    doing = f"running the verifiers environment {options.environment!r}"
    with tempfile.TemporaryDirectory(prefix="gyre-verifiers-") as home:
        try:
            worker = await asyncio.create_subprocess_exec(
                python,
                _WORKER,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment(options, python, home, key),
                cwd=home,
                limit=_LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(doing, got=str(error), expected=f"{python} to run", fix=_FIX) from error
        try:
            line = json.dumps(job).encode() + b"\n"
            async with asyncio.timeout(timeout_s):
                out, err = await worker.communicate(line)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            await worker.wait()
    try:
        answer: dict[str, Any] = json.loads(out)
    except ValueError:
        said = err.decode("utf-8", "replace").strip()[-800:]
        raise InfrastructureError(doing, got=f"its process ended: {said}", expected="an answer", fix=_FIX) from None
    if "error" in answer:
        got = f"{answer['error']}\n{answer.get('trace', '')}"
        raise InfrastructureError(doing, got=got, expected="an environment that loads", fix=_FIX)
    return answer
