"""What rank 0 of an engine that spans nodes sends to the other ranks."""

from typing import Any

import pytest

from tests.integration.test_engine_worker import sample
from yatt.engine.spanning.mirror import ADD, FirstRank, Operation
from yatt.records import message as m


class Ranks:
    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, operations: tuple[Operation, ...]) -> None:
        self.sent += [each.kind for each in operations]


class Picky:
    """Refuses requests of one name, with an error that says nothing about the request."""

    def add(self, sample: m.SampleRequest) -> None:
        if sample.request_id == "bad":
            raise TypeError("an argument that this library does not know")


def test_a_request_that_rank_0_refuses_for_any_cause_is_not_sent_to_the_others() -> None:
    ranks: Any = Ranks()
    engine: Any = Picky()
    first = FirstRank(engine, ranks)
    first.add(sample("good"))
    with pytest.raises(TypeError):
        first.add(sample("bad"))
    first.idle()
    assert ranks.sent == [ADD]
