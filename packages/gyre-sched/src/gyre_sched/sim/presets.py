"""Workloads and clusters after published figures.

``qwengyre`` is fitted to the two published baselines (see ``fitted``); the others are not fitted: their
figures are what was published or, where nothing was, plain assumptions, and ``gyre plan`` says how far the
prediction is off. Sources and units are in ``docs/reference/sched-presets.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre_sched.errors import ConfigError

from .models import Hardware
from .workload import Shape

__all__ = ["PRESETS", "Preset", "Published", "preset"]


@dataclass(frozen=True, slots=True)
class Published:
    """A published pair: ``better`` took ``ratio`` times less than ``worse`` (names of ``plan`` rows)."""

    worse: str
    better: str
    ratio: float
    source: str
    fitted: bool = False
    """Whether the preset's parameters were chosen so that this ratio comes out."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named cluster and workload with what is known about it."""

    name: str
    about: str
    hardware: Hardware
    workload: Shape
    published: tuple[Published, ...] = ()
    fitted: str = "nothing"
    taken: str = ""
    """What was published about it and used as it is, or taken from figures for something else."""
    assumed: str = ""
    cut_tail_share: float = 0.0
    """Share of a step that the elastic rows with cutting may cut and score partially."""


_QWENGYRE = Preset(
    name="qwengyre",
    about="agents of 0.7 to 1 million tokens, a 2.4T model, 48 steps (static split 134.55 h)",
    hardware=Hardware(
        cells=16,
        slots=18,
        kv_tokens=20_000_000,
        step_s=0.040941,
        seq_s=0.00013647,
        prefill_tps=43_820.0,
        prefill_q=1e-6,
        train_tps=533.42,
        kv_bytes_per_token=98_304.0,
        link_bytes_per_s=400e9,
        to_train_s=11.0,
        to_rollout_s=11.0,
        sync_s=16.0,
        sync_pause=1.0,
        apply_s=10.0,
    ),
    workload=Shape(
        steps=48,
        groups_per_step=32,
        group_size=4,
        max_staleness=1,
        turns=5.0,
        turns_sigma=0.2,
        task_sigma=1.0,
        max_turns=16,
        first=10_000,
        fed=45_000.0,
        sampled=14_000.0,
        token_sigma=0.05,
        pause_s=199.454,
        pause_sigma=0.2,
        batch_tokens=25_000,
    ),
    published=(
        Published("static", "elastic", 1.784, "QwenGyre: 134.55 h to 75.42 h for 48 steps"),
        Published("colocate", "elastic", 1.85, "QwenGyre: 1.85x against colocation"),
    ),
    fitted=(
        "three things: the overall speed (step_s, prefill_tps, train_tps and pause_s scaled together) so that the "
        "static split takes 134.55 h; train_tps against sampling so that colocation takes 1.85/1.78 of that; "
        "and the length of the tail (task_sigma, max_turns) within what is published about agents' lengths"
    ),
    taken=(
        "48 steps and lengths of 0.7 to 1 million tokens as published; switch 11 s and sync 16 s as published for "
        "smaller models; 98,304 bytes of KV a token as of Qwen3-30B-A3B"
    ),
    assumed="16 cells of 18 slots, 32 groups of 4, staleness 1; a turn stands for about 40 real ones",
    cut_tail_share=0.2,
)

_VERL_SWITCH = Preset(
    name="verl-switch",
    about="maths with 32k answers, 35B-A3B on 24 H100; step-wise role switch against the same without",
    hardware=Hardware(
        cells=6,
        slots=128,
        kv_tokens=4_000_000,
        step_s=0.012,
        seq_s=0.00015,
        prefill_tps=60_000.0,
        train_tps=40_000.0,
        to_train_s=15.0,
        to_rollout_s=12.0,
        sync_s=8.0,
        sync_pause=1.0,
    ),
    workload=Shape(
        steps=12,
        groups_per_step=32,
        group_size=8,
        turns=4.0,
        turns_sigma=0.6,
        task_sigma=0.4,
        max_turns=14,
        first=300,
        fed=0.0,
        sampled=2_300.0,
        pause_s=0.0,
    ),
    published=(Published("static", "switching", 1.115, "13.15 h to 11.79 h for 100 steps (-10.3 %)"),),
    taken="the ratio; 24 H100, a 35B-A3B model, answers of at most 32k tokens",
    assumed="batch of 256 answers, mean 9k tokens, cells of 4 GPUs; speeds, switches and syncs",
)

_VERL_V1 = Preset(
    name="verl-v1",
    about="the same model on 4 nodes: synchronous, colocated asynchronous, separate asynchronous",
    hardware=Hardware(
        cells=8,
        slots=128,
        kv_tokens=4_000_000,
        step_s=0.012,
        seq_s=0.00015,
        prefill_tps=60_000.0,
        train_tps=40_000.0,
        to_train_s=15.0,
        to_rollout_s=12.0,
        sync_s=8.0,
        sync_pause=1.0,
    ),
    workload=_VERL_SWITCH.workload,
    published=(Published("colocate-sync", "static", 1.616, "22.79 h to 14.10 h for 150 steps"),),
    taken="the ratios; 4 nodes, the same model",
    assumed="as verl-switch, with 8 cells of 4 GPUs",
)

_VERL_DYNAMIC = Preset(
    name="verl-dynamic",
    about="dynamic scaling of rollout on 32 H20 against 16+16 fully asynchronous",
    hardware=Hardware(
        cells=8,
        slots=96,
        kv_tokens=3_000_000,
        step_s=0.018,
        seq_s=0.0002,
        prefill_tps=20_000.0,
        train_tps=9_000.0,
        to_train_s=15.0,
        to_rollout_s=12.0,
        sync_s=8.0,
        sync_pause=1.0,
    ),
    workload=Shape(
        steps=10,
        groups_per_step=32,
        group_size=8,
        max_staleness=2,
        turns=4.0,
        turns_sigma=0.5,
        task_sigma=0.4,
        max_turns=12,
        first=500,
        fed=0.0,
        sampled=1_500.0,
        pause_s=0.0,
    ),
    published=(Published("static", "elastic", 1.12, "about 12 %"),),
    taken="the ratio; 24+8 against 16+16 H20",
    assumed="cells of 4 GPUs, answers of 6k tokens; speeds, switches and syncs",
)

_ROLLPACKER = Preset(
    name="rollpacker",
    about="long-tail reasoning on up to 128 H800 against a synchronous colocated trainer",
    hardware=Hardware(
        cells=16,
        slots=128,
        kv_tokens=4_000_000,
        step_s=0.014,
        seq_s=0.0001,
        prefill_tps=60_000.0,
        train_tps=50_000.0,
        to_train_s=8.0,
        to_rollout_s=8.0,
        sync_s=5.0,
        sync_pause=1.0,
    ),
    workload=Shape(
        steps=10,
        groups_per_step=64,
        group_size=8,
        turns=4.0,
        turns_sigma=0.9,
        task_sigma=0.5,
        max_turns=24,
        first=500,
        fed=0.0,
        sampled=1_500.0,
        pause_s=0.0,
    ),
    published=(Published("colocate-sync", "elastic", 2.3, "2.03 to 2.56x"),),
    taken="the ratio (the middle of the published range); up to 128 H800",
    assumed="cells of 8 GPUs, answers of 6k tokens with a tail to 36k; speeds, switches and syncs",
)

_LAMINAR = Preset(
    name="laminar",
    about="1,024 GPUs against synchronous training",
    hardware=Hardware(
        cells=64,
        slots=64,
        kv_tokens=4_000_000,
        step_s=0.016,
        seq_s=0.0001,
        prefill_tps=80_000.0,
        train_tps=60_000.0,
        to_train_s=10.0,
        to_rollout_s=10.0,
        sync_s=10.0,
    ),
    workload=Shape(
        steps=6,
        groups_per_step=128,
        group_size=8,
        max_staleness=2,
        turns=4.0,
        turns_sigma=0.9,
        task_sigma=0.5,
        max_turns=20,
        first=500,
        fed=200.0,
        sampled=1_500.0,
        pause_s=3.0,
    ),
    published=(Published("colocate-sync", "elastic", 5.48, "up to 5.48x"),),
    taken="the ratio (the largest published one); 1,024 GPUs",
    assumed="cells of 16 GPUs, tool-using agents with 6k tokens; speeds, switches, syncs beside sampling",
)

_HEDDLE = Preset(
    name="heddle",
    about="agentic rollout that moves sessions in tool pauses, against step-centred scheduling",
    hardware=Hardware(
        cells=8,
        slots=48,
        kv_tokens=2_000_000,
        step_s=0.014,
        seq_s=0.0003,
        prefill_tps=40_000.0,
        train_tps=60_000.0,
        to_train_s=8.0,
        to_rollout_s=8.0,
        sync_s=5.0,
        sync_pause=1.0,
    ),
    workload=Shape(
        steps=8,
        groups_per_step=32,
        group_size=8,
        turns=12.0,
        turns_sigma=0.7,
        task_sigma=0.5,
        max_turns=60,
        first=2_000,
        fed=800.0,
        sampled=400.0,
        pause_s=8.0,
        pause_sigma=1.5,
    ),
    published=(Published("colocate-sync", "elastic", 2.5, "up to 2.5x rollout throughput"),),
    taken="the ratio (the largest published one, of rollout alone); tool pauses of about the published quartiles",
    assumed="8 cells, contexts of 15k tokens; speeds, switches and syncs",
)

_LAPTOP = Preset(
    name="laptop",
    about="the quickstart's shape: 4 processes, steps of seconds",
    hardware=Hardware(
        cells=4,
        slots=8,
        kv_tokens=30_000,
        step_s=0.02,
        seq_s=0.004,
        prefill_tps=4_000.0,
        train_tps=4_000.0,
        kv_bytes_per_token=4_096.0,
        link_bytes_per_s=5e8,
        link_setup_s=0.01,
        to_train_s=0.2,
        to_rollout_s=0.2,
        sync_s=0.1,
        apply_s=0.1,
    ),
    workload=Shape(
        steps=20,
        groups_per_step=4,
        group_size=4,
        turns=6.0,
        turns_sigma=0.5,
        max_turns=20,
        first=300,
        fed=60.0,
        sampled=30.0,
        pause_s=0.05,
    ),
)

PRESETS: dict[str, Preset] = {
    p.name: p for p in (_QWENGYRE, _VERL_SWITCH, _VERL_V1, _VERL_DYNAMIC, _ROLLPACKER, _LAMINAR, _HEDDLE, _LAPTOP)
}
"""Presets by name."""


def preset(name: str) -> Preset:
    """The preset called ``name``."""
    found = PRESETS.get(name)
    if found is None:
        raise ConfigError(f"no preset is called {name!r}; there are: {', '.join(PRESETS)}")
    return found
