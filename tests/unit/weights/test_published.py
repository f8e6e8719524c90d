"""Published weights as tensors: views where one host copy has all, boxes that are put together otherwise."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.tiny_models import publish_tensors
from tests.unit.weights.test_registered_memory import Cuda
from yatt.adapters.node_local.host_segment import Stamp, segment_path, weight_plan_path
from yatt.engine.weights.published import read_publication
from yatt.errors import WorkerFailed
from yatt.weights import published as module
from yatt.weights.published import PublishedWeights
from yatt.weights.registered_memory import READ_ONLY_FLAGS, MemoryRegistrar

GENERATOR = torch.Generator().manual_seed(3)
TENSORS = {
    "matrix": torch.randn(11, 6, generator=GENERATOR),
    "half": torch.randn(8, 5, generator=GENERATOR).bfloat16(),
    "vector": torch.randn(7, generator=GENERATOR),
}


def published(folder: Path, cuts: int) -> PublishedWeights:
    publication = read_publication(publish_tensors(folder, TENSORS, 4, cuts=cuts), 4)
    return PublishedWeights(publication.stems, publication.stamp)


@pytest.mark.parametrize("cuts", [1, 2, 3, 5])
def test_each_tensor_is_what_was_published(tmp_path, cuts):
    weights = published(tmp_path / "v", cuts)
    for name, tensor in weights:
        assert (tensor.shape, tensor.dtype) == (TENSORS[name].shape, TENSORS[name].dtype)
        target = torch.zeros_like(TENSORS[name])
        target.copy_(tensor)
        assert torch.equal(target, TENSORS[name])
        assert torch.equal(tensor + 1, TENSORS[name] + 1)
        assert torch.equal(tensor.float().t().contiguous(), TENSORS[name].float().t())
    assert weights.shapes() == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_any_slice_of_a_slice_is_the_same_slice(tmp_path, cuts):
    weights, draw = published(tmp_path / "v", cuts), random.Random(cuts)
    for name, whole in TENSORS.items():
        for _ in range(60):
            mine, expected = weights.tensor(name), whole
            for _ in range(draw.randint(1, 4)):
                dim = draw.randrange(expected.dim()) - draw.choice((0, expected.dim()))
                first = draw.randrange(expected.shape[dim])
                size = draw.randint(1, expected.shape[dim] - first)
                mine, expected = mine.narrow(dim, first, size), expected.narrow(dim, first, size)
            assert torch.equal(mine.clone(), expected)
            assert torch.equal(mine.chunk(2)[0] * 1, expected.chunk(2)[0])
            assert (
                torch.equal(mine[draw.randrange(len(expected)) :: 2] * 1, expected[::2]) or len(expected) > 1
            )


def test_only_what_is_cut_out_is_put_together_and_nothing_if_one_host_copy_has_it(tmp_path, monkeypatch):
    weights, target, made = published(tmp_path / "v", 2), torch.zeros(3, 6), []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **more: made.append(shape) or empty(shape, **more))
    target.copy_(weights.tensor("matrix").narrow(0, 1, 3))
    assert made == [], "a view"
    target.copy_(weights.tensor("matrix").narrow(0, 5, 3))
    assert made == [], "part by part"
    assert torch.equal(target, TENSORS["matrix"][5:8])
    target = weights.tensor("matrix").narrow(0, 5, 3) * 2
    assert made == [(3, 6)]
    assert torch.equal(target, TENSORS["matrix"][5:8] * 2)
    broad = torch.zeros(2, 3, 6)
    broad.copy_(weights.tensor("matrix").narrow(0, 5, 3))
    assert torch.equal(broad[1], TENSORS["matrix"][5:8])


def test_what_is_missing_changed_or_of_another_version_is_refused(tmp_path):
    folder = Path(publish_tensors(tmp_path / "v", TENSORS, 4, cuts=2))
    stems = [folder / "host-0", folder / "host-1"]
    with pytest.raises(WorkerFailed, match="36 of 66 elements of matrix are in the host copies of host-0"):
        PublishedWeights(stems[:1], Stamp(1, 4))
    with pytest.raises(WorkerFailed, match="is version 4 of attempt 1; version 5 of attempt 1"):
        PublishedWeights(stems, Stamp(1, 5))
    weights = PublishedWeights(stems, Stamp(1, 4))
    sums = read_publication(str(folder), 4).sums
    assert weights.damaged(sums) == []
    assert weights.damaged(sums | {"nobody": 1}) == ["nobody"]
    with segment_path(stems[1], "weights").open("r+b") as file:
        file.seek(4096)
        file.write(b"\x55")
    assert weights.damaged(sums) == ["matrix"]
    weight_plan_path(stems[0]).write_bytes(b"\xc1")
    with pytest.raises(WorkerFailed, match="cannot be read as a list of weights"):
        PublishedWeights(stems, Stamp(1, 4))


def test_a_host_copy_stays_mapped_as_long_as_it_is_the_same_file(tmp_path):
    folder = tmp_path / "v"
    publication = read_publication(publish_tensors(folder, TENSORS, 4, cuts=1), 4)
    stem = publication.stems[0]
    first = PublishedWeights(publication.stems, publication.stamp).tensor("matrix")
    again = PublishedWeights(publication.stems, publication.stamp).tensor("matrix")
    assert again.data_ptr() == first.data_ptr()
    path = segment_path(stem, "weights")
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\x00" * 64)
    assert torch.equal(first.flatten()[:16], torch.zeros(16)), "the next version is seen through it"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:4096] + b"\xff" * 64 + content[4160:])
    other = PublishedWeights(publication.stems, publication.stamp).tensor("matrix")
    assert torch.isnan(other.flatten()[0]), "the new file at its place"
    path.unlink()
    with pytest.raises(WorkerFailed, match="cannot be opened"):
        PublishedWeights(publication.stems, publication.stamp)


@pytest.fixture
def cuda(monkeypatch):
    """In place of CUDA's calls, and no host copy is mapped yet."""
    calls = Cuda()
    monkeypatch.setattr(module, "_MAPPINGS", module._Mappings(MemoryRegistrar(calls)))
    return calls


def on_a_gpu(publication) -> PublishedWeights:
    return PublishedWeights(publication.stems, publication.stamp, is_for_gpu=True)


def access_of(address: int) -> str:
    """Access of the mapping at an address, as the kernel shows it: r--s is read only and shared."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < end:
            return line.split()[1]
    return ""


def test_for_a_gpu_each_host_copy_is_registered_once_for_all_its_versions(tmp_path, cuda):
    folder = Path(publish_tensors(tmp_path / "v", TENSORS, 4, cuts=2))
    publication = read_publication(str(folder), 4)
    PublishedWeights(publication.stems, publication.stamp)
    assert cuda.calls == [], "a reader without a GPU needs none"
    addresses = {each.data.data_ptr() for each in kept()}
    for _ in range(3):
        weights = on_a_gpu(publication)
        assert cuda.registered.keys() == addresses
        assert {access_of(address) for address in addresses} == {"r--s"}, "as CUDA's flag says"
    assert torch.equal(weights.tensor("vector") * 1, TENSORS["vector"])
    assert sorted(cuda.calls) == sorted(("register", each, READ_ONLY_FLAGS) for each in addresses)


def test_a_registration_ends_before_its_host_copy_is_unmapped(tmp_path, cuda):
    """Six trainers, one after the other, whose host copies are at the same path."""
    addresses = []
    for _ in range(6):
        shutil.rmtree(tmp_path / "v", ignore_errors=True)
        publication = read_publication(publish_tensors(tmp_path / "v", TENSORS, 4, cuts=1), 4)
        assert torch.equal(on_a_gpu(publication).tensor("vector"), TENSORS["vector"])
        (mapping,) = kept()
        addresses.append(mapping.data.data_ptr())
        del mapping
        assert cuda.registered.keys() == {addresses[-1]}, "the one before is unmapped"
    assert [call[1] for call in cuda.calls if call[0] == "register"] == addresses
    assert [call[1] for call in cuda.calls if call[0] == "unregister"] == addresses[:-1]
    assert cuda.error == 0


def test_without_registration_the_weights_are_the_same_and_no_error_is_left(tmp_path, cuda, caplog):
    cuda.limit_bytes = 1
    publication = read_publication(publish_tensors(tmp_path / "v", TENSORS, 4, cuts=2), 4)
    for _ in range(2):
        weights = on_a_gpu(publication)
        assert all(torch.equal(weights.tensor(name) * 1, TENSORS[name]) for name in TENSORS)
    assert (cuda.error, cuda.registered) == (0, {})
    assert len(cuda.calls) == 2, "each host copy once"
    assert len(caplog.records) == 1


def kept() -> list:
    return [mapping for _, mapping in module._MAPPINGS._kept.values()]
