"""Rules of moves that are written for thousands of slabs give what their plain forms give."""

from hypothesis import given, strategies as st

from yatt.core.gpus.moves import Moves, assigned_table
from yatt.core.gpus.placement import Slab

ROLES = ("rollout", "genrm:a", "genrm:b")
SLABS = [Slab(node, index, (index,)) for node in range(4) for index in range(3)]
Pairs = frozenset[tuple[Slab, str]]


def plainly_assigned(
    table: dict[Slab, str], split: dict[str, int], built: Pairs, unfit: Pairs
) -> dict[Slab, str]:
    """The rule in its plain form: for each slab that a role lacks, look at all that others can give."""
    after = dict(table)
    over = {role: sum(holder == role for holder in table.values()) - num for role, num in split.items()}
    for role in sorted(split):
        for _ in range(-over[role]):
            given_up = [slab for slab, had in after.items() if over[had] > 0 and (slab, role) not in unfit]
            if not given_up:
                break
            slab = max(given_up, key=lambda each: ((each, role) in built, each))
            over[after[slab]] -= 1
            after[slab] = role
    return after


tables = st.fixed_dictionaries({slab: st.sampled_from(ROLES) for slab in SLABS})
pairs = st.frozensets(st.tuples(st.sampled_from(SLABS), st.sampled_from(ROLES)), max_size=20)


@st.composite
def splits(draw: st.DrawFn) -> dict[str, int]:
    first = draw(st.integers(0, len(SLABS)))
    second = draw(st.integers(0, len(SLABS) - first))
    return dict(zip(ROLES, (first, second, len(SLABS) - first - second), strict=True))


@given(tables, splits(), pairs, pairs)
def test_slabs_are_assigned_as_by_the_plain_rule(
    table: dict[Slab, str], split: dict[str, int], built: Pairs, unfit: Pairs
) -> None:
    assert assigned_table(table, split, built, unfit) == plainly_assigned(table, split, built, unfit)


@given(tables, st.frozensets(st.sampled_from(SLABS)), st.frozensets(st.integers(0, 3)))
def test_numbers_of_slabs_are_those_of_the_lists(
    table: dict[Slab, str], moving: frozenset[Slab], lost: frozenset[int]
) -> None:
    moves = Moves(table=table, moving=moving, lost=lost)
    for role in ROLES:
        assert moves.num_of()[role] == len(moves.of(role))
        assert moves.num_there()[role] == len(moves.there(role))
