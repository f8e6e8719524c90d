"""The state of a scripted trainer, and where it is."""

import itertools
import math
import random
import subprocess
import sys

import pytest

from tests.runs import environment
from yatt.adapters.node_local.host_segment import STATE
from yatt.checkpoint.commit.pieces import ITEM_BYTES
from yatt.config.schema import TrainerSection
from yatt.models.cuts import EngineCuts
from yatt.models.rows import Part, WeightRow, matrix_row, vector_row
from yatt.trainer.scripted.layout import ModelShare, laid_out
from yatt.trainer.scripted.state import BLOCK_ELEMENTS, STATE_BYTES, state_after, state_elements, state_in

DTYPES = ["float32", "bfloat16"]
NO_CUTS = EngineCuts({}, frozenset())


def section_of(tensor: int, pipeline: int) -> TrainerSection:
    return TrainerSection(
        total_iterations=1,
        train_batch_size=1,
        mini_batch_size=1,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
    )


def made(key: str, dtype: str, state: bytes, first: int, count: int) -> bytes:
    return b"".join(state_elements(key, dtype, state, first, count))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_can_be_read_off_any_elements(dtype) -> None:
    draw, item = random.Random(1), ITEM_BYTES[dtype]
    for _ in range(200):
        state, key = draw.randbytes(STATE_BYTES), f"main.{draw.random()}"
        size = draw.choice([32, 33, 100, BLOCK_ELEMENTS + 77])
        whole = made(key, dtype, state, 0, size)
        assert len(whole) == size * item
        first = draw.randrange(size - STATE_BYTES + 1)
        part = made(key, dtype, state, first, size - first)
        assert part == whole[first * item :], "a part is what the whole has there"
        assert state_in(key, dtype, first, part) == state
        assert state_in(f"{key}x", dtype, first, part) != state, "of another tensor"


def test_too_few_elements_and_those_of_a_model_show_no_state() -> None:
    state = bytes(range(32))
    assert state_in("k", "float32", 0, made("k", "float32", state, 0, 31)) is None
    assert state_in("k", "float32", 0, random.Random(0).randbytes(4096)) is None


def test_a_state_depends_on_each_part_and_on_their_borders() -> None:
    parts = [(b"a", b"bc"), (b"ab", b"c"), (b"a", b"bd"), (b"abc",), ()]
    assert len({state_after(bytes(STATE_BYTES), *each) for each in parts}) == len(parts)


ROWS = [
    matrix_row("embedding", [Part("embed", 101)], 32),
    matrix_row("fc1", [Part("gate", 24), Part("up", 24)], 32),
    matrix_row("qkv", [Part("q", 16), Part("k", 4), Part("v", 4)], 32, groups=2),
    vector_row("norm", "norm", 7),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "world, tensor, pipeline", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (8, 2, 2), (12, 3, 2), (16, 1, 1)]
)
def test_the_ranks_have_each_element_once(world, tensor, pipeline, dtype) -> None:
    counted: dict[str, set[tuple[int, ...]]] = {}
    weights: dict[str, int] = {}
    for rank in range(world):
        share = ModelShare.of(rank, world, section_of(tensor, pipeline))
        runs, pieces, planned = laid_out(share.rows(ROWS), share, dtype, NO_CUTS)
        for area, its in runs.items():
            ends = [(run.at, run.at + run.size_bytes) for run in its]
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends)), area
        for piece in pieces:
            assert piece.size_bytes == math.prod(piece.local_shape) * ITEM_BYTES[piece.dtype]
            begin, end = piece.at, piece.at + piece.size_bytes  # within a run of its own tensor
            assert any(
                run.key == piece.key and run.at <= begin and end <= run.at + run.size_bytes
                for run in runs[piece.area]
            )
            for place in places(piece.global_offset, piece.local_shape):
                assert place not in counted.setdefault(piece.key, set()), (piece.key, place)
                counted[piece.key].add(place)
        if share.copy == 0:
            for weight in planned:
                assert weight.name not in weights
                weights[weight.name] = sum(math.prod(box.shape) for box in weight.boxes)
                assert weights[weight.name] == math.prod(weight.shape)
    kinds = ("main", "exp_avg", "exp_avg_sq") + (("model",) if dtype == "bfloat16" else ())
    wanted = {f"{kind}.{row.name}": math.prod(row.full_shape) for row in ROWS for kind in kinds}
    assert {key: len(found) for key, found in counted.items()} == wanted
    assert weights.keys() == {"embed", "gate", "up", "q", "k", "v", "norm"}
    areas = {run.key.partition(".")[0] for run in runs[STATE]}
    assert areas <= {"main", "exp_avg", "exp_avg_sq"}


def places(offset: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    rows = range(offset[0], offset[0] + shape[0])
    if len(shape) == 1:
        return [(row,) for row in rows]
    return [(row, column) for row in rows for column in range(offset[1], offset[1] + shape[1])]


def test_large_rows_are_cut_into_pieces() -> None:
    row = WeightRow(name="big", parts=(Part("big", 3 << 12),), width=1 << 10)
    share = ModelShare.of(0, 1, section_of(1, 1))
    _, pieces, _ = laid_out([row], share, "float32", NO_CUTS)
    assert len(pieces) == 9 and {piece.size_bytes for piece in pieces} == {16 << 20}


def test_the_scripted_trainer_imports_no_torch() -> None:
    program = "import sys, yatt.trainer.main, yatt.trainer.scripted.rank; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True)
