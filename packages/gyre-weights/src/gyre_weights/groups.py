"""Process groups that form and dissolve while others run.

A group is built on a store of its own, outside torch's default world, so that processes which were not there at the
start can be in it and nobody else takes part. Invariants: forming and every operation end by the time-out, as a
PeerError; after an error the group is of no use and is dissolved. gloo moves host tensors, nccl device tensors. Store
and groups know no password: use them in a private network, and bind the store to one interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

from gyre_weights.addresses import bound, own_address
from gyre_weights.errors import PeerError


class StoreServer:
    """A rendezvous store at one address of this machine, for as many groups as one likes."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        dist = _distributed()
        listener = bound(host, port, "opening a store for groups")
        listener.listen(128)
        self.host, self.port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
        self._store: Any = dist.TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """End it; groups that have formed go on."""
        self._store = None


class Group:
    """A formed group of `size`; this process is `rank`."""

    def __init__(self, group: Any, rank: int, size: int, timeout_s: float, doing: str) -> None:
        self._group, self.rank, self.size, self._timeout, self._doing = group, rank, size, timeout_s, doing

    def send(self, tensor: Any, to: int) -> None:
        """A contiguous tensor to one member."""
        self._end(lambda: self._group.send([tensor], to, 0))

    def receive(self, tensor: Any, sender: int) -> None:
        """Fill a contiguous tensor from one member."""
        self._end(lambda: self._group.recv([tensor], sender, 0))

    def broadcast(self, tensor: Any, root: int) -> None:
        """`root`'s tensor to all; in place."""
        options = _distributed().BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = timedelta(seconds=self._timeout)
        self._end(lambda: self._group.broadcast([tensor], options))

    def _end(self, begin: Callable[[], Any]) -> None:
        try:
            work = begin()
            if work.wait(timedelta(seconds=self._timeout)) is False:
                raise PeerError(self._doing, got=f"no end within {self._timeout:g} s", expected="a living peer")
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            raise PeerError(
                self._doing, got=f"a failed operation ({str(error).splitlines()[0][:200]})", expected="a living peer"
            ) from error

    def close(self) -> None:
        """Dissolve this side, without waiting for anybody."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def form_group(
    store: tuple[str, int],
    name: str,
    rank: int,
    size: int,
    *,
    timeout_s: float = 60.0,
    backend: str = "gloo",
    interface: str | None = None,
) -> Iterator[Group]:
    """Meet `size` members under `name` at the store (host, port); yields the group and dissolves it at the end.

    `name` must be new for every group. `interface` is the address of this machine that gloo listens on; the one that
    reaches the store by default. PeerError when not all come within `timeout_s`.
    """
    dist = _distributed()
    doing = f"forming group {name!r} of {size} as member {rank}"
    wait = timedelta(seconds=timeout_s)
    try:
        meeting = dist.PrefixStore(name, dist.TCPStore(*store, is_master=False, timeout=wait))
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface or own_address(*store))]
            options._timeout = wait
            made: Any = dist.ProcessGroupGloo(meeting, rank, size, options)
        elif backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = wait
            made = dist.ProcessGroupNCCL(meeting, rank, size, nccl)
        else:
            raise ValueError(f"{doing}: got backend {backend!r}, expected gloo or nccl")
    except (RuntimeError, OSError) as error:
        raise PeerError(
            doing, got=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
            expected=f"all members within {timeout_s:g} s",
        ) from error  # fmt: skip
    with Group(made, rank, size, timeout_s, f"working in group {name!r}") as group:
        yield group


def _distributed() -> Any:
    """torch.distributed, of whose parts used here some have no types."""
    import torch.distributed as dist

    return dist
