"""A set of nodes as bits is the set that it stands for."""

from hypothesis import given, strategies as st

from yatt.core.phases import phases
from yatt.core.phases.nodeset import NodeSet

INDICES = st.frozensets(st.integers(0, 2000), max_size=40)


@given(INDICES, st.integers(0, 2000))
def test_a_node_set_equals_the_frozenset_of_the_same_nodes(indices, other):
    found = NodeSet(indices)
    assert found == indices and indices == found and hash(found) == hash(indices)
    assert list(found) == sorted(indices) and len(found) == len(indices)
    assert (other in found) == (other in indices) and -1 not in found
    for index in (other, *sorted(indices)[:3]):
        assert found.without(index) == indices - {index} and len(found.without(index)) == len(
            indices - {index}
        )
    assert bool(found) == bool(indices)


def test_an_answer_does_not_copy_the_set_of_those_that_are_owed():
    """What a state holds of the owed nodes is one number; a frozenset would be of N entries, N times."""
    nodes = frozenset(range(1024))
    program = phases.Program(
        nodes=nodes, trainer_nodes=frozenset({0}), total_iterations=1, save_every=0, validate_every=0,
        validates=False, num_scorings=0,
    )  # fmt: skip
    state, _ = phases.start_phases(program)
    state, _ = phases.step(state, phases.Acted(state.seq), program)
    sizes = []
    for node in range(1023):
        state, actions = phases.step(state, phases.OrderAnswered(node, state.seq), program)
        assert not actions and isinstance(state.owed, NodeSet)
        sizes.append(state.owed._bits.__sizeof__())
    assert max(sizes) < 200 < nodes.__sizeof__() / 100
    state, actions = phases.step(state, phases.OrderAnswered(1023, state.seq), program)
    assert state.part is phases.PhasePart.ENTER and len(actions) == 1024
