"""What tensor parallelism cuts is read off the sizes: marks on parameters may be wrong."""

import pytest
import torch

from yatt.models.rows import Part, matrix_row, vector_row
from yatt.weights.convert import cut_of, cut_shard

MATRIX = matrix_row("decoder.layers.0.mlp.linear_fc1.weight", [Part("gate", 8), Part("up", 8)], 12)
BACK = matrix_row("decoder.layers.0.mlp.experts.3.linear_fc2.weight", [Part("down", 12)], 8)


def marked(shape: tuple[int, ...], dim: int) -> torch.nn.Parameter:
    """A parameter with the marks that Transformer Engine sets, whatever it is."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.tensor_model_parallel, parameter.partition_dim = True, dim
    return parameter


@pytest.mark.parametrize(
    ("row", "shape", "expected"),
    [
        (MATRIX, (16, 12), None),
        (MATRIX, (8, 12), 0),
        (BACK, (12, 4), 1),
        (BACK, (12, 8), None),
        (vector_row("norm", "norm", 12), (12,), None),
        (vector_row("bias", "bias", 12), (6,), 0),
    ],
)
def test_sizes_say_what_is_cut(row, shape, expected) -> None:
    for dim in (0, 1):
        parameter = marked(shape, dim)
        assert cut_of(row, parameter) == expected
        whole = torch.zeros(row.full_shape)
        size = 1 if expected is None else row.full_shape[expected] // shape[expected]
        assert cut_shard(row, whole, cut_of(row, parameter), rank=0, size=max(size, 2)).shape == shape


def test_a_padded_vocabulary_is_cut() -> None:
    from dataclasses import replace

    row = replace(matrix_row("embedding.word_embeddings.weight", [Part("embed", 63)], 4), is_padded=True)
    assert cut_of(row, marked((32, 4), 0)) == 0
    assert cut_of(row, marked((63, 4), 0)) is None
