import itertools
import random

import pytest
import torch

from yatt.weights import checksum as module
from yatt.weights.checksum import box_sum, tensor_checksum


def by_hand(tensor):
    raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 8)
    words = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
    return sum((2 * i + 1) * word for i, word in enumerate(words)) % (1 << 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (5, 7), (64, 33)])
def test_a_checksum_is_the_plain_sum_in_chunks_of_any_size(dtype, shape, monkeypatch):
    tensor = (torch.randn(shape) * 50).to(dtype)
    expected = f"{by_hand(tensor):016x}"
    for words in (1 << 22, 1, 3, 16):
        monkeypatch.setattr(module, "CPU_CHUNK_WORDS", words)
        assert tensor_checksum(tensor).rpartition("/")[2] == expected


def test_any_flipped_bit_is_seen_and_so_are_two_swapped_values():
    """Of swapped values a few are not seen: of the top lane of their words, a multiple of 128 words apart."""
    draw = random.Random(7)
    tensor = torch.randn(61, 17, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    for _ in range(200):
        damaged = tensor.clone().view(torch.int16)
        damaged.view(-1)[draw.randrange(61 * 17)] ^= 1 << draw.randrange(15)
        assert tensor_checksum(damaged.view(torch.bfloat16)) != tensor_checksum(tensor)
        swapped = tensor.reshape(-1).clone()
        left, right = draw.sample(range(61 * 17), 2)
        swapped[[left, right]] = swapped[[right, left]]
        if tensor.reshape(-1)[left] != tensor.reshape(-1)[right]:
            assert tensor_checksum(swapped.view(61, 17)) != tensor_checksum(tensor)


def test_a_view_has_the_checksum_of_its_copy_and_another_shape_or_dtype_has_not():
    whole = torch.randn(9, 6)
    for view in (whole.T, whole[1:, 1:], whole.reshape(-1)[3:]):
        assert tensor_checksum(view) == tensor_checksum(view.clone())
    assert tensor_checksum(whole) != tensor_checksum(whole.reshape(6, 9))
    assert tensor_checksum(whole) != tensor_checksum(whole.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(13,), (64,), (12, 16), (9, 7), (31, 24)])
def test_the_sums_of_all_boxes_make_the_checksum_however_the_tensor_is_cut(dtype, shape, monkeypatch):
    draw, whole = random.Random(f"{dtype}{shape}"), (torch.randn(shape) * 50).to(dtype)
    for words in (1 << 16, 5):
        monkeypatch.setattr(module, "CPU_CHUNK_WORDS", words)
        for _ in range(4):
            cuts = [sorted({0, size, *(draw.randrange(size) for _ in range(2))}) for size in shape]
            pairs = [list(itertools.pairwise(cut)) for cut in cuts]
            total = 0
            for ranges in itertools.product(*pairs):
                box = whole[tuple(slice(*each) for each in ranges)].clone()
                total += box_sum(box, [begin for begin, _ in ranges], shape)
            assert f"{total % 2**64:016x}" == tensor_checksum(whole).rpartition("/")[2], cuts
