"""A rank's share of a model under Megatron-Core.

Megatron's schedule runs forward and backward, over pipeline stages too, into float32 `main_grad` buffers; those of a
micro-batch are then added to an open sum of this adapter's own, so that one that failed leaves no trace. Nothing is
reduced before the contribution is handed over: `reduce` does then once what each kind of parameter needs (over data-
parallel ranks; over tensor-parallel ranks for the norms of queries and keys; over both ends of the pipeline for tied
embeddings), so that the share of the sum that each owner writes is complete. The step's gradient, summed from files,
goes into the same buffers on every rank that has the parameter, and Megatron's optimizer steps.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gyre_loss as gl
import torch
import torch.distributed as dist
from gyre_core import InfrastructureError, ModelFacts
from gyre_core.facts import rope_of
from gyre_core.ranks import Computed, Entry, Piece, RankReplica, RankSeat, TensorFile
from gyre_core.ranks.places import local_device
from gyre_loss.layout import Layout as Places
from gyre_loss.logprob import linear_logprob
from gyre_loss.metrics import LossMetrics
from gyre_loss.named import flat_metrics, make_objective
from gyre_loss.pieces import ModelInputs, TreeAttention, inputs
from gyre_loss.pieces import loss as loss_of
from gyre_loss.shares import alone, shares, weightless
from gyre_loss.terms import Targets
from gyre_weights.rank_share import RankShare
from torch import Tensor, nn

from gyre_megatron.families import Shape, check_split, shape_of
from gyre_megatron.layout import Layout, Part
from gyre_megatron.model import TreeModel, Trees, config_of
from gyre_megatron.optimizer import Optimizer

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_TRAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Held:
    """A local parameter: its Megatron name with global layer number, and its parts."""

    name: str
    parameter: nn.Parameter
    parts: Sequence[Part]
    copy: bool
    """The last stage's copy of a tied embedding, which the first stage owns."""


@dataclass(slots=True)
class Seen:
    """What the last stage saw of the parts of one micro-batch."""

    loss: float = 0.0
    trained: int = 0
    tokens: int = 0
    metrics: LossMetrics = field(default_factory=LossMetrics)
    logprobs: list[Tensor] = field(default_factory=list)


class MegatronReplica(RankReplica):
    """One rank."""

    def __init__(self, seat: RankSeat, options: Any) -> None:
        super().__init__(RankShare(seat.rank, seat.world))
        self._seat, self._options = seat, options
        self._device = torch.device(local_device(seat.body["device"], seat.rank))
        torch.set_num_threads(seat.body["threads"])
        torch.manual_seed(seat.body["seed"])
        self._objective = make_objective(options.objective, options.objective_options)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo", init_method=f"file://{seat.rendezvous}",
            rank=seat.rank, world_size=seat.world, timeout=timedelta(seconds=options.timeout_s),
        )  # fmt: skip
        self._mpu: Any = import_module("megatron.core.parallel_state")
        self._mpu.initialize_model_parallel(
            tensor_model_parallel_size=options.tensor_parallel,
            pipeline_model_parallel_size=options.pipeline_parallel,
            expert_model_parallel_size=options.expert_parallel, expert_tensor_parallel_size=1,
        )  # fmt: skip
        random: Any = import_module("megatron.core.tensor_parallel.random")
        random.model_parallel_cuda_manual_seed(seat.body["seed"] or 1)
        self._trees: Trees = {}
        self._model: TreeModel | None = None
        self._ddp: Any = None
        self._config: Any = None
        self._layout: Layout | None = None
        self._held: list[Held] = []
        self._open: list[Tensor] | None = None
        self._optimizer: Optimizer | None = None

    # Making the model

    def prepare(self, folder: Path) -> None:
        """Everything was imported with this module; look at the model's configuration."""
        self._shape(folder)

    def _shape(self, folder: Path) -> Shape:
        shape = shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        options = self._options
        check_split(shape, options.tensor_parallel, options.pipeline_parallel, options.expert_parallel)
        return shape

    def build(self, folder: Path, core: bool) -> None:
        """Model, gradient buffers and, for the core, the optimizer."""
        distributed: Any = import_module("megatron.core.distributed")
        shape, options = self._shape(folder), self._options
        layout = Layout(
            shape, self._mpu.get_tensor_model_parallel_rank(), options.tensor_parallel,
            self._mpu.get_expert_model_parallel_rank(), options.expert_parallel,
        )  # fmt: skip
        self._config = config_of(shape, options, dtype=_TRAIN[options.dtype], cpu=self._device.type == "cpu")
        model = TreeModel(self._config, shape, layout.padded_vocabulary, self._trees)
        kept = model.frequencies
        model.to(device=self._device, dtype=_TRAIN[options.dtype])
        model.frequencies = kept.to(self._device)  # in float32 whatever the weights are
        settings = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self._ddp = distributed.DistributedDataParallel(self._config, settings, model)
        self._model, self._layout = model, layout
        self._held = list(self._hold(model, layout))
        self._clear_padding()
        self._optimizer = Optimizer(options, self._ddp) if core else None
        self.clear()

    def _hold(self, model: TreeModel, layout: Layout) -> Iterator[Held]:
        for name, parameter in model.named_parameters():
            words = name.split(".")
            if name.startswith("decoder.layers."):
                words[2] = str(model.decoder.layers[int(words[2])].layer_number - 1)
            copy = words[0] == "output_layer" and layout.shape.tied
            yield Held(".".join(words), parameter, layout.parts(".".join(words)), copy)

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """Rows of the vocabulary that no file fills: never used, but they must not hold rubbish."""
        for held in self._held:
            if "word_embeddings" in held.name or "output_layer" in held.name:
                held.parameter.zero_()

    def teardown(self) -> None:
        """Drop all of it."""
        self._open = self._model = self._ddp = self._optimizer = self._layout = None
        self._held = []
        self._trees.clear()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _live(self) -> tuple[TreeModel, Layout]:
        if self._model is None or self._layout is None:
            raise InfrastructureError("using a Megatron rank", got="one without a model", expected="build first")
        return self._model, self._layout

    def parameters(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        """By Hugging Face names, of all stages."""
        return self._live[1].full_shapes()

    def facts(self) -> ModelFacts:
        """Of the model as it was mapped."""
        _, layout = self._live
        shape = layout.shape
        return ModelFacts(
            shape.architecture, sum(torch.Size(size).numel() for _, size in layout.full_shapes()), shape.tied,
            shape.vocabulary, layout.padded_vocabulary, rope_of({"rope_parameters": shape.rope}), shape.experts,
        )  # fmt: skip

    def view(self, file: TensorFile, entry: Entry) -> Tensor:
        """torch's view of the file."""
        if not entry.count:
            return torch.zeros(entry.shape, dtype=_DTYPES[entry.dtype])
        flat = torch.frombuffer(file.buffer, dtype=_DTYPES[entry.dtype], count=entry.count, offset=entry.start)
        return flat.view(entry.shape)

    # Which pieces this rank has

    def _pieces(self, tensors: Sequence[Tensor]) -> list[Piece]:
        """Of tensors shaped like the held parameters. Owner: the first data-parallel rank (of an expert: among those
        that have it), the first tensor-parallel one for what is replicated, the first stage for tied embeddings."""
        first_data = self._mpu.get_data_parallel_rank() == 0
        first_expert = self._mpu.get_expert_data_parallel_rank() == 0
        first_tensor = self._mpu.get_tensor_model_parallel_rank() == 0

        def owned(held: Held, part: Part) -> bool:
            first = first_expert if part.expert else first_data
            return first and (first_tensor or not part.replicated) and not held.copy

        return [
            Piece(part.name, part.take, part.pick(tensor), owned(held, part))
            for held, tensor in zip(self._held, tensors, strict=True)
            for part in held.parts
        ]

    def weights(self) -> Sequence[Piece]:
        """This rank's share of the parameters."""
        return self._pieces([held.parameter.data for held in self._held])

    def weights_loaded(self) -> None:
        """Masters follow."""
        if self._optimizer is not None:
            self._optimizer.reload()

    # Forward and backward

    def _run(self, parts: Sequence[gl.TreeBatch], *, train: bool, real: int | None = None) -> Seen:
        """Megatron's schedule over these parts. Only of the first `real` of them (None: of all) is told what was seen;
        the others are there for the collectives."""
        model, _ = self._live
        schedules: Any = import_module("megatron.core.pipeline_parallel")
        length = max(part.tokens for part in parts)
        if self._options.pipeline_parallel > 1:
            parts = [gl.pad(part, length) for part in parts]
        self._trees.clear()
        self._trees.update(
            {n: TreeAttention.of(part, self._device, self._options.attention) for n, part in enumerate(parts)}
        )
        seen, unseen = Seen(), Seen()

        def step(work: Iterator[tuple[int, gl.TreeBatch]], chunk: Any) -> tuple[Tensor, Any]:
            number, part = next(work)
            given = inputs(part, self._device)
            hidden = chunk(given.token_ids[None], given.positions[None], torch.tensor(number))
            return hidden, partial(self._loss, part, given, seen if real is None or number < real else unseen, train)

        model.train(train)
        with nullcontext() if train else torch.no_grad():
            schedules.get_forward_backward_func()(
                forward_step_func=step, data_iterator=iter(enumerate(parts)), model=[self._ddp],
                num_microbatches=len(parts), seq_length=length, micro_batch_size=1, forward_only=not train,
            )  # fmt: skip
        self._trees.clear()
        return seen

    def _loss(
        self, part: gl.TreeBatch, given: ModelInputs, seen: Seen, train: bool, hidden: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """On the last stage: the part's summed loss from normalised hidden states [s, 1, h]."""
        model, layout = self._live
        ranks = self._options.tensor_parallel
        found = linear_logprob(
            hidden[:, 0][given.rows], model.head(), given.wanted, temperature=self._options.temperature,
            entropy=train, vocab=layout.shape.vocabulary,
            group=self._mpu.get_tensor_model_parallel_group() if ranks > 1 else None,
        )  # fmt: skip
        none = torch.zeros((), dtype=torch.int, device=self._device)
        if not train:
            of_entry = torch.from_numpy(Targets.of(part, Places.of(part)).of_entry)
            seen.logprobs.append(found.logp.to("cpu", torch.float32)[of_entry])
            return found.logp.sum(), none, {}
        result = loss_of(part, self._objective, found.logp, found.entropy, nan_ok=True)
        seen.loss += float(result.loss.detach())
        seen.trained += len(set(part.entry_token.tolist()))
        seen.tokens += part.tokens
        seen.metrics = seen.metrics + result.metrics
        return result.loss, none, {}

    def _reports(self) -> bool:
        """Whether this rank's numbers are those of its data-parallel share."""
        return bool(self._mpu.is_pipeline_last_stage()) and self._mpu.get_tensor_model_parallel_rank() == 0

    def logprobs(self, blob: bytes) -> Sequence[float] | None:
        """Every data-parallel rank computes the whole batch; the first one's last stage answers."""
        seen = self._run([_batch(blob)], train=False)
        if not self._reports() or self._mpu.get_data_parallel_rank():
            return None
        found: list[float] = seen.logprobs[0].tolist()
        return found

    def compute(self, blob: bytes) -> Computed:
        """This rank's data-parallel share."""
        batch = _batch(blob)
        if not batch.entries:
            raise ValueError("accumulating: got a micro-batch without loss entries, expected at least one")
        told = tuple(name for name, held in zip(batch.execution_ids, batch.held_tokens(), strict=True) if held)
        finite, seen = self._backward(batch, keep=True)
        if seen is None or not self._reports():
            return Computed(finite, executions=told)
        metrics = flat_metrics(seen.metrics) | {"computed_tokens": float(seen.tokens)}
        return Computed(finite, seen.loss, seen.trained, told, metrics)

    def finite(self, blob: bytes, execution: str) -> bool:
        """Forward and backward of that execution; the buffers are looked at and cleared."""
        return self._backward(alone(_batch(blob), execution), keep=False)[0]

    def _backward(self, batch: gl.TreeBatch, *, keep: bool) -> tuple[bool, Seen | None]:
        """Whether the gradient of this rank's data-parallel share is finite (with `keep` it is added to the open sum),
        and what was seen of it, if there is a share."""
        whole = self._objective.whole_executions
        data, index = self._mpu.get_data_parallel_world_size(), self._mpu.get_data_parallel_rank()
        cut = shares(batch, data, whole=whole)
        mine = index < len(cut)
        if not mine and self._options.expert_parallel == 1:
            return True, None
        stages = self._options.pipeline_parallel
        count = (self._options.pipeline_batches or 2 * stages) if stages > 1 else 1
        parts = list(shares(cut[index] if mine else weightless(cut[0]), count, whole=whole))
        real = len(parts)
        if self._options.expert_parallel > 1:  # all of them are needed in every pass, wherever the experts are
            parts += [weightless(parts[0])] * (count - len(parts))
        self._ddp.zero_grad_buffer()
        try:
            seen = self._run(parts, train=True, real=real)
            return self._take(keep=keep), seen if mine else None
        finally:
            self._trees.clear()
            self._ddp.zero_grad_buffer()

    def _take(self, *, keep: bool) -> bool:
        gradients = [_main_grad(held) for held in self._held]
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if keep:
            if self._open is None:
                self._open = self._zeros()
            for total, gradient in zip(self._open, gradients, strict=True):
                total.add_(gradient)
        return finite

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros(held.parameter.shape, device=self._device) for held in self._held]

    def clear(self) -> None:
        """Forget the open sum."""
        self._open = None

    @torch.no_grad()
    def reduce(self) -> Sequence[Piece]:
        """Bring the sum together where its owner is. What was given away is zeroed, so that the sum over all ranks
        stays the same and reducing again does no harm."""
        sums = self._open if self._open is not None else self._zeros()
        mpu = self._mpu
        for held, total in zip(self._held, sums, strict=True):
            if mpu.get_data_parallel_world_size() > 1:
                expert = any(part.expert for part in held.parts)
                _gather(total, mpu.get_expert_data_parallel_group() if expert else mpu.get_data_parallel_group())
            if any(part.summed for part in held.parts) and self._options.tensor_parallel > 1:
                _gather(total, mpu.get_tensor_model_parallel_group())
        _, layout = self._live
        if layout.shape.tied and self._options.pipeline_parallel > 1:
            for held, total in zip(self._held, sums, strict=True):
                if held.copy or held.name.startswith("embedding"):
                    _gather(total, mpu.get_embedding_group())
        return self._pieces(sums)

    # The step

    def gradients(self) -> Sequence[Piece]:
        """Megatron's own gradient buffers, on every rank that has the parameter."""
        self._ddp.zero_grad_buffer()
        return self._pieces([_main_grad(held) for held in self._held])

    def _stepper(self) -> Optimizer:
        if self._optimizer is None:
            raise InfrastructureError("stepping in a Megatron rank", got="a satellite's", expected="the core's")
        return self._optimizer

    def apply(self, rate: float, steps: int) -> None:
        """Megatron's step; every data-parallel rank does the same one."""
        self._stepper().step(rate)
        self._ddp.zero_grad_buffer()

    def drop(self) -> None:
        """Forget them."""
        if self._ddp is not None:
            self._ddp.zero_grad_buffer()

    def states(self) -> Mapping[str, Sequence[Piece]]:
        """Moments and, under bfloat16, masters."""
        kinds = self._stepper().states([held.parameter for held in self._held])
        return {kind: self._pieces(tensors) for kind, tensors in kinds.items()}

    def states_loaded(self, steps: int) -> None:
        """The step count."""
        self._stepper().set_steps(steps)


def _batch(blob: bytes) -> gl.TreeBatch:
    batch = gl.from_bytes(blob)
    if batch.routed_experts is not None:
        raise ValueError(
            "computing a micro-batch: got experts that the engine recorded, expected none: this trainer would choose "
            "anew. Use the trainer deepspeed without recompute, or do not record them."
        )
    return batch


def _main_grad(held: Held) -> Tensor:
    found: Tensor = held.parameter.main_grad  # type: ignore[attr-defined]
    return found


def _gather(total: Tensor, group: Any) -> None:
    """The sum on the group's first rank, zero on the others."""
    first = dist.get_global_rank(group, 0)
    dist.reduce(total, dst=first, group=group)
    if dist.get_rank() != first:
        total.zero_()
