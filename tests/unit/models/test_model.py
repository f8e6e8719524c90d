"""config.json is read as transformers reads it, and refused before start as in the trainer."""

import json
from pathlib import Path

import pytest
import transformers

from tests.tiny_models import make_qwen3
from yatt.config.load import load_run_config
from yatt.errors import ConfigError
from yatt.launch.checks.preflight import check_preflight
from yatt.models.model import model_of, read_model

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def written(folder: Path, **values: object) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        SIZES,
        {**SIZES, "num_key_value_heads": None, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        {**SIZES, "head_dim": 32, "num_key_value_heads": 2, "rope_theta": 1e6, "vocab_size": 99},
        {**SIZES, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {
            **SIZES,
            "num_key_value_heads": 2,
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        },
    ],
)
def test_what_is_left_out_means_what_transformers_means(tmp_path: Path, kind: str, values: dict) -> None:
    values = {"num_key_value_heads": 4, **values} if values else values
    more = {"sliding_window": None} if kind == "mistral" else {}
    if more and values.get("num_key_value_heads", 4) is None:
        values = {**values, "num_key_value_heads": 4}  # transformers refuses null there
    folder = written(tmp_path, model_type=kind, **values, **more)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert read_model(folder) == model_of(theirs)
    ours = read_model(folder).shape
    assert ours.is_regular and ours.experts is None
    assert (ours.vocab_size, ours.dense.size, ours.num_layers) == (
        theirs.vocab_size,
        theirs.intermediate_size,
        theirs.num_hidden_layers,
    )
    heads = ours.attention.num_heads, ours.attention.num_kv_heads
    assert heads == (theirs.num_attention_heads, theirs.num_key_value_heads)
    width = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.attention.head_dim, ours.norm_eps, ours.init_std) == (
        width,
        theirs.rms_norm_eps,
        theirs.initializer_range,
    )
    assert (ours.is_tied, ours.max_positions) == (theirs.tie_word_embeddings, theirs.max_position_embeddings)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope_scaling_factor == theirs.rope_parameters.get("factor", 0.0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE scaling .*yarn.* is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 2.0}}, "RoPE scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "RoPE scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with 'sliding_attention'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "64"}, "hidden_size='64'; it needs a whole number of 1 or more"),
        ({"num_attention_heads": 0}, "num_attention_heads=0; it needs a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3, which does not divide num_attention_heads=4"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x'"),
        ({"rope_theta": [1]}, r"rope_theta=\[1\]"),
        ({"model_type": ["qwen3"]}, "architecture .* is not supported"),
    ],
)
def test_what_cannot_be_honoured_is_refused_from_the_file(tmp_path: Path, values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_model(written(tmp_path, **{"model_type": "qwen3", "num_key_value_heads": 2, **SIZES, **values}))


@pytest.mark.parametrize("text", ["[]", "{", "null", "[" * 100_000, "\xff"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="JSON"):
        read_model(str(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fits")
    make_qwen3(root / "policy", tied=True)
    (root / "train.jsonl").write_text('{"prompt": "one plus one is"}\n')
    return root


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (
            {},
            ["trainer.tensor_model_parallel_size=8"],
            "trainer.tensor_model_parallel_size 8 does not divide",
        ),
        (
            {},
            ["trainer.pipeline_model_parallel_size=4"],
            "trainer.pipeline_model_parallel_size 4 is more than the model's 2 layers",
        ),
        (
            {},
            ["trainer.pipeline_model_parallel_size=2", "trainer.virtual_pipeline_model_parallel_size=2"],
            "2 layers do not divide into PP 2 x VPP 2; let the product be one of 1, 2.",
        ),
        ({}, ["rollout.tp_size=8"], "rollout.tp_size 8 does not divide the"),
        ({"use_sliding_window": True}, [], "config.json says use_sliding_window=True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, [], "RoPE scaling"),
        ({"num_hidden_layers": "2"}, [], "config.json says num_hidden_layers='2'"),
    ],
)
def test_what_only_the_trainer_would_find_is_found_before_start(
    folder: Path, config: dict, settings: list[str], says: str
) -> None:
    file = folder / "policy" / "config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), **config}))
    run = folder / "run.yaml"
    run.write_text(
        f"run: {{dir: {folder}/run}}\ndata: {{train_files: [{folder}/train.jsonl], max_prompt_tokens: 8}}\n"
        f"model: {{path: {folder}/policy}}\noptimizer: {{lr: 0.001}}\n"
        "launch: {nodes: 1, gpus_per_node: 8}\n"
        "rollout: {n: 2, max_response_tokens: 8}\nrewards: [{name: r, path: 'builtin:exact'}]\n"
        "trainer: {total_iterations: 1, train_batch_size: 2, mini_batch_size: 2}\n"
    )
    try:
        with pytest.raises(ConfigError) as caught:
            check_preflight(load_run_config([run], settings))
    finally:
        file.write_text(before)
    assert says in str(caught.value)


@pytest.mark.parametrize("values", [{}, {"sliding_window": 4096}])
def test_a_mistral_with_sliding_windows_is_refused(tmp_path: Path, values: dict) -> None:
    with pytest.raises(ConfigError, match="sliding_window=4096, or leaves it out, which means 4096"):
        read_model(written(tmp_path, model_type="mistral", **SIZES, **values))
