"""Trainers whose model lives in rank processes: what Megatron-Core, DeepSpeed and their like have in common.

The cell's process holds a light `RankTrainer`; `RankGroup` drives one process per accelerator in an environment of the
library's own; in it `serve` runs a `RankReplica`, for which a plugin writes the part that knows the library. Needs the
standard library alone, on both sides.
"""

from __future__ import annotations

from gyre_core.ranks.group import RankGroup, RankPlan, package_folders
from gyre_core.ranks.options import RankTrainerOptions
from gyre_core.ranks.pieces import Piece
from gyre_core.ranks.replica import Computed, RankReplica
from gyre_core.ranks.tensorfile import Entry, TensorFile
from gyre_core.ranks.trainer import RankTrainer
from gyre_core.ranks.worker import RankSeat, serve

__all__ = [
    "Computed",
    "Entry",
    "Piece",
    "RankGroup",
    "RankPlan",
    "RankReplica",
    "RankSeat",
    "RankTrainer",
    "RankTrainerOptions",
    "TensorFile",
    "package_folders",
    "serve",
]
