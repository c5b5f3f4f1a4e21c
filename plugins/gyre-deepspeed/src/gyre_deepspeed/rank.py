"""Main of a rank: `python -m gyre_deepspeed.rank FD RANK WORLD`."""

from __future__ import annotations

from gyre_core.ranks import RankReplica, RankSeat, serve

from gyre_deepspeed.options import DeepSpeedTrainerOptions


def make(seat: RankSeat) -> RankReplica:
    """The replica of this seat; what is heavy is imported now."""
    from gyre_deepspeed.replica import DeepSpeedReplica

    return DeepSpeedReplica(seat, DeepSpeedTrainerOptions(**seat.body["options"]))


if __name__ == "__main__":
    serve(make)
