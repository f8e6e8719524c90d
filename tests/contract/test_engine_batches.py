"""Many requests at once, of different lengths: the same contract without deterministic mode."""

import importlib.util

import pytest

from tests.contract.test_engine import (
    WATCHED,
    ids_of,
    largest_difference,
    options_for,
    reference_rows,
    run,
    sample,
    transformers_logprobs,
    watched_rows,
)
from tests.tiny_models import make_qwen3
from yatt.engine.build import build_engine
from yatt.records import message as m

PROMPTS = [[40 + index] * (1 + 7 * index) for index in range(6)]


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_a_batch_of_unequal_requests_has_the_reference_logprobs(kind, tmp_path):
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    model = make_qwen3(tmp_path / "model", tied=True)
    engine = build_engine(kind, options_for(model, deterministic=False, max_num_seqs=4))
    engine.start()
    asked = {
        f"{index}": sample(
            f"{index}",
            prompt_ids=m.pack_ids(prompt),
            seed=index,
            max_tokens=5 + 4 * index,
            ignore_eos=True,
            watched=WATCHED[: 2 * (index % 3)],
        )
        for index, prompt in enumerate(PROMPTS)
    }
    done = run(engine, *asked.values())
    engine.add(asked["5"])
    engine.add(asked["1"])
    for _ in range(4):
        engine.step()
    (partial,) = engine.abort(("5",))
    done_after_abort = run(engine)
    engine.close()
    assert done.keys() == asked.keys()
    assert ids_of(partial) == ids_of(done["5"])[: len(ids_of(partial))]
    assert 0 < len(ids_of(partial)) < 25
    assert list(done_after_abort) == ["1"]
    for index, prompt in enumerate(PROMPTS):
        completed = done[f"{index}"]
        expected = transformers_logprobs(model, prompt + ids_of(completed))[len(prompt) - 1 :]
        assert len(expected) == 5 + 4 * index
        assert largest_difference(m.unpack_floats(completed.logprobs), expected) < 1e-4
        watched = WATCHED[: 2 * (index % 3)]
        rows = reference_rows(model, prompt + ids_of(completed), watched, 1.0)[len(prompt) - 1 :]
        found = watched_rows(completed, len(watched)) if watched else rows
        assert [*map(len, found)] == [len(watched)] * (5 + 4 * index)
        assert not watched or max(map(largest_difference, found, rows)) < 3e-6
        assert watched or completed.watched == b""


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_top_k_and_top_p_narrow_what_is_sampled(kind, tmp_path):
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    engine = build_engine(kind, options_for(make_qwen3(tmp_path / "model", tied=True), deterministic=False))
    engine.start()
    wide = [sample(f"w{seed}", seed=seed, max_tokens=1, ignore_eos=True) for seed in range(40)]
    two = [sample(f"k{seed}", seed=seed, max_tokens=1, top_k=2, ignore_eos=True) for seed in range(40)]
    few = [sample(f"p{seed}", seed=seed, max_tokens=1, top_p=0.02, ignore_eos=True) for seed in range(40)]
    greedy = [
        sample(f"g{seed}", seed=seed, max_tokens=1, temperature=0.0, ignore_eos=True) for seed in range(4)
    ]
    done = run(engine, *wide, *two, *few, *greedy)
    engine.close()
    kinds = {letter: {ids_of(v)[0] for k, v in done.items() if k[0] == letter} for letter in "wkpg"}
    assert len(kinds["w"]) > 10
    assert len(kinds["k"]) == 2
    assert len(kinds["g"]) == 1
    assert kinds["g"] <= kinds["k"]
    assert len(kinds["p"]) < len(kinds["w"])
    total = sum(2.718281828459045 ** m.unpack_floats(done[k].logprobs)[0] for k in by_token(done, "k"))
    assert total == pytest.approx(1.0, abs=1e-4)


def by_token(done, letter):
    """One request name for each token that was sampled."""
    return {ids_of(v)[0]: k for k, v in done.items() if k[0] == letter}.values()
