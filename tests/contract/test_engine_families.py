"""Engines run families with windows, released names of experts, or a type that transformers does not know, as
transformers' classes do: before and after an update of the weights, when they decode and when they score."""

import importlib.util

import pytest

from tests.contract.test_engine import (
    ids_of,
    largest_difference,
    logprobs_of,
    options_for,
    run,
    sample,
)
from tests.tiny_models import make_sigmoid_moe, make_windowed, publish, reference_model
from yatt.engine.build import build_engine
from yatt.records import message as m

CASES = [
    ("transformers", "mixtral"), ("transformers", "kimi_k2"), ("vllm", "mixtral"), ("vllm", "kimi_k2"),
    ("vllm", "qwen3"), ("vllm", "mistral"), ("transformers", "minimax_m2"), ("transformers", "olmo3"),
    ("vllm", "olmo2"), ("vllm", "olmo3"),
]  # fmt: skip
PROMPT = [40 + place % 23 for place in range(33)]
"""Longer than the windows."""


@pytest.fixture
def deepseek_type(monkeypatch):
    """vLLM writes the name of Kimi-K2 into transformers' own class, which then reads no experts."""
    monkeypatch.setattr("transformers.DeepseekV3Config.model_type", "deepseek_v3")


@pytest.fixture
def olmo_classes():
    """vLLM changes transformers' own classes of OLMo for the whole process: how they are made and called."""
    from transformers import Olmo2Model, Olmo3Model

    kept = [(each, each.__bases__, dict(vars(each))) for each in (Olmo2Model, Olmo3Model)]
    for each, *_ in kept:
        each.do_not_compile = True  # of references that are there already
    yield
    for each, bases, names in kept:
        each.__bases__ = bases
        for name in set(vars(each)) - set(names):
            delattr(each, name)
        for name in ("__init__", "__call__"):
            if name in names:
                setattr(each, name, names[name])


@pytest.mark.parametrize(("kind", "family"), CASES)
@pytest.mark.usefixtures("deepseek_type", "olmo_classes")
def test_a_family_has_the_reference_logprobs_of_old_and_new_weights(kind, family, tmp_path):
    """A whole run of an engine: what it makes of a key of config.json shows nowhere else."""
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    make = make_sigmoid_moe if family == "kimi_k2" else make_windowed
    models = [make(tmp_path / str(seed), family, seed=seed) for seed in range(2)]
    references = [reference_model(model).float() for model in models]
    engine = build_engine(kind, options_for(models[0], deterministic=False))
    engine.start()
    try:
        for version, model in enumerate(models):
            if version:
                engine.load_weights(version, publish(tmp_path / "v1", model=model, policy_version=version))
                compared = engine.compare_weights(version, str(tmp_path / "v1"))
                assert compared.differing == () and compared.num_compared > 4
            asked = [
                sample(f"{seed}", seed=seed, ignore_eos=True, prompt_ids=m.pack_ids(PROMPT[seed * 9 :]))
                for seed in range(3)
            ]
            done = run(engine, *asked)
            for seed, each in enumerate(asked):
                completed, prompt = done[each.request_id], PROMPT[seed * 9 :]
                expected = logprobs_of(references[version], ids := prompt + ids_of(completed))
                decoded = m.unpack_floats(completed.logprobs)
                assert largest_difference(decoded, expected[len(prompt) - 1 :]) < 1e-5
                assert largest_difference(engine.score([ids])[0], expected) < 1e-5
    finally:
        engine.close()
