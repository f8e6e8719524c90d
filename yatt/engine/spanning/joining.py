"""Joins a process to the other ranks of its engine; imports torch."""

from collections.abc import Callable

from yatt.engine.protocol import Engine
from yatt.engine.spanning.meeting import EnginePlace as EnginePlace, RankMeeting
from yatt.engine.spanning.mirror import FirstRank, RankEngine, RankGroup


def joined_ranks(place: EnginePlace, tick: Callable[[], None]) -> Callable[[Engine], Engine]:
    """Meets the other ranks; returns the function that connects this rank's engine to theirs.

    Args:
        tick: see `RankMeeting`.
    """
    meeting = RankMeeting(place, tick)
    meeting.meet()
    ranks = RankGroup(place.timeout_s, meeting)

    def connected(engine: Engine) -> Engine:
        return RankEngine(engine, ranks) if place.rank else FirstRank(engine, ranks)

    return connected
