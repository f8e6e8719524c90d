"""Slices of published weights: packed, read like whole tensors, and nothing that is not there."""

import math
import random
from pathlib import Path

import msgspec
import pytest
import torch

from tests.sliced_weights import packed_copy, part_sums
from tests.tiny_models import publish_tensors
from yatt.adapters.node_local.host_segment import Stamp, segment_path, weight_plan_path
from yatt.control.gpus.weights.given_segment import GivenSegment
from yatt.errors import WorkerFailed
from yatt.records.weights import WeightCut, WeightPlan
from yatt.weights.published import PublishedWeights
from yatt.weights.slices import common_extent, part_extent, sliced_plan

GENERATOR = torch.Generator().manual_seed(4)
TENSORS = {
    "rows": torch.randn(24, 6, generator=GENERATOR),
    "columns": torch.randn(7, 12, generator=GENERATOR).bfloat16(),
    "kv": torch.randn(8, 5, generator=GENERATOR),
    "bias": torch.randn(9, generator=GENERATOR),
    "expert": torch.randn(6, 4, generator=GENERATOR).bfloat16(),
    "norm": torch.randn(7, generator=GENERATOR),
}
CUTS = {
    "rows": WeightCut(dim=0, spans=((0, 8), (8, 16), (16, 24))),
    "columns": WeightCut(dim=1, spans=((0, 4), (4, 8), (8, 12))),
    "kv": WeightCut(dim=0, spans=((0, 4), (0, 8), (4, 8))),
    "bias": WeightCut(dim=0, spans=((0, 4), (4, 8), (8, 9))),
    "expert": WeightCut(dim=0, spans=((0, 0), (0, 6), (0, 0))),
}
STAMP, PARTS = Stamp(1, 4), 3


def with_cuts(stem: Path, cuts: dict[str, WeightCut] = CUTS, **more: object) -> None:
    plan = msgspec.msgpack.decode(weight_plan_path(stem).read_bytes(), type=WeightPlan)
    weights = tuple(msgspec.structs.replace(each, cut=cuts.get(each.name), **more) for each in plan.weights)
    weight_plan_path(stem).write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(plan, weights=weights)))


def fetched(folder: Path, part: int, ranks: int, cuts: dict[str, WeightCut] = CUTS) -> list[Path]:
    """Stems of what a node has fetched from so many ranks, which have some rows of each tensor."""
    source = Path(publish_tensors(folder / f"v{part}", TENSORS, STAMP.version, cuts=ranks))
    stems = []
    for rank in range(ranks):
        with_cuts(source / f"host-{rank}", cuts)
        stems.append(folder / f"fetched-{part}-{rank}")
        packed_copy(source / f"host-{rank}", stems[-1], part, STAMP)
    return stems


def box_of(name: str, part: int) -> tuple[slice, ...]:
    offset, shape = part_extent(TENSORS[name].shape, CUTS.get(name), part)
    return tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("part", range(PARTS))
def test_a_part_is_read_as_from_whole_tensors_and_nothing_else_can_be(tmp_path, part, ranks):
    weights = PublishedWeights(fetched(tmp_path, part, ranks), STAMP, part=part)
    draw = random.Random(part)
    assert dict(weights).keys() == TENSORS.keys(), "those of which nothing is here too"
    assert weights.tensor("rows").narrow(0, 24, 0).shape == (0, 6), "padding of a vocabulary reads nothing"
    for name, whole in TENSORS.items():
        mine, place = weights.tensor(name), box_of(name, part)
        assert (mine.shape, mine.dtype) == (whole.shape, whole.dtype)
        for _ in range(60):
            box = [sorted(draw.choices(range(size + 1), k=2)) for size in whole.shape]
            if any(begin == end for begin, end in box):
                continue
            taken, expected = mine, whole
            for dim, (begin, end) in enumerate(box):
                taken = taken.narrow(dim, begin, end - begin)
                expected = expected.narrow(dim, begin, end - begin)
            is_here = all(p.start <= a and b <= p.stop for p, (a, b) in zip(place, box, strict=True))
            target = torch.full_like(expected, 7.0)
            if is_here:
                target.copy_(taken)
                assert torch.equal(target, expected) and torch.equal(taken * 1, expected)
            else:
                for read in (lambda t=taken, to=target: to.copy_(t), lambda t=taken: t * 1):
                    with pytest.raises(WorkerFailed, match=r"placement\.send_slices: false"):
                        read()
                assert torch.equal(target, torch.full_like(expected, 7.0)), "nothing was taken over"


def test_an_expert_that_is_stacked_and_taken_out_again_is_not_read(tmp_path):
    for part in range(PARTS):
        weights = PublishedWeights(fetched(tmp_path, part, 2), STAMP, part=part)
        (expert,) = weights.tensor("expert").unsqueeze(0).unbind()
        assert expert.shape == TENSORS["expert"].shape
        if part == 1:
            assert torch.equal(expert.narrow(0, 2, 3) * 1, TENSORS["expert"][2:5])
            stacked = torch.zeros(1, 6, 4, dtype=torch.bfloat16)
            stacked.copy_(weights.tensor("expert").unsqueeze(0))
            assert torch.equal(stacked[0], TENSORS["expert"])
            assert torch.equal(weights.tensor("expert").unsqueeze(0) + 1, TENSORS["expert"][None] + 1)
            assert torch.equal(weights.tensor("expert").unsqueeze(1) * 1, TENSORS["expert"][:, None])
        else:
            with pytest.raises(WorkerFailed, match=r"reads \[6, 4\] from \[0, 0\] on of expert, and this"):
                expert.clone()


@pytest.mark.parametrize("part", range(PARTS))
def test_each_byte_of_a_part_counts_in_its_checksum(tmp_path, part):
    stems = fetched(tmp_path, part, 2)
    here = {name: sums[part] for name, sums in part_sums(TENSORS, CUTS).items()}
    here |= {"norm": part_sums(TENSORS, {"norm": WeightCut(dim=0, spans=((0, 7),))})["norm"][0]}
    assert PublishedWeights(stems, STAMP, part=part).damaged(here) == []
    for stem in stems:
        plan = msgspec.msgpack.decode(weight_plan_path(stem).read_bytes(), type=WeightPlan)
        for planned in plan.weights:
            for box in planned.boxes:
                size = math.prod(box.shape) * TENSORS[planned.name].element_size()
                with segment_path(stem, "weights").open("r+b") as file:
                    for at in (box.at, box.at + size - 1):
                        file.seek(4096 + at)
                        (byte,) = file.read(1)
                        file.seek(4096 + at)
                        file.write(bytes([byte ^ 0x40]))
                        file.flush()
                        assert PublishedWeights(stems, STAMP, part=part).damaged(here) == [planned.name]
                        file.seek(4096 + at)
                        file.write(bytes([byte]))


@pytest.mark.parametrize("name", ["rows", "columns", "kv", "bias"])
@pytest.mark.parametrize("step", [-1, 1])
def test_a_slice_that_is_off_by_one_is_found(tmp_path, name, step):
    """Planted: the giver packs other rows than the plan says; then plan and bytes are off alike."""
    part, cut = 1, CUTS[name]
    here = {key: sums[part] for key, sums in part_sums(TENSORS, CUTS).items()}
    off = WeightCut(dim=cut.dim, spans=tuple((max(a + step, 0), max(b + step, 0)) for a, b in cut.spans))
    if name == "kv":  # the node needs all rows: it has one less
        off = WeightCut(dim=0, spans=((0, 4), (max(step, 0), 8 + min(step, 0)), (4, 8)))
    stems = fetched(tmp_path / "off", part, 2, CUTS | {name: off})
    weights = PublishedWeights(stems, STAMP, part=part)
    begin, end = cut.spans[part]
    with pytest.raises(WorkerFailed, match=rf"of {name}, and this node has fetched"):
        weights.tensor(name).narrow(cut.dim, begin, end - begin).clone()
    assert weights.damaged(here) == [name]
    true = fetched(tmp_path / "true", part, 2)
    for stem, other in zip(true, stems, strict=True):  # the bytes of the wrong rows under the right plan
        with segment_path(stem, "weights").open("r+b") as file:
            size = min(segment_path(each, "weights").stat().st_size for each in (stem, other))
            file.seek(4096)
            file.write(segment_path(other, "weights").read_bytes()[4096:size])
    assert name in PublishedWeights(true, STAMP, part=part).damaged(here)


def test_plans_that_lack_something_or_disagree_are_refused(tmp_path):
    stems = fetched(tmp_path, 1, 2)
    with pytest.raises(WorkerFailed, match="24 of 48 elements of rows are in the host copies of fetched-1-0"):
        PublishedWeights(stems[:1], STAMP, part=1)
    with pytest.raises(WorkerFailed, match="48 of 144 elements of rows"):
        PublishedWeights(stems, STAMP)
    with_cuts(stems[1], CUTS | {"rows": WeightCut(dim=0, spans=((0, 8), (8, 15), (15, 24)))})
    with pytest.raises(WorkerFailed, match="fetched-1-1 has another shape or cut of rows than the others"):
        PublishedWeights(stems, STAMP, part=1)
    with pytest.raises(WorkerFailed, match="has no part 3"):
        GivenSegment(tmp_path / "v1" / "host-0", 3)
    weight_plan_path(tmp_path / "v1" / "host-0").write_bytes(b"\xc1")
    with pytest.raises(WorkerFailed, match="has no part 0"):
        GivenSegment(tmp_path / "v1" / "host-0", 0)


def test_what_another_rank_gives_is_not_packed_and_the_unknown_is_whole_and_counted(tmp_path):
    stem = Path(publish_tensors(tmp_path / "v", TENSORS, 4)) / "host-0"
    with_cuts(stem, {}, is_known=False)
    given = GivenSegment(stem, 2)
    sizes = [tensor.nbytes for tensor in TENSORS.values()]
    assert given.unknown_bytes == sum(sizes) <= given.size_bytes < sum(sizes) + 64 * len(sizes)
    with_cuts(stem, CUTS, is_given=False)
    given = GivenSegment(stem, 2)
    assert (given.size_bytes, given.unknown_bytes) == (0, 0)
    packed_copy(stem, tmp_path / "nothing", 2, STAMP)
    with pytest.raises(WorkerFailed, match="0 of 48 elements of rows"):
        PublishedWeights([tmp_path / "nothing"], STAMP, part=2)


def test_local_ranks_and_fetched_slices_of_the_same_tensors_are_one(tmp_path):
    """A node that has a rank of its own reads that rank's whole host copy, where others' slices are packed;
    what both have counts once."""
    source = Path(publish_tensors(tmp_path / "v", TENSORS, 4, cuts=2))
    for rank in range(2):
        with_cuts(source / f"host-{rank}")
    packed_copy(source / "host-0", tmp_path / "same", 0, STAMP)
    packed_copy(source / "host-1", tmp_path / "other", 0, STAMP)
    weights = PublishedWeights([source / "host-0", tmp_path / "same", tmp_path / "other"], STAMP, part=0)
    for name, tensor in weights:
        box, place = tensor, box_of(name, 0)
        if any(each.start == each.stop for each in place):
            continue
        for dim, each in enumerate(place):
            box = box.narrow(dim, each.start, each.stop - each.start)
        assert torch.equal(box * 1, TENSORS[name][place])
    here = {name: sums[0] for name, sums in part_sums(TENSORS, CUTS).items()}
    assert weights.damaged(here) == []


def test_boxes_that_touch_only_have_nothing_in_common():
    draw = random.Random(5)
    for _ in range(400):
        one, other = ([sorted(draw.choices(range(6), k=2)) for _ in range(2)] for _ in range(2))
        extents = [
            (tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in (one, other)
        ]  # fmt: skip
        found = common_extent(*extents)
        cells = [
            {(x, y) for x in range(*box[0]) for y in range(*box[1])} for box in (one, other)
        ]  # fmt: skip
        if found is None:
            assert not cells[0] & cells[1]
            continue
        (x, y), (height, width) = found
        assert {(a, b) for a in range(x, x + height) for b in range(y, y + width)} == cells[0] & cells[1]


def test_packed_slices_are_aligned_and_do_not_overlap(tmp_path):
    stem = Path(publish_tensors(tmp_path / "v", TENSORS, 4)) / "host-0"
    with_cuts(stem)
    plan = msgspec.msgpack.decode(weight_plan_path(stem).read_bytes(), type=WeightPlan)
    for part in range(PARTS):
        slices = sliced_plan(plan, part)
        ends = [0, *(run.end for run in slices.runs)]
        assert all(run.at % 64 == 0 and run.at >= end for run, end in zip(slices.runs, ends, strict=False))
        wanted = sum(
            math.prod(part_extent(tensor.shape, CUTS.get(name), part)[1]) * tensor.element_size()
            for name, tensor in TENSORS.items()
        )
        assert sum(run.end - run.at for run in slices.runs) == wanted
