"""Orders of the leader that a node only passes to its trainer ranks."""

import pytest

from yatt.records import message as m
from yatt.records.order import Order, answer_type

PASSED = [kind for kind in Order.__subclasses__() if kind.passes_to_ranks]


def test_there_is_one() -> None:
    assert m.ExportHF in PASSED


@pytest.mark.parametrize("kind", PASSED, ids=lambda kind: kind.__name__)
def test_it_has_no_result_that_a_node_would_have_to_join(kind: type[m.Message]) -> None:
    assert answer_type(kind) is m.Done
    assert kind.under_lease, "ranks work on their GPUs"
