"""A trainable model on one cell: weights in, summed gradients out. Synchronous; `train.trainer` gives it a thread.

Invariants: the open contribution holds exactly the micro-batches it names (one that fails leaves no trace); gradients
are sums in at least float32, in Hugging Face names, each tied weight once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from gyre_core import BatchStats, ConfigError, Contribution, InfrastructureError, MicroBatch, WeightSource
from gyre_loss import LossResult, TreeBatch, accumulate, from_bytes, token_logprobs
from gyre_loss.named import flat_metrics, make_objective
from gyre_loss.objective import Objective
from gyre_loss.shares import alone
from gyre_weights import CorruptError, Verify, catch_up
from torch import nn

from gyre_local.model.sources import NOTHING, open_source, told_as_ours
from gyre_local.options import LocalTrainerOptions
from gyre_local.train.contributions import Gradients, Suspect, merge_stats
from gyre_local.train.exact import use_exact_norms

HandOver: TypeAlias = Callable[[Contribution, Gradients], None]
"""Puts a closed contribution where its `location` says; raises when it could not."""
TRAIN_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def chosen_objective(name: str, options: Mapping[str, Any]) -> Objective:
    """gyre-loss's objective of this name (`gyre_loss.named`); ConfigError where it refuses name or options."""
    try:
        return make_objective(name, options)
    except ValueError as error:
        raise ConfigError("reading the trainer's objective", got=str(error)) from error


def load_model(folder: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The transformers model under `folder`, in training form: no dropout, no KV cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise InfrastructureError(
            f"making the model under {folder}", got=f"{type(error).__name__}: {error}",
            expected="a Hugging Face folder with a config.json that transformers knows",
        ) from error  # fmt: skip
    model.config.use_cache = False
    if dtype is torch.float64:
        use_exact_norms(model)
    return cast(nn.Module, model.eval().to(device))


def import_model(folder: str) -> None:
    """Import the code of the model under `folder`, without weights: what `load_model` spends most of its time on."""
    with torch.device("meta"):
        load_model(folder, torch.float32, torch.device("meta"))


class Replica:
    """Model, its version, and the open contribution."""

    def __init__(self, options: LocalTrainerOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.dtype = TRAIN_DTYPES[options.dtype]
        self.sum_dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
        self.objective = chosen_objective(options.objective, options.objective_options)
        self.version = -1
        self.source_folder = ""
        self._held = NOTHING
        self._model: nn.Module | None = None
        self._open: dict[str, torch.Tensor] = {}
        self._stats: list[BatchStats] = []
        self._batches: list[MicroBatch] = []
        self._suspects: list[Suspect] = []

    @property
    def model(self) -> nn.Module:
        """The transformers model; InfrastructureError before `start`."""
        if self._model is None:
            raise InfrastructureError("using the embedded trainer", got="one that has not been started",
                                      expected="start first")  # fmt: skip
        return self._model

    def _whole_model(self, doing: str) -> nn.Module:
        """The model with the weights of one version; InfrastructureError after a damaged one."""
        if self.version < 0:
            raise InfrastructureError(
                doing, got="weights of no version: the last one loaded was damaged", expected="a version",
                fix="Load one again.",
            )  # fmt: skip
        return self.model

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by Hugging Face name; a tied weight appears once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained parameters."""
        return {name: tuple(p.shape) for name, p in self.parameters.items()}

    def start(self, source: WeightSource) -> None:
        """Make the model and take its weights."""
        if self._model is not None:
            raise InfrastructureError("starting the embedded trainer", got="a second start", expected="one")
        self._model = load_model(source.location, self.dtype, self.device)
        try:
            self.load_weights(source)
        except BaseException:
            self._model = None
            raise

    @torch.no_grad()
    def load_weights(self, source: WeightSource) -> None:
        """Write another version's weights in place, of a delta against what is held only what changed. Drops the open
        contribution. Bytes are compared with their digests while they are copied: a satellite comes midway and reads
        once. So a damaged version leaves none (-1), to be loaded again; any other refusal leaves the old one."""
        version = open_source(source)
        targets = {name: p.detach() for name, p in self.model.named_parameters()}
        stacked = [name for name, target in targets.items() if target.ndim > 2 and name not in version]
        if stacked:
            raise ConfigError(
                f"loading policy version {source.version} from {source.location}",
                got=f"a mixture of experts, of which transformers stacks {stacked[0]}", expected="a dense model",
                fix="Use the trainer deepspeed or megatron.",
            )  # fmt: skip
        extra = set(version) - set(targets)  # a tied head may be written out
        held, self._held = self._held, NOTHING
        self.discard()
        with told_as_ours(source):
            try:
                self._held = catch_up(version, targets, held=held, verify=Verify.DURING, cast=True, optional=extra)
            except CorruptError:
                self.version = -1
                raise
        self.version, self.source_folder = source.version, source.location

    @torch.no_grad()
    def take_tensors(self, tensors: Mapping[str, torch.Tensor], doing: str) -> None:
        """Copy weights in Hugging Face names into the model; InfrastructureError names the first that does not fit."""
        for name, parameter in self.model.named_parameters():
            found = tensors.get(name)
            if found is None or found.shape != parameter.shape:
                got = f"no tensor {name}" if found is None else f"{name} of shape {list(found.shape)}"
                raise InfrastructureError(doing, got=got, expected=f"shape {list(parameter.shape)}")
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])
        self._held = NOTHING
        self.discard()

    def logprobs(self, batch: MicroBatch) -> Sequence[float]:
        """One value for each loss entry of the batch (a sampled token, once for each execution that shares it)."""
        tree = from_bytes(bytearray(batch.blob))  # a writable copy: torch shares its arrays
        model = self._whole_model(f"computing logprobs of micro-batch {batch.id!r}")
        found = token_logprobs(model, tree, method=self.options.method, temperature=self.options.temperature)
        return [float(value) for value in found.astype("float32")]

    def accumulate(self, batch: MicroBatch) -> BatchStats:
        """Add a micro-batch's summed gradient to the open contribution."""
        if any(batch.id == other.id for other in self._batches):
            raise ValueError(f"accumulating micro-batch {batch.id!r}: the open contribution has it already")
        if self._batches and batch.step != self._batches[0].step:
            raise ValueError(
                f"accumulating micro-batch {batch.id!r}: got step {batch.step}, expected step {self._batches[0].step} "
                "of the open contribution; export or discard that first"
            )
        self._whole_model(f"accumulating micro-batch {batch.id!r}")
        tree = from_bytes(bytearray(batch.blob))  # a writable copy: torch shares its arrays
        started = time.perf_counter()
        try:
            result, gradients = self._backward(tree)
            if not _all_finite(gradients.values()):
                self._suspects.append(Suspect(batch.id, self._guilty(tree)))
            self._add(gradients)
        finally:
            self.model.zero_grad(set_to_none=True)
        self._batches.append(batch)
        stats = BatchStats(
            float(result.loss), tree.tokens, len(set(tree.entry_token.tolist())), time.perf_counter() - started,
            flat_metrics(result.metrics),
        )  # fmt: skip
        self._stats.append(stats)
        return stats

    def _backward(self, tree: TreeBatch) -> tuple[LossResult, dict[str, torch.Tensor]]:
        """Loss and gradients of a batch alone."""
        self.model.zero_grad(set_to_none=True)
        result = accumulate(
            self.model, tree, self.objective, method=self.options.method, temperature=self.options.temperature
        )
        return result, {n: p.grad for n, p in self.parameters.items() if p.grad is not None}

    def _guilty(self, tree: TreeBatch) -> tuple[str, ...]:
        """Which of the batch's executions, each computed alone, have a gradient that is not finite; all if none has."""
        names = _executions(tree)
        found = [
            name for name in names if len(names) > 1 and not _all_finite(self._backward(alone(tree, name))[1].values())
        ]
        return tuple(found) or names

    def _add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            if name in self._open:
                self._open[name] += gradient
            else:
                self._open[name] = gradient.to(self.sum_dtype, copy=True)

    def export(self, contribution_id: str, step: int, location: str, hand_over: HandOver) -> Contribution:
        """Give the open contribution to `hand_over` and, when that is done, start an empty one."""
        if not self._batches:
            raise ValueError(f"exporting contribution {contribution_id!r}: got no micro-batch, expected at least one")
        if step != self._batches[0].step:
            raise ValueError(
                f"exporting contribution {contribution_id!r}: got step {step}, expected {self._batches[0].step}"
            )
        made = Contribution(
            contribution_id, step, self.version, tuple(b.id for b in self._batches), location, merge_stats(self._stats)
        )
        full = {
            name: self._open[name] if name in self._open else torch.zeros(shape, dtype=self.sum_dtype)
            for name, shape in self.shapes.items()
        }
        hand_over(made, Gradients(full, tuple(self._suspects)))
        self.discard()
        return made

    def discard(self) -> None:
        """Forget the open contribution."""
        self._open, self._stats, self._batches, self._suspects = {}, [], [], []

    def move(self, device: torch.device) -> None:
        """Weights to another device; gradients that were not exported are dropped."""
        self.discard()
        self.model.zero_grad(set_to_none=True)
        self.model.to(device)

    def close(self) -> None:
        """Drop everything."""
        self.discard()
        self._model = None


def _all_finite(gradients: Any) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _executions(tree: TreeBatch) -> tuple[str, ...]:
    """Executions with entries in the batch."""
    held = tree.held_tokens()
    return tuple(name for name, count in zip(tree.execution_ids, held, strict=True) if count)
