"""KV-cache layouts, transfer plans, transports and live migration."""

from gyre_kvxfer.destination import MovePolicy
from gyre_kvxfer.engine import KeptDigests, KVSink, KVSource, Pinned, Region
from gyre_kvxfer.errors import (
    AuthenticationError,
    KVError,
    LayoutRefused,
    MoveRefused,
    OwnershipUnknown,
    ProtocolError,
    TransportError,
    VerificationFailed,
)
from gyre_kvxfer.layout import KVLayout, StateSpec
from gyre_kvxfer.migrate import MoveReport, migrate
from gyre_kvxfer.plan import TransferPlan, plan_transfer
from gyre_kvxfer.pool import HostPool
from gyre_kvxfer.server import MigrationServer
from gyre_kvxfer.transports.base import Transport

__all__ = [
    "AuthenticationError",
    "HostPool",
    "KVError",
    "KVLayout",
    "KVSink",
    "KVSource",
    "KeptDigests",
    "LayoutRefused",
    "MigrationServer",
    "MovePolicy",
    "MoveRefused",
    "MoveReport",
    "OwnershipUnknown",
    "Pinned",
    "ProtocolError",
    "Region",
    "StateSpec",
    "TransferPlan",
    "Transport",
    "TransportError",
    "VerificationFailed",
    "migrate",
    "plan_transfer",
]
