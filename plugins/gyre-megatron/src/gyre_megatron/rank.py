"""Main of a rank: `python -m gyre_megatron.rank FD RANK WORLD`."""

from __future__ import annotations

from gyre_core.ranks import RankReplica, RankSeat, serve

from gyre_megatron.options import MegatronTrainerOptions


def make(seat: RankSeat) -> RankReplica:
    """The replica of this seat; what is heavy is imported now."""
    options = MegatronTrainerOptions(**seat.body["options"])
    if options.cpu_shim:
        from gyre_megatron import cpu_shim

        cpu_shim.install()
    from gyre_megatron.replica import MegatronReplica

    return MegatronReplica(seat, options)


if __name__ == "__main__":
    serve(make)
