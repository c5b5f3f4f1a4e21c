"""Gradients from satellites to the core, in memory, and versions the other way, while everybody else goes on."""

from __future__ import annotations

from gyre_weights.handover.holder import Holder
from gyre_weights.handover.lanes import Lane
from gyre_weights.handover.plan import Piece, ShardPlan, check_cover, split_by_name, split_flat, whole
from gyre_weights.handover.receiver import Arrived, Receiver
from gyre_weights.handover.sender import HandedOver, hand_over
from gyre_weights.handover.snapshot import fetch_version, nearest
from gyre_weights.handover.wire import Endpoint

__all__ = [
    "Arrived",
    "Endpoint",
    "HandedOver",
    "Holder",
    "Lane",
    "Piece",
    "Receiver",
    "ShardPlan",
    "check_cover",
    "fetch_version",
    "hand_over",
    "nearest",
    "split_by_name",
    "split_flat",
    "whole",
]
