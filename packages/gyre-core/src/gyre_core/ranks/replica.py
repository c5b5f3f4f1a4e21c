"""What a rank does with its shards; the base class of a trainer library's adapter, inside the rank's process.

The adapter says which pieces of which named tensors the rank holds; everything that is then the same for all libraries
is here: loading, publishing, contributions, the step's sum, checkpoints, offloading. Invariants: a micro-batch that
fails leaves the open sum as it was; the step's gradient is the sum of the files, divided once; files are filled in
place by their owners, so nothing is gathered. Tensors are used by their methods alone; torch is the adapter's.
"""

from __future__ import annotations

import array
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gyre_core.errors import InfrastructureError
from gyre_core.facts import ModelFacts
from gyre_core.ranks import pieces as shards
from gyre_core.ranks.pieces import Piece, Tensors
from gyre_core.ranks.tensorfile import Entry, TensorFile
from gyre_core.ranks.versions import Holder, as_ours
from gyre_core.ranks.worker import Answer

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Computed:
    """What one rank saw of a micro-batch. Sums are of this rank's share; ranks that only repeat another's work give
    none. `finite`: whether the gradient it added is."""

    finite: bool
    loss: float = 0.0
    trained: int = 0
    executions: tuple[str, ...] = ()
    """Of the whole micro-batch."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class RankReplica(ABC):
    """One rank's share of a training replica."""

    def __init__(self, holder: Holder | None = None) -> None:
        self._holder = holder
        self._folder = Path()
        self._core = False
        self._built = False
        self._step: Sequence[Piece] = ()
        self._away: dict[str, list[Any]] | None = None
        self._steps = 0
        self._table: dict[str, Callable[[Mapping[str, Any], bytes], Answer]] = {
            "import": self._import, "build": self._build, "load": self._load, "logprobs": self._logprobs,
            "accumulate": self._accumulate, "discard": self._discard, "export": self._export, "total": self._total,
            "apply": self._apply, "drop": self._drop, "publish": self._publish, "save": self._save,
            "restore": self._restore, "offload": self._offload, "onload": self._onload, "judge": self._judge,
        }  # fmt: skip
        for name, command in holder.commands().items() if holder is not None else ():
            self._table[name] = lambda args, payload, command=command: (command(args), b"")  # type: ignore[misc]

    # What the adapter gives

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Import what building takes; no accelerator memory."""

    @abstractmethod
    def build(self, folder: Path, core: bool) -> None:
        """Make the model of a Hugging Face folder, without its weights; with `core` also the optimizer."""

    @abstractmethod
    def teardown(self) -> None:
        """Drop model and optimizer and give the memory back."""

    @abstractmethod
    def parameters(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        """Every trained parameter of the whole model in Hugging Face names, tied ones once; full shapes."""

    @abstractmethod
    def facts(self) -> ModelFacts:
        """Of the whole model, as this library computes it."""

    @abstractmethod
    def weights(self) -> Sequence[Piece]:
        """The compute weights this rank holds."""

    @abstractmethod
    def weights_loaded(self) -> None:
        """`weights` were written: bring everything derived from them (master weights, gathered copies) up to date."""

    @abstractmethod
    def compute(self, blob: bytes) -> Computed:
        """Forward and backward of a serialised tree batch; adds its summed gradient to the open sum, or nothing."""

    @abstractmethod
    def finite(self, blob: bytes, execution: str) -> bool:
        """Whether the gradient of one execution of the batch is, as far as this rank sees; the open sum stays."""

    @abstractmethod
    def logprobs(self, blob: bytes) -> Sequence[float] | None:
        """Log-probability of every loss entry, in order; None in a rank that does not have them."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the open sum."""

    @abstractmethod
    def reduce(self) -> Sequence[Piece]:
        """The open sum over all ranks, float32, as pieces; collective."""

    @abstractmethod
    def gradients(self) -> Sequence[Piece]:
        """Float32 tensors of this rank's share of the step's gradient, to be filled and then used by `apply`."""

    @abstractmethod
    def apply(self, rate: float, steps: int) -> None:
        """One optimizer step, the `steps`-th, from the gradients; collective."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the step's gradient."""

    @abstractmethod
    def states(self) -> Mapping[str, Sequence[Piece]]:
        """The optimizer's state: pieces of "exp_avg", "exp_avg_sq" and, if weights are narrower, "master". Makes state
        of zeros where there is none yet."""

    @abstractmethod
    def states_loaded(self, steps: int) -> None:
        """`states` were written; `steps` have been done."""

    @abstractmethod
    def view(self, file: TensorFile, entry: Entry) -> Any:
        """The tensor in a file's memory."""

    # Commands

    def handle(self, op: str, args: Mapping[str, Any], payload: bytes) -> Answer:
        """Run one command."""
        if op not in self._table:
            raise ValueError(f"a command of the trainer: got {op!r}, expected one of {', '.join(self._table)}")
        if self._away is not None and op not in ("onload", "discard", "build"):
            raise InfrastructureError(f"{op} in a rank", got="a replica that is offloaded", expected="onload first")
        if self._holder is None:
            return self._table[op](args, payload)
        try:
            return self._table[op](args, payload)
        except self._holder.refusals as error:
            raise as_ours(error, f"{op} in a rank") from error

    def _files(self, names: Sequence[str], *, writable: bool = False) -> Tensors:
        return Tensors([Path(name) for name in names], self.view, writable=writable)

    def _import(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        self.prepare(Path(args["folder"]))
        return _NOTHING, b""

    def _build(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        if self._built:
            self._step, self._away, self._steps = (), None, 0
            self.teardown()
        self._folder, self._core = Path(args["folder"]), bool(args["core"])
        self.build(self._folder, self._core)
        self._built = True
        told = [[name, list(shape)] for name, shape in self.parameters()]
        return {"parameters": told, "facts": asdict(self.facts())}, b""

    def _load(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        opened = args.get("folder")
        there = self._files(args["files"]) if opened is None or self._holder is None else self._holder.open(opened)
        shards.read(self.weights(), there)
        self.weights_loaded()
        self.clear()
        return _NOTHING, b""

    def _logprobs(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        found = self.logprobs(payload)
        return {"has": found is not None}, array.array("f", found or ()).tobytes()

    def _accumulate(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        began = time.perf_counter()
        found = self.compute(payload)
        return {
            "finite": found.finite, "loss": found.loss, "trained": found.trained,
            "executions": list(found.executions), "metrics": dict(found.metrics),
            "seconds": time.perf_counter() - began,
        }, b""  # fmt: skip

    def _judge(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        return {"finite": self.finite(payload, str(args["execution"]))}, b""

    def _discard(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        if self._away is None and self._built:
            self.clear()
        return _NOTHING, b""

    def _export(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        tensors = self._files([args["file"]], writable=True)
        shards.write(self.reduce(), tensors)
        tensors.flush()
        return _NOTHING, b""

    def _total(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        parts = [self._files([name]) for name in args["files"]]
        self._step = self.gradients()
        guilty = [index for index, part in enumerate(parts) if not shards.finite(self._step, part)]
        square = 0.0 if guilty else shards.total(self._step, list(parts), float(args["divisor"]))
        return {"guilty": guilty, "square": square}, b""

    def _apply(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        if args["scale"] != 1.0:
            for piece in self._step:
                piece.local.mul_(args["scale"])
        self._step = ()
        self.apply(float(args["rate"]), int(args["steps"]))
        self._steps = int(args["steps"])
        return _NOTHING, b""

    def _drop(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        self._step = ()
        self.drop()
        return _NOTHING, b""

    def _publish(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        tensors = self._files(args["files"], writable=True)
        shards.write(self.weights(), tensors)
        tensors.flush()
        return _NOTHING, b""

    def _save(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        self._publish(args, payload)
        tensors = self._files([args["optimizer"]], writable=True)
        for kind, pieces in self.states().items():
            shards.write(pieces, tensors, f"{kind}/")
        tensors.flush()
        return _NOTHING, b""

    def _restore(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        shards.read(self.weights(), self._files(args["files"]))
        self.weights_loaded()
        tensors = self._files([args["optimizer"]])
        for kind, pieces in self.states().items():
            shards.read(pieces, tensors, f"{kind}/")
        self._steps = int(args["steps"])
        self.states_loaded(self._steps)
        self.clear()
        return _NOTHING, b""

    def _offload(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        self.clear()
        self.drop()
        if args["rebuild"]:
            kinds = {"weights": self.weights()} | (dict(self.states()) if self._core else {})
            kept = {
                kind: [piece.local.detach().to("cpu", copy=True) for piece in found] for kind, found in kinds.items()
            }
            del kinds
            self._step = ()
            self.teardown()
            self._away = kept
        return _NOTHING, b""

    def _onload(self, args: Mapping[str, Any], payload: bytes) -> Answer:
        if self._away is not None:
            kept, self._away = self._away, None
            self.build(self._folder, self._core)
            _put(self.weights(), kept["weights"])
            self.weights_loaded()
            if self._core:
                for kind, found in self.states().items():
                    _put(found, kept[kind])
                self.states_loaded(self._steps)
            self.clear()
        return _NOTHING, b""


def _put(found: Sequence[Piece], kept: Sequence[Any]) -> None:
    for piece, tensor in zip(found, kept, strict=True):
        piece.local.copy_(tensor)
