"""Policy versions on the way from trainer to engine, and gradients on their way back.

Imports numpy and the standard library; torch only when a function that needs it is called.
"""

from __future__ import annotations

from gyre_weights.apply import Held, Verify, apply, catch_up, write_patch
from gyre_weights.arrays import HostTensor, host_tensor
from gyre_weights.delta_code import Patch
from gyre_weights.digest import Digest, digest_bytes, digest_torch
from gyre_weights.errors import (
    CorruptError,
    IncompleteError,
    MismatchError,
    NoRoomError,
    PeerError,
    RefusedError,
    UnreachableError,
    VersionError,
    WeightsError,
)
from gyre_weights.folder import drop_old, new_folder, version_folder, versions_in
from gyre_weights.publish import finish_version, publish_delta, publish_full, write_delta_part, write_part
from gyre_weights.publisher import Kind, Publisher
from gyre_weights.shadow import Shadow
from gyre_weights.version import Published, Version, open_version

__all__ = [
    "CorruptError",
    "Digest",
    "Held",
    "HostTensor",
    "IncompleteError",
    "Kind",
    "MismatchError",
    "NoRoomError",
    "Patch",
    "PeerError",
    "Published",
    "Publisher",
    "RefusedError",
    "Shadow",
    "UnreachableError",
    "Verify",
    "Version",
    "VersionError",
    "WeightsError",
    "apply",
    "catch_up",
    "digest_bytes",
    "digest_torch",
    "drop_old",
    "finish_version",
    "host_tensor",
    "new_folder",
    "open_version",
    "publish_delta",
    "publish_full",
    "version_folder",
    "versions_in",
    "write_delta_part",
    "write_part",
    "write_patch",
]
