"""How a running server takes a version, and what it must be and have for that.

Invariant: what `require_*` refuses was not begun, and the server is as it was; after an error of `load_version` its
weights may be of no version. What a version itself must be is in `gyre_vllm.weights`.
"""

from __future__ import annotations

from dataclasses import asdict

from gyre_core import CapabilityError, InfrastructureError, WeightSource

from gyre_vllm.options import VLLMOptions
from gyre_vllm.server import Server
from gyre_vllm.weights import COLLECTIVE, PACKAGE, ModelVersion, read_meeting


async def load_version(
    server: Server, source: WeightSource, shapes: dict[str, tuple[int, ...]], limit_s: float
) -> None:
    """Let the workers load what lies at the source, or join its group and take what the first member broadcasts, which
    must have these shapes."""
    if server.facts.extension and server.process is None:
        await server.client.rpc("gyre_prepare")  # nobody has asked it of a server that its owner has started anew
    if source.kind == COLLECTIVE:
        await _receive(server, source, shapes, limit_s)
    elif server.facts.extension:
        await server.client.rpc("gyre_load", timeout_s=limit_s, location=source.location, package=PACKAGE)
    else:
        await server.client.rpc("reload_weights", timeout_s=limit_s, weights_path=source.location)


async def _receive(server: Server, source: WeightSource, shapes: dict[str, tuple[int, ...]], limit_s: float) -> None:
    doing = f"receiving policy version {source.version}"
    meeting = asdict(read_meeting(source.location, doing)) | {"timeout_s": limit_s}
    told = await server.client.rpc("gyre_receive", timeout_s=limit_s, meeting=meeting, shapes=shapes, package=PACKAGE)
    versions = {int(answer["version"]) for answer in told}
    if versions != {source.version}:
        raise InfrastructureError(doing, got=f"versions {sorted(versions)}", expected=str(source.version))


def require_vocabulary(server: Server, model: ModelVersion, source: WeightSource) -> None:
    """InfrastructureError when the server serves another model than the folder's."""
    if server.facts.vocab not in (0, model.vocab):
        raise InfrastructureError(
            f"reaching vLLM at {server.client.url}",
            got=f"a vocabulary of {server.facts.vocab}",
            expected=f"{model.vocab}, that of {source.location}",
            fix="Let it serve the run's model.",
        )


def require_loadable(server: Server, model: ModelVersion, doing: str) -> None:
    """CapabilityError for what a server without our extension would get wrong or cannot read."""
    if server.facts.extension:
        return
    if model.is_delta:
        raise CapabilityError(
            doing, got="a delta for a server without Gyre's worker extension", expected="a full version"
        )
    if model.tied and server.facts.device == "cpu":
        raise CapabilityError(
            doing,
            got="a model whose output layer is its embedding, on vLLM's CPU backend without Gyre's worker extension",
            expected="the extension, which loads the output layer too",
            fix="Start the server with `--worker-extension-cls gyre_vllm_worker.GyreWorker`.",
        )


def require_members(server: Server, options: VLLMOptions, source: WeightSource) -> None:
    """CapabilityError when this server's workers cannot all join a group."""
    doing = f"receiving policy version {source.version}"
    if not server.facts.extension:
        raise CapabilityError(doing, got="a server without Gyre's worker extension", expected="the extension")
    if options.data_parallel > 1:
        raise CapabilityError(doing, got="a data-parallel server", expected="data_parallel 1, or a version at rest")
    read_meeting(source.location, doing)
