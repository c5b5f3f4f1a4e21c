"""What Gyre adds to vLLM's workers: `--worker-extension-cls gyre_vllm_worker.GyreWorker`.

Called by name through the server's `/collective_rpc`. It runs in vLLM's environment and imports nothing of Gyre; it
was written for vLLM 0.32. Invariants:
  * a sampled token's logprob is log-softmax(logits / temperature) over the whole vocabulary, whatever top-k and top-p
    keep (`gyre_prepare`);
  * `gyre_counts` tells, while the scheduler is paused, how many tokens each call has sampled: the exact border between
    two weight versions;
  * after `gyre_load` every layer computes with the new weights, also those that share a tensor;
  * memory is really given back by `gyre_sleep`, or it raises; `gyre_wake` and `gyre_load` then bring all back.
Answers are dicts of plain values; what fails answers `error`.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

INTERFACE = 1
"""Raised with every change of what is called or answered here."""
WAIT_S = 1e-4
"""Between two looks of a worker on a CPU for its next step."""


def _answered(work: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """An error as an answer. Of an order that raises on several workers vLLM's executor takes the first one's failure
    and leaves the others', which it takes for the answers to the next order."""

    @functools.wraps(work)
    def answered(*args: Any, **named: Any) -> dict[str, Any]:
        try:
            return work(*args, **named)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must be an answer
            return {"error": f"{type(error).__name__}: {error}"}

    return answered


class GyreWorker:
    """Mixed into vLLM's worker class; `self` is the worker."""

    model_runner: Any
    vllm_config: Any

    @_answered
    def gyre_prepare(self) -> dict[str, Any]:
        """Make logprobs those of the tempered distribution; say who and what this worker is."""
        runner = self.model_runner
        how = _temper(runner)
        device = str(runner.device)
        if device == "cpu":
            _wait_asleep()
        cache, transfer = self.vllm_config.cache_config, self.vllm_config.kv_transfer_config
        return {
            "interface": INTERFACE,
            "pid": os.getpid(),
            "device": device,
            "tempered": how,
            "vocab": int(self.vllm_config.model_config.get_vocab_size()),
            "max_context": int(self.vllm_config.model_config.max_model_len),
            "max_running": int(self.vllm_config.scheduler_config.max_num_seqs),
            "data_parallel": int(self.vllm_config.parallel_config.data_parallel_size),
            "experts": bool(self.vllm_config.aux_output_config.enable_return_routed_experts),
            "sleep_mode": bool(self.vllm_config.model_config.enable_sleep_mode),
            "counts": _counts(runner) is not None,
            "connector": transfer is not None,
            "takes": getattr(transfer, "kv_connector_module_path", None) == "gyre_vllm_connector",
            "asleep": bool(getattr(self, "_gyre_storages", None)),
            "kv_tokens": int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0),
            "kv_bytes": sum(_storages(_blocks(runner)).values()),
        }

    def gyre_counts(self) -> dict[str, Any]:
        """Tokens sampled so far by each request the worker knows, by vLLM's internal request id."""
        return {"counts": _counts(self.model_runner)}

    @_answered
    def gyre_load(self, location: str, package: str) -> dict[str, Any]:
        """Load the policy version published at `location`; `package` is the folder of gyre-weights."""
        version = _gyre_weights(package).open_version(location)
        self.reload_weights(  # type: ignore[attr-defined]
            weights_iterator=((name, tensor.torch()) for name, tensor in version.items())
        )
        return {"repacked": _repack(self.model_runner)}

    @_answered
    def gyre_receive(self, meeting: dict[str, Any], shapes: dict[str, list[int]], package: str) -> dict[str, Any]:
        """Take the policy version that a group's member 0 broadcasts; this worker is member `first` + its rank.

        `meeting`: host, port, name, first, size, backend, timeout_s. Refuses, before a weight moves, what does not have
        `shapes`. After an error the weights are of no version.
        """
        from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]
        from vllm.model_executor.model_loader import reload as reloading  # type: ignore[import-not-found]

        _gyre_weights(package)
        from gyre_weights.collective import receive_tensors
        from gyre_weights.groups import form_group

        model, config = self.model_runner.model, self.vllm_config.model_config
        began: list[bool] = []

        def check(plan: Any) -> str:
            sent = {name: list(entry.shape) for name, entry in plan.tensors.items()}
            odd = sorted(name for name in sent.keys() | shapes.keys() if sent.get(name) != shapes.get(name))
            return f"{odd[0]} of shape {sent.get(odd[0])}, expected {shapes.get(odd[0])}" if odd else ""

        def write(name: str, value: Any) -> None:
            if not began:
                began.append(True)
                reloading.initialize_layerwise_reload(model)
            model.load_weights([(name, value.clone())])  # kept until its layer is whole

        rank = int(meeting["first"]) + int(self.rank)  # type: ignore[attr-defined]
        where = (str(meeting["host"]), int(meeting["port"]))
        device = "cpu" if meeting["backend"] == "gloo" else str(self.model_runner.device)
        with set_current_vllm_config(self.vllm_config):
            try:
                with form_group(
                    where, str(meeting["name"]), rank, int(meeting["size"]),
                    timeout_s=float(meeting["timeout_s"]), backend=str(meeting["backend"]),
                ) as group:  # fmt: skip
                    held = receive_tensors(group, write, check=check, device=device)
            finally:
                if began:
                    reloading.finalize_layerwise_reload(model, config)
        return {"version": held.version, "repacked": _repack(self.model_runner)}

    @_answered
    def gyre_sleep(self) -> dict[str, Any]:
        """Give weights and KV back to the machine (CPU; accelerators have the server's own sleep mode)."""
        runner = self.model_runner
        if runner.device.type != "cpu":
            raise RuntimeError("gyre_sleep is for CPU workers; use /sleep?level=2 here")
        if self.vllm_config.kv_transfer_config is not None:
            raise RuntimeError("gyre_sleep: a KV connector holds the addresses of the cache; restart the server")
        before = _resident()
        self._gyre_storages = _sizes([*(p.data for p in runner.model.parameters()), *_blocks(runner)])
        for module in runner.model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None  # holds a packed copy of the weights; loading makes it anew
        for storage, _ in self._gyre_storages:
            storage.resize_(0)
        gc.collect()
        _trim()
        return {"before": before, "after": _resident()}

    @_answered
    def gyre_wake(self) -> dict[str, Any]:
        """Take the memory again, of a worker that has it too; what is in it is undefined until `gyre_load`."""
        for storage, size in getattr(self, "_gyre_storages", []):
            storage.resize_(size)
        self._gyre_storages = []
        return {"after": _resident()}


def _wait_asleep() -> None:
    """Let a worker that waits for its next step sleep in between. vLLM's loop yields the processor, which on a busy
    machine (Linux 6.18 and later) puts the thread behind all others for seconds; and it holds Python's lock there, so
    that a handshake with another server comes to nothing for as long."""
    module = sys.modules.get("vllm.distributed.device_communicators.shm_broadcast")
    if module is not None:
        module.sched_yield = lambda: time.sleep(WAIT_S)  # type: ignore[attr-defined]


def _gyre_weights(package: str) -> Any:
    """gyre-weights, found at `package`; it needs nothing but numpy and torch."""
    if "gyre_weights" not in sys.modules:
        path = os.path.join(package, "__init__.py")
        spec = importlib.util.spec_from_file_location("gyre_weights", path, submodule_search_locations=[package])
        if spec is None or spec.loader is None:
            raise RuntimeError(f"gyre_load: no gyre-weights at {package}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["gyre_weights"] = module
        spec.loader.exec_module(module)
    return sys.modules["gyre_weights"]


def _repack(runner: Any) -> list[str]:
    """On a CPU, layers that share another layer's weight keep a packed copy of their own, which vLLM's reloading does
    not renew (a tied output layer would go on with the old weights): pack again. Names of the layers."""
    if runner.device.type != "cpu":
        return []
    found = []
    for name, module in runner.model.named_modules():
        method = getattr(module, "quant_method", None)
        weight = getattr(module, "weight", None)
        if method is not None and hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            method.process_weights_after_loading(module)
            found.append(name)
    return found


def _temper(runner: Any) -> bool:
    """Put a sampler in place whose raw logprobs are tempered; False where this rank samples nothing."""
    sampler = getattr(runner, "sampler", None)
    if sampler is None:
        return False
    kind = type(sampler)
    if kind.__name__.startswith("Tempered"):
        return True
    if kind.__module__ == "vllm.v1.sample.sampler":
        sampler.__class__ = _tempered_v1(kind)
    elif kind.__module__ == "vllm.v1.worker.gpu.sample.sampler":
        sampler.__class__ = _tempered_v2(kind)
        sampler.logprobs_mode = "processed_logprobs"
    else:
        raise RuntimeError(f"gyre_prepare: no way to temper the logprobs of a {kind.__module__}.{kind.__name__}")
    return True


def _tempered_v1(kind: type) -> type:
    """The sampler of model runner V1: "raw" logprobs are taken before any processing; divide by the temperature."""
    import torch

    class TemperedSampler(kind):  # type: ignore[misc]
        def forward(self, logits: Any, sampling_metadata: Any, *rest: Any, **named: Any) -> Any:
            self.gyre_temperature = sampling_metadata.temperature
            return super().forward(logits, sampling_metadata, *rest, **named)

        def compute_logprobs(self, logits: Any) -> Any:
            temperature = self.gyre_temperature
            if temperature is None:  # all greedy
                return logits.log_softmax(dim=-1, dtype=torch.float32)
            divisor = torch.where(temperature < 1e-5, 1.0, temperature).unsqueeze(1)
            return (logits.float() / divisor).log_softmax(dim=-1)

    return TemperedSampler


def _tempered_v2(kind: type) -> type:
    """The sampler of model runner V2: "processed" logits are tempered and then cut; keep them from before the cut."""

    class TemperedSampler(kind):  # type: ignore[misc]
        def _sample_random(
            self, processed_logits: Any, mapping: Any, mapping_np: Any, pos: Any, top_k: Any, top_p: Any, fused: Any
        ) -> Any:
            cut = top_k is not None or top_p is not None
            kept = processed_logits.clone() if cut else processed_logits
            sampled, _ = super()._sample_random(processed_logits, mapping, mapping_np, pos, top_k, top_p, fused)
            return sampled, kept

    return TemperedSampler


def _counts(runner: Any) -> dict[str, int] | None:
    """Sampled tokens by internal request id; None when this runner cannot tell."""
    requests = getattr(runner, "requests", None)
    if isinstance(requests, dict):  # model runner V1
        return {name: len(state.output_token_ids) for name, state in requests.items()}
    states = getattr(runner, "req_states", None)
    if states is None:
        return None
    total = states.total_len.gpu.tolist()  # model runner V2
    prompt = states.prompt_len.np
    return {name: int(total[i]) - int(prompt[i]) for name, i in states.req_id_to_index.items()}


# -- memory on a CPU ---------------------------------------------------------------------------------------------------


def _blocks(runner: Any) -> list[Any]:
    """The tensors of the KV cache."""
    found: list[Any] = []
    for cache in runner.kv_caches:
        found += list(cache) if isinstance(cache, list | tuple) else [cache]
    return found


def _storages(tensors: list[Any]) -> dict[int, int]:
    """Bytes of each storage under these tensors, once."""
    return {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}


def _sizes(tensors: list[Any]) -> list[tuple[Any, int]]:
    """The tensors' storages that hold something, once, and their bytes. Emptied in place, views and owners stay as they
    are and see the memory again when it is taken. Buffers are not among them: loading does not bring them."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]


def _resident() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _trim() -> None:
    """Let the C library give freed memory back to the machine."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
