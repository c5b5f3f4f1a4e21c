"""Contributions in the core's memory: the option handover = "memory".

Invariants: a contribution lies with the core whole or not at all, and is counted at most once; those of an earlier step
are dropped when a step opens. What this costs: nothing of the open step is at rest, so when the core's process ends,
the step's contributions are gone and its micro-batches are computed again (with handover = "disk" a resumed run counts
those that had been counted). The checkpoint, and so every applied step, is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gyre_core import Contribution, InfrastructureError
from gyre_weights import WeightsError
from gyre_weights.arrays import torch_code
from gyre_weights.handover import Endpoint, Receiver, hand_over, whole

from gyre_local.train.contributions import Gradients, Suspect, check_header, header_of

SCHEME = "memory:"
ENDPOINT = "handover.json"


def memory_location(contribution_id: str) -> str:
    """What stands in `Contribution.location`; never the name of a file."""
    return SCHEME + contribution_id


def in_memory(contribution: Contribution) -> bool:
    """Whether its gradient lies in the core's memory."""
    return contribution.location.startswith(SCHEME)


class CoreMemory:
    """The core's side."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, run_dir: str, address: str, timeout_s: float
    ) -> None:
        """`address`: this machine's for the satellites."""
        code = torch_code("gradients", dtype)
        forms = {name: (code, shape) for name, shape in shapes.items()}
        self._receiver = Receiver(whole(forms), host=address, idle_s=timeout_s)
        self._own: dict[str, Gradients] = {}
        self._place = Path(run_dir) / ENDPOINT
        self._endpoint = self._receiver.start()
        self._endpoint.save(self._place)

    @property
    def receiver(self) -> Receiver:
        """Counts of what came, and what is held."""
        return self._receiver

    def open_step(self, version: int) -> None:
        """Take gradients of `version` from now on; drop all others."""
        self._own.clear()
        self._receiver.open_step(version)

    def keep(self, contribution: Contribution, gradients: Gradients) -> None:
        """The core's own contribution: its tensors are kept as they are."""
        self._own[contribution.id] = gradients

    def take(self, contribution: Contribution) -> Gradients:
        """Take a contribution out. InfrastructureError when it is not here; ValueError when it is not the one it is
        said to be."""
        own = self._own.pop(contribution.id, None)
        if own is not None:
            return own
        doing = f"taking contribution {contribution.id!r} from memory"
        try:
            arrived = self._receiver.take(contribution.id)
        except WeightsError as error:
            raise InfrastructureError(doing, got=str(error), expected="a gradient that was handed over") from error
        check_header(contribution, arrived.meta, doing)
        tensors = {name: tensor.torch() for name, tensor in arrived.tensors().items()}
        return Gradients(tensors, tuple(Suspect(batch, tuple(names)) for batch, names in arrived.meta["suspects"]))

    def close(self) -> None:
        """Stop listening and forget what is held."""
        self._receiver.close()
        try:
            if Endpoint.load(self._place) == self._endpoint:
                self._place.unlink(missing_ok=True)
        except WeightsError:
            pass  # another core has taken the place, or the run directory is gone


def send_to_core(contribution: Contribution, gradients: Gradients, run_dir: str, timeout_s: float) -> None:
    """A satellite's side. InfrastructureError when the core is gone, refuses, or is silent for `timeout_s`."""
    meta: dict[str, Any] = header_of(contribution, gradients.suspects)
    try:
        endpoint = Endpoint.load(Path(run_dir) / ENDPOINT)
        hand_over(
            endpoint, contribution.id, contribution.version, gradients.tensors, meta=meta, idle_s=timeout_s
        )  # fmt: skip
    except WeightsError as error:
        raise InfrastructureError(
            f"handing contribution {contribution.id!r} to the core", got=str(error), expected="a core that takes it",
            fix="Lease its micro-batches again.",
        ) from error  # fmt: skip
