"""vLLM's NIXL connector with what moving a session that decodes needs (`kv_connector_module_path`).

Stock, KV is exported when a call reaches its own end; a call that is ended from outside exports nothing, so a session
that moves in mid-call would have its last, partly filled block computed again, at the source and at the destination.
Here a second request, the "take", names a running call: that call ends at its next token, its blocks stay for the
destination to fetch, and the take's answer says where they are.

It runs in vLLM's environment, imports nothing of Gyre and was written for vLLM 0.32. Invariants:
  * a taken call is ended by its length, never in the middle of a pass: every token but the last has its KV;
  * only as many tokens count as fetched as the source had computed; what a prompt has beyond is computed here;
  * blocks that were fetched are the fetching call's own: they go when it ends, and are not held for a fetch back.
What it does not do: verify. Tokens, version and age are compared by the caller (`gyre_vllm.handover`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker  # type: ignore[import-not-found]
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (  # type: ignore[import-not-found]
    NixlPullConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (  # type: ignore[import-not-found]
    NixlPullConnectorScheduler,
)
from vllm.platforms import current_platform  # type: ignore[import-not-found]

TAKE = "gyre_take"
"""In a request's `kv_transfer_params`: the id of the running call to end and export, as the caller sent it."""


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """The stock connector but for its scheduler's side. It bears the stock one's name, because vLLM decides by that
    name what a connector can do."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with _sparing_on_a_cpu():
            super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = GyreScheduler(vllm_config, self.engine_id, kv_cache_config)


HELD_STEP_S = 0.01
"""Between two steps of a server that has nothing to do but to hold blocks."""
PROGRESS_US = 1000
"""How often an agent's progress thread looks on a CPU."""


@contextlib.contextmanager
def _sparing_on_a_cpu() -> Iterator[None]:
    """On a CPU: agents made here do not spin. From the first fetch on NIXL's progress thread would take a whole core
    from the model; it cannot be left out, since it answers the other side while this server has no work."""
    module: Any = sys.modules.get(getattr(base_worker.NixlWrapper, "__module__", ""))
    stock, configure = getattr(module, "nixlBind", None), base_worker.nixl_agent_config
    if current_platform.device_type == "cpu" and stock is not None:
        module.nixlBind = _Sparing(stock)
        base_worker.nixl_agent_config = lambda **how: configure(**how | {"num_threads": 0})  # copies go in the caller's
    try:
        yield
    finally:
        base_worker.nixl_agent_config = configure
        if stock is not None:
            module.nixlBind = stock


class _Sparing:
    """NIXL's bindings, but for how often an agent looks: its Python interface has no option for that."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 - NIXL's name
        config.pthrDelay = PROGRESS_US
        return self._stock.nixlAgent(name, config)


class GyreScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Knows the calls that run, to find the one that a take names."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._calls: dict[str, Any] = {}
        self._takes: dict[str, str] = {}
        """Of calls that are being taken, the request that waits for their blocks."""
        self._taken: dict[str, dict[str, Any] | None] = {}
        """What that request is to answer."""

    def on_new_request(self, request: Any) -> None:
        """A take ends the call that it names at its next token."""
        super().on_new_request(request)
        self._calls[request.request_id] = request
        named = (request.kv_transfer_params or {}).get(TAKE)
        call = self._find(str(named)) if named else None
        if call is None:
            return
        under_way = call.num_output_placeholders
        call.max_tokens = min(call.max_tokens, call.num_output_tokens + max(under_way, 1))
        call.kv_transfer_params = {"do_remote_decode": True}
        self._reqs_in_batch.add(call.request_id)
        self._takes[call.request_id] = request.request_id

    def _find(self, named: str) -> Any:
        """The call of this id, if it samples and no take waits for it; vLLM adds a suffix of its own to what the caller
        sent."""
        for name, call in self._calls.items():
            if named in (name, name.rpartition("-")[0]):
                samples = call.status.name == "RUNNING" and call.num_output_tokens > 0
                return call if samples and name not in self._takes else None
        return None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A fetch is of no more tokens than the source had computed."""
        params = request.kv_transfer_params or {}
        count, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        held = params.get("remote_num_tokens")
        if count and held is not None and params.get("do_remote_prefill"):
            count = min(count, max(int(held) - num_computed_tokens, 0))
        return count, later and bool(count)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """While no call runs and blocks only wait to be fetched, step now and then: vLLM would step all the time, and
        take the cores from the destination where both are on one host."""
        if not self._calls and scheduler_output.total_num_scheduled_tokens == 0:
            time.sleep(HELD_STEP_S)
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """A taken call's blocks stay, and its take is told; a take's answer is that; others as vLLM does."""
        name = request.request_id
        self._calls.pop(name, None)
        if TAKE in (request.kv_transfer_params or {}):
            self._give_up(name)
            return False, self._taken.pop(name, None)
        take = self._takes.pop(name, None)
        held, where = super().request_finished(request, block_ids)
        if take is not None and take in self._calls:
            self._taken[take] = where
        return held, where

    def _give_up(self, take: str) -> None:
        """This take ended before the call it named, whose blocks nobody waits for now. Else a call is computed in the
        same pass as its take, which comes after it."""
        for name in [name for name, waits in self._takes.items() if waits == take]:
            del self._takes[name]
            self._calls[name].kv_transfer_params = None
            self._reqs_not_processed.add(name)
