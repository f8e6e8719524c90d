"""docs/scale.md is what its code computes; the counts are those of the whole model."""

import math

import pytest

from tests.bench import scale


def test_the_page_is_up_to_date() -> None:
    assert scale.PAGE.read_text() == scale.page(), "run `python -m tests.bench.scale`"


@pytest.mark.parametrize("name", scale.CONFIGS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (8, 1), (4, 4)])
def test_over_all_ranks_each_element_is_saved_once(name: str, tp: int, pp: int) -> None:
    case = scale.Case(name, 1)
    layout = scale.Layout(tp=tp, pp=pp, dp=8)
    saved = sum(
        scale.saved_bytes(case.model, layout, tp_rank, pp_rank)
        for tp_rank in range(tp)
        for pp_rank in range(pp)
    )
    assert saved == 14 * sum(math.prod(row.full_shape) for row in case.model.rows)


def test_models_have_the_sizes_of_their_names() -> None:
    sizes = {name: scale.Case(name, 1).params / 1e9 for name in scale.CONFIGS}
    named = {"Qwen3-1.7B": 1.72, "Qwen3-8B": 8.19, "Qwen3-32B": 32.8, "Llama-70B": 70.6}
    assert sizes == pytest.approx(named, rel=0.01)
