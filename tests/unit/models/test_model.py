"""config.json is read as transformers reads it, and refused before start as in the trainer."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.tiny_models import make_qwen3
from yatt.adapters.inputs.model_family import model_of_run
from yatt.config.load import load_run_config
from yatt.config.schema import ModelSection
from yatt.errors import ConfigError
from yatt.launch.checks.judge_check import check_engine_model
from yatt.launch.checks.policy_check import check_policy
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
        ({"use_sliding_window": "yes"}, "use_sliding_window='yes'; it needs true or false"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0; it needs a whole number"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers=-1; it needs a whole"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types .*, but no window; write sliding_window",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types of 1 layers, and num_hidden_layers=2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types with 'chunked_attention'"),
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


SOME_NARROW = {
    "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "layer_types": None,
}  # fmt: skip


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
        ({"layer_types": ["sliding_attention"] * 2}, [], "config.json says layer_types"),
        (SOME_NARROW, [], "has windows in some layers (config.json: sliding_window), and vLLM has the same"),
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
    run = run_file(folder)
    try:
        with pytest.raises(ConfigError) as caught:
            check_preflight(load_run_config([run], settings))
    finally:
        file.write_text(before)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("config", "engine"), [(SOME_NARROW, "transformers"), (SOME_NARROW | {"max_window_layers": 0}, "vllm")]
)
def test_windows_that_the_engine_has_too_are_trained(folder: Path, config: dict, engine: str) -> None:
    file = folder / "policy" / "config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), **config}))
    try:
        check_policy(load_run_config([run_file(folder)], [f"rollout.engine={engine}"]))
    finally:
        file.write_text(before)


def test_a_judge_whose_windows_vllm_would_leave_out_is_refused(folder: Path) -> None:
    file = folder / "policy" / "config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), **SOME_NARROW}))
    judge = str(folder / "policy")
    try:
        with pytest.raises(ConfigError, match=r"^genrms\[0\].engine: .* has windows in some layers"):
            check_engine_model(judge, "genrms[0]", "auto", 1)
        with pytest.raises(ConfigError, match=r"^rollout.engine: .* has windows in some layers"):
            check_engine_model(judge, "model", "vllm", 1)
        check_engine_model(judge, "genrms[0]", "transformers", 1)
        file.write_text(json.dumps({**json.loads(before), **SOME_NARROW, "rope_scaling": {"type": "yarn"}}))
        check_engine_model(judge, "genrms[0]", "vllm", 1)  # nothing that can be told here
    finally:
        file.write_text(before)


def run_file(folder: Path) -> Path:
    run = folder / "run.yaml"
    run.write_text(
        f"run: {{dir: {folder}/run}}\ndata: {{train_files: [{folder}/train.jsonl], max_prompt_tokens: 8}}\n"
        f"model: {{path: {folder}/policy}}\noptimizer: {{lr: 0.001}}\n"
        "launch: {nodes: 1, gpus_per_node: 8}\n"
        "rollout: {n: 2, max_response_tokens: 8}\nrewards: [{name: r, path: 'builtin:exact'}]\n"
        "trainer: {total_iterations: 1, train_batch_size: 2, mini_batch_size: 2}\n"
    )
    return run


NARROW = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 4, "num_key_value_heads": 2}
LISTED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("mistral", {}), ("mistral", {"sliding_window": None}), ("mistral", {"sliding_window": 7}),
        ("mistral", {"sliding_window": 7, "layer_types": LISTED, "head_dim": 16, "rope_theta": 1e4}),
        ("mixtral", {}), ("mixtral", {"sliding_window": 7}),
        ("qwen2", NARROW), ("qwen2", NARROW | {"max_window_layers": 1}),
        ("qwen2", NARROW | {"use_sliding_window": False, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3", NARROW | {"layer_types": LISTED}), ("qwen3", NARROW | {"sliding_window": None}),
        ("qwen3", NARROW | {"max_window_layers": 4}), ("qwen3", NARROW | {"max_window_layers": 0}),
        ("qwen2_moe", NARROW), ("qwen2_moe", NARROW | {"max_window_layers": 2}),
        ("qwen2_moe", NARROW | {"layer_types": LISTED}),
        ("qwen3_moe", NARROW), ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 7}),
    ],
)  # fmt: skip
def test_windows_are_those_of_the_layers_that_transformers_builds(
    tmp_path: Path, kind: str, values: dict
) -> None:
    """Of each layer of a model, whose first query that sees less than all is after the window."""
    sizes = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2}
    sizes |= EXPERTS if kind.endswith("_moe") else {}
    folder = written(tmp_path, model_type=kind, **{**sizes, **values})
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = read_model(folder).shape
    assert shape == model_of({**config.to_dict(), "model_type": kind}).shape and shape.is_regular
    attentions = [layer.self_attn for layer in model.model.layers]
    if type(model).__name__ in ("MistralForCausalLM", "MixtralForCausalLM"):
        assert shape.windows == (config.sliding_window or 0,) * 4
    else:
        assert shape.windows == tuple(getattr(each, "sliding_window", 0) or 0 for each in attentions)


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("llama", {"sliding_window": 7}, "sliding_window=7, which the trainer cannot do for llama; it needs"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window=True, which the trainer cannot do"),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "it needs 'full_attention' in every layer"),
        (
            "mistral",
            {"layer_types": LISTED[:2], "sliding_window": None},
            "but no window; write sliding_window",
        ),
        ("mixtral", {"layer_types": ["sliding_attention"] * 2}, "'full_attention' in every layer, as"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1, which the trainer cannot do"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9, more than the 8 experts"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 2}, "'full_attention' in every layer, as"),
    ],
)
def test_windows_that_engines_would_read_otherwise_are_refused(
    tmp_path: Path, kind: str, values: dict, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        read_model(written(tmp_path, model_type=kind, num_key_value_heads=2, **SIZES, **values))


def test_a_refused_model_has_key_and_file_as_values(tmp_path: Path) -> None:
    """Readers of a config.json know no folder; another key may name it."""
    for values, file, says in (
        ({"num_hidden_layers": "2"}, tmp_path / "config.json", "says num_hidden_layers='2'; it needs"),
        ({"model_type": "bert"}, tmp_path, "architecture 'bert' is not supported; use one of"),
    ):
        folder = written(tmp_path, **{"model_type": "qwen3"} | values)
        for key in ("model.path", "critic.path"):
            with pytest.raises(ConfigError) as caught:
                model_of_run(ModelSection(path=folder), key=key)
            (found,) = caught.value.findings
            assert (found.key, found.file) == (key, str(file)) and found.says.startswith(says)
            colon = "" if file.name == "config.json" else ":"
            assert str(caught.value).startswith(f"{key}: {file}{colon} {says}")
