"""Weight sources of every kind, opened: a folder of Hugging Face's, or what a trainer published.

Invariant: what a trainer published is compared with its digests before anything of it is used, and a version is the
one its source names. Errors are InfrastructureErrors: the version can be published again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from gyre_core import CapabilityError, InfrastructureError, WeightSource
from gyre_weights import Held, Patch, Version, WeightsError, open_version

NOTHING = Held(-1, "")
"""What holds no version."""
KINDS = ("disk", "shm", "delta")


@contextmanager
def told_as_ours(source: WeightSource) -> Iterator[None]:
    """Errors about a version at rest, as the run understands them."""
    try:
        yield
    except WeightsError as error:
        raise InfrastructureError(
            f"loading policy version {source.version} from {source.location}", got=str(error),
            expected="a whole published version", fix=error.fix,
        ) from error  # fmt: skip


def check_kind(source: WeightSource) -> None:
    """CapabilityError for a kind that this plugin does not take."""
    if source.kind not in KINDS:
        raise CapabilityError(
            f"loading policy version {source.version}", got=f"a weight source of kind {source.kind!r}",
            expected=f"one of {', '.join(KINDS)}", fix="Publish the version to a folder.",
        )  # fmt: skip


def open_source(source: WeightSource) -> Version:
    """The version, its files there. What its manifest says counts, whatever `kind` says."""
    check_kind(source)
    with told_as_ours(source):
        version = open_version(source.location)
        if version.digest and version.version != source.version:
            raise InfrastructureError(
                f"loading policy version {source.version} from {source.location}",
                got=f"version {version.version} there", expected=f"version {source.version}",
            )  # fmt: skip
        return version


def tensors_of(version: Version, source: WeightSource) -> dict[str, torch.Tensor]:
    """All tensors on the CPU, verified; windows of the mapped files, or patched copies for a delta."""
    with told_as_ours(source):
        version.verify_all()
        return {name: version[name].torch() for name in version}


def patches_onto(
    version: Version, source: WeightSource, held: Held, named: Mapping[str, Sequence[torch.Tensor]]
) -> list[tuple[torch.Tensor, Patch]] | None:
    """What to write where, for a delta against the version `held` in the windows `named`; None when this is no such
    delta, or not of these tensors, and the version must be loaded whole."""
    base = version.manifest.base
    if base is None or not held.digest or (base.version, base.digest) != (held.version, held.digest):
        return None
    found: list[tuple[torch.Tensor, Patch]] = []
    with told_as_ours(source):
        version.verify()
        for name in version.changed:
            shape = version.manifest.tensors[name].shape
            windows = named.get(name, ())
            if not windows or any(window.numel() != math.prod(shape) for window in windows):
                return None
            patch = version.patch(name)
            found.extend((window, patch) for window in windows)
    return found
