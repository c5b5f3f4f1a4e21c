"""A rank's share of a model under DeepSpeed.

The engine computes gradients and reduces them into shards after each backward; the shards of a micro-batch are added to
an open sum of this adapter's own in float32, so that a micro-batch that failed leaves no trace, and the engine's own
accumulation is never used. The step's gradient, summed from files, goes into the shards; then DeepSpeed's optimizer
steps. Data parallelism inside a cell: a tree is split into as many shares as there are ranks; a rank without a share
computes another's with weight zero, since ZeRO's collectives need all of them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import gyre_loss as gl
import torch
import torch.distributed as dist
from gyre_core import InfrastructureError, ModelFacts
from gyre_core.facts import facts_of
from gyre_core.ranks import Computed, Entry, Piece, RankReplica, RankSeat, TensorFile
from gyre_core.ranks.places import local_device
from gyre_core.ranks.stored import Stored, stored_as
from gyre_core.ranks.tensorfile import files_of
from gyre_loss.attention import choose
from gyre_loss.layout import Layout
from gyre_loss.named import flat_metrics, make_objective
from gyre_loss.pieces import inputs
from gyre_loss.pieces import loss as loss_of
from gyre_loss.shares import alone, shares, weightless
from gyre_loss.terms import Targets, WeightedLoss, recorded_experts
from gyre_weights.rank_share import RankShare
from torch import Tensor, nn

from gyre_deepspeed.model import TreeModule, make_model
from gyre_deepspeed.options import DeepSpeedTrainerOptions
from gyre_deepspeed.zero import VERSION, Range, ZeroShards, shards_of

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_TRAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class DeepSpeedReplica(RankReplica):
    """One rank of a ZeRO engine."""

    def __init__(self, seat: RankSeat, options: DeepSpeedTrainerOptions) -> None:
        super().__init__(RankShare(seat.rank, seat.world))
        self._seat, self._options = seat, options
        self._device = torch.device(local_device(seat.body["device"], seat.rank))
        torch.set_num_threads(seat.body["threads"])
        torch.manual_seed(seat.body["seed"])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._objective = make_objective(options.objective, options.objective_options)
        self._engine: Any = None
        self._module: TreeModule | None = None
        self._shards: ZeroShards | None = None
        self._open: list[Tensor] | None = None
        self._flats: list[Tensor] = []
        self._stored: list[tuple[nn.Parameter, list[Stored]]] = []
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{seat.rendezvous}", rank=seat.rank, world_size=seat.world,
            timeout=timedelta(seconds=options.timeout_s),
        )  # fmt: skip

    # Making the model

    def prepare(self, folder: Path) -> None:
        """Import DeepSpeed and the model's code."""
        self._deepspeed()
        with torch.device("meta"):
            make_model(folder, torch.float32)

    def _deepspeed(self) -> Any:
        deepspeed: Any = import_module("deepspeed")
        import_module("deepspeed.comm.torch")
        if self._options.stage == 3:
            import_module("torch._dynamo")  # fails when it is first imported inside zero.Init, which patches torch
        if deepspeed.__version__ != VERSION:
            raise InfrastructureError(
                "importing DeepSpeed", got=deepspeed.__version__, expected=VERSION,
                fix="This adapter looks inside it; build its environment again.",
            )  # fmt: skip
        if self._device.type == "cpu":
            # Shared-memory collectives would be compiled for minutes; plain gloo does as well for tests on CPU.
            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=None, verbose=False)
        return deepspeed

    def _config(self) -> dict[str, Any]:
        options = self._options
        zero: dict[str, Any] = {
            "stage": options.stage, "overlap_comm": self._device.type != "cpu", "contiguous_gradients": True,
            "reduce_bucket_size": options.bucket_elements, "allgather_bucket_size": options.bucket_elements,
        }  # fmt: skip
        if options.stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": options.bucket_elements,
                "stage3_max_live_parameters": 10 * options.bucket_elements,
            }  # fmt: skip
        if options.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self._device.type == "cuda"}
        if options.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": self._device.type == "cuda"}
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
            "zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": options.dtype == "bfloat16"}, "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32", "steps_per_print": 1 << 30, "wall_clock_breakdown": False,
        }  # fmt: skip
        return found

    def build(self, folder: Path, core: bool) -> None:
        """Engine and model; under stage 3 the model is never whole anywhere."""
        deepspeed = self._deepspeed()
        config, options = self._config(), self._options
        init = deepspeed.zero.Init(config_dict_or_path=config) if options.stage == 3 else nullcontext()
        with init:
            model = make_model(folder, _TRAIN[options.dtype])
        finder: Any = model
        if options.recompute:
            finder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        there = [name for path in files_of(folder) for name in TensorFile(path).entries]
        self._stored = [(p, stored_as(name, _shape(p), there)) for name, p in model.named_parameters()]
        module = TreeModule(model)
        engine, _, _, _ = deepspeed.initialize(model=module, optimizer=self._adam(module), config=config)
        engine.train(options.recompute)
        self._engine, self._module = engine, module
        stored = {id(p): parts for p, parts in self._stored}
        self._shards = shards_of(options.stage, engine.optimizer, stored, self._seat.rank, self._seat.world)
        self.clear()

    def _adam(self, module: TreeModule) -> torch.optim.Optimizer:
        options = self._options
        parameters = [p for p in module.parameters() if p.requires_grad]
        wide = [p for p in parameters if len(_shape(p)) > 1]
        narrow = [p for p in parameters if len(_shape(p)) <= 1]
        groups = [
            {"params": wide, "weight_decay": options.weight_decay}, {"params": narrow, "weight_decay": 0.0},
        ]  # fmt: skip
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=options.learning_rate, betas=(options.beta1, options.beta2), eps=options.eps,
        )  # fmt: skip

    def teardown(self) -> None:
        """Drop the engine."""
        self._open, self._flats, self._shards, self._stored = None, [], None, []
        if self._engine is not None:
            self._engine.destroy()
        self._engine = self._module = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _live(self) -> tuple[Any, TreeModule, ZeroShards]:
        if self._engine is None or self._module is None or self._shards is None:
            raise InfrastructureError("using a DeepSpeed rank", got="one without a model", expected="build first")
        return self._engine, self._module, self._shards

    def parameters(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        """By the names that the files of the model have."""
        return [(part.name, part.shape) for p, parts in self._stored if p.requires_grad for part in parts]

    def facts(self) -> ModelFacts:
        """Of the transformers model."""
        return facts_of(self._live[1].model, router_replay=self._options.router_replay)

    def view(self, file: TensorFile, entry: Entry) -> Tensor:
        """torch's view of the file."""
        if not entry.count:
            return torch.zeros(entry.shape, dtype=_DTYPES[entry.dtype])
        flat = torch.frombuffer(file.buffer, dtype=_DTYPES[entry.dtype], count=entry.count, offset=entry.start)
        return flat.view(entry.shape)

    # Weights

    def weights(self) -> Sequence[Piece]:
        """Whole tensors (stages 1 and 2) or this rank's parts."""
        return self._live[2].weights()

    def weights_loaded(self) -> None:
        """Masters follow."""
        self._live[2].weights_changed()

    # Gradients

    def _forward(self, batch: gl.TreeBatch, entropy: bool) -> tuple[Tensor, Tensor | None]:
        engine, _, _ = self._live
        place = Layout.of(batch)
        given = inputs(batch, self._device)
        found: tuple[Tensor, Tensor | None] = engine(
            given.token_ids, given.positions, given.rows, given.wanted,
            choose(batch, place, self._device, self._options.attention), recorded_experts(batch, self._device),
            self._options.temperature, entropy,
        )  # fmt: skip
        return found

    def logprobs(self, blob: bytes) -> Sequence[float] | None:
        """Every rank computes the whole batch; the first answers."""
        batch = gl.from_bytes(blob)
        with torch.no_grad(), self._live[1].tree.session():
            logp, _ = self._forward(batch, False)
        if self._seat.rank:
            return None
        of_entry = Targets.of(batch, Layout.of(batch)).of_entry
        found: list[float] = logp.to("cpu", torch.float32).numpy()[of_entry].tolist()
        return found

    def compute(self, blob: bytes) -> Computed:
        """This rank's share, forward and backward."""
        batch = gl.from_bytes(blob)
        if not batch.entries:
            raise ValueError("accumulating: got a micro-batch without loss entries, expected at least one")
        told = tuple(name for name, held in zip(batch.execution_ids, batch.held_tokens(), strict=True) if held)
        finite, part, result = self._backward(batch, keep=True)
        if part is None:
            return Computed(finite, executions=told)
        metrics = flat_metrics(result.metrics) | {"computed_tokens": float(part.tokens)}
        return Computed(finite, float(result.loss.detach()), len(set(part.entry_token.tolist())), told, metrics)

    def finite(self, blob: bytes, execution: str) -> bool:
        """Forward and backward of that execution; the shards are looked at and forgotten."""
        return self._backward(alone(gl.from_bytes(blob), execution), keep=False)[0]

    def _backward(self, batch: gl.TreeBatch, *, keep: bool) -> tuple[bool, gl.TreeBatch | None, WeightedLoss]:
        """Whether the gradient of this rank's share is finite (with `keep` it is added to the open sum), the share, if
        it has one, and its loss."""
        engine, module, shards = self._live
        parts = shares(batch, self._seat.world, whole=self._objective.whole_executions)
        mine = self._seat.rank < len(parts)
        part = parts[self._seat.rank] if mine else weightless(parts[0])
        shards.clear()
        try:
            with module.tree.session():
                logp, entropy = self._forward(part, True)
                result = loss_of(part, self._objective, logp, entropy, nan_ok=True)
                engine.backward(result.loss * self._seat.world)  # DeepSpeed averages over the ranks
            finite = self._take(shards, keep=keep)
        finally:
            shards.clear()
        return finite, part if mine else None, result

    def _take(self, shards: ZeroShards, *, keep: bool) -> bool:
        if keep and self._open is None:
            self._open = [torch.zeros(each.size, device=self._device) for each in shards.ranges]
        totals = self._open if keep and self._open is not None else [None] * len(shards.ranges)
        finite = True
        for total, reduced in zip(totals, shards.reduced(), strict=True):
            gradient = reduced.to(self._device)
            finite = finite and bool(gradient.isfinite().all())
            if total is not None:
                total.add_(gradient)
        return finite

    def clear(self) -> None:
        """Forget the open sum."""
        self._open = None

    def reduce(self) -> Sequence[Piece]:
        """It is reduced already: each backward did."""
        ranges = self._live[2].ranges
        sums = self._open or [torch.zeros(each.size) for each in ranges]
        return [Piece(each.name, each.take(), total) for each, total in zip(ranges, sums, strict=True)]

    # The step

    def _in_flats(self, flats: Sequence[Tensor]) -> list[Piece]:
        def local(each: Range) -> Tensor:
            return flats[each.group].view(-1)[each.offset : each.offset + each.size]

        return [Piece(each.name, each.take(), local(each)) for each in self._live[2].ranges]

    def gradients(self) -> Sequence[Piece]:
        """Views of flat tensors as long as the masters."""
        self._flats = [torch.zeros_like(master) for master in self._live[2].masters()]
        return self._in_flats(self._flats)

    def apply(self, rate: float, steps: int) -> None:
        """DeepSpeed's step; it gathers the new weights."""
        engine, _, shards = self._live
        shards.set_gradients(self._flats)
        self._flats = []
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        engine.optimizer.step()
        shards.clear()

    def drop(self) -> None:
        """Forget them."""
        self._flats = []

    def _inner(self) -> Any:
        return self._live[0].optimizer.optimizer

    def states(self) -> Mapping[str, Sequence[Piece]]:
        """Of torch's AdamW inside ZeRO."""
        state, masters = self._inner().state, self._live[2].masters()
        for master in masters:
            if not state.get(master):
                state[master] = {
                    "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }  # fmt: skip
        found = {kind: self._in_flats([state[m][kind] for m in masters]) for kind in ("exp_avg", "exp_avg_sq")}
        if self._options.dtype != "float32":
            found["master"] = self._in_flats([master.data for master in masters])
        return found

    def states_loaded(self, steps: int) -> None:
        """The step count of every group."""
        for held in self._inner().state.values():
            held["step"] = torch.tensor(float(steps))


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of the whole parameter, also when it is partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
