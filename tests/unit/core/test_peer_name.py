"""Names of controllers on the wire: exact, so that no frame is taken for another life's."""

import pytest
from hypothesis import given, strategies as st

from yatt.core.requests.peer_name import parsed_peer, peer_name


@given(st.integers(0, 10**9 - 1), st.integers(1, 10**9 - 1))
def test_a_name_is_read_as_it_was_written(index: int, life: int) -> None:
    assert parsed_peer(peer_name(index, life), index + 1) == (index, life)
    assert parsed_peer(peer_name(index, life), index) is None, "no node of the run"


@given(st.text())
def test_nothing_else_is_a_name(text: str) -> None:
    found = parsed_peer(text, 1000)
    assert found is None or peer_name(*found) == text


@pytest.mark.parametrize(
    "text",
    ["node", "node01", "node1.1", "node1.0", "node1.02", "node-1", "node1.", "node1.2\n", "node\u0661", "x"],
)
def test_near_misses_are_refused(text: str) -> None:
    assert parsed_peer(text, 1000) is None
