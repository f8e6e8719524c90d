"""Tiny random models and tokenizers, made on the spot; head_dim 32, the least vLLM's CPU attention takes."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from yatt.adapters.node_local.host_segment import (
    SegmentWriter,
    Stamp,
    aligned_size,
    segment_path,
    weight_plan_path,
)
from yatt.engine.weights.published import INDEX_NAME, PublicationIndex
from yatt.records import message as m

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 320


VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
VISION_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(folder: Path, more: Sequence[str] = (), chat: str = CHAT) -> None:
    """A byte-level BPE with Qwen's special tokens and a chat template, as `save_pretrained` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    chance = random.Random(0)
    sentence = "the model answers a question about numbers and text with one plus two is three"
    words = sentence.split(" ")
    corpus = [" ".join(chance.choice(words) for _ in range(12)) for _ in range(200)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL, *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(corpus, trainer)
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "chat_template": chat,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_scripted_model(folder: Path, **script: object) -> str:
    """What the scripted engine needs: a tokenizer, a config, a script."""
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": 2}))
    (folder / "scripted.json").write_text(json.dumps(script))
    return str(folder)


def make_seeing_scripted_model(folder: Path, **script: object) -> str:
    """As `make_scripted_model`, for a model that takes pictures as Qwen3-VL: 32 pixels a token's side."""
    make_tokenizer(folder, VISION_TOKENS, VISION_CHAT)
    ids = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5}
    config = {
        "model_type": "qwen3_vl",
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": 2,
        "vision_config": {},
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "scripted.json").write_text(json.dumps(script))
    return str(folder)


def make_qwen3(
    folder: Path, *, tied: bool, seed: int = 0, experts: int = 0, layers: int = 2, head: float = 0.08,
    kv_heads: int = 2,
) -> str:  # fmt: skip
    """A random Qwen3 (or Qwen3-MoE), weights far from zero so that mistakes show; `head` scales it."""
    import transformers

    make_tokenizer(folder)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
    }
    if experts:
        more = {"moe_intermediate_size": 64, "num_experts": experts, "num_experts_per_tok": 2}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **more))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    _randomize(model, seed=seed, head=head)
    model.save_pretrained(folder)
    return str(folder)


SIGMOID_MOE = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
OF_KIND = {
    "glm4_moe": {
        "num_key_value_heads": 2, "head_dim": 32, "use_qk_norm": True, "n_group": 1, "topk_group": 1,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 4, "topk_group": 2,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid",  # of released models; vLLM reads them
    },
}  # fmt: skip
OF_KIND["kimi_k2"] = {
    **OF_KIND["deepseek_v3"], "n_group": 1, "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 512,
        "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def make_sigmoid_moe(folder: Path, kind: str, *, seed: int = 0, layers: int = 2, **values: object) -> str:
    """A random GLM-4.5 or DeepSeek-V3; its routers' biases are not zero."""
    import transformers

    make_tokenizer(folder)
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": layers, "intermediate_size": 128,
        "num_attention_heads": 4, "max_position_embeddings": 512, "eos_token_id": 2,
    }  # fmt: skip
    more = {**sizes, **SIGMOID_MOE, **OF_KIND[kind], **values}
    config = transformers.AutoConfig.for_model(CLASSES_OF.get(kind, kind), **more)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    _randomize(model, seed=seed, head=0.08)
    model.save_pretrained(folder)
    name_kind(folder, kind)
    return str(folder)


WINDOWED = {
    "qwen3": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    "mistral": {
        "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mixtral": {"sliding_window": 9, "num_local_experts": 4},
    "olmo2": {"pad_token_id": None},
    "olmo3": {
        "pad_token_id": None, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 64, "attention_factor": 1.3,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "minimax_m2": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 12, "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
}  # fmt: skip


def make_windowed(folder: Path, kind: str, *, seed: int = 0, **values: object) -> str:
    """A random model with windows in all layers, or in the first of two (Mistral, OLMo-3), or with none
    (OLMo-2, MiniMax-M2)."""
    import transformers

    make_tokenizer(folder)
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "eos_token_id": 2,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **WINDOWED[kind], **values})
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    _randomize(model, seed=seed, head=0.08)
    model.save_pretrained(folder)
    return str(folder)


CLASSES_OF = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers has no classes for, and whose it has."""


def name_kind(folder: Path, kind: str) -> None:
    """Writes the model type into a saved model's config.json, as released models have it."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": kind}))


def reference_model(folder: str | Path) -> Any:
    """transformers' model of a folder."""
    import transformers

    values = json.loads((Path(folder) / "config.json").read_text())
    if (kind := values.pop("model_type")) not in CLASSES_OF:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = transformers.AutoConfig.for_model(CLASSES_OF[kind], **values)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config)


SMALL_SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64,
    "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 1024, "eos_token_id": 2,
}  # fmt: skip


def make_of_config(folder: Path, config: dict[str, Any], *, seed: int = 0) -> str:
    """A random model of the same family and features as one with this config.json, not quantised."""
    import transformers

    make_tokenizer(folder)
    kind = config.pop("model_type")
    dropped = ("quantization_config", "torch_dtype", "bos_token_id", "architectures")
    small = {key: value for key, value in config.items() if key not in dropped}
    small |= {
        key: value
        for key, value in SMALL_SIZES.items()
        if key in small or key in ("vocab_size", "eos_token_id")
    }
    if kind in OF_KIND:
        small |= SIGMOID_MOE | OF_KIND[kind]
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **small)
    ).float()
    _randomize(model, seed=seed, head=0.08)
    model.save_pretrained(folder)
    return str(folder)


def make_fp8(folder: Path, source: Path) -> str:
    """The model of `source` as DeepSeek-V3 is released: matrices of layers in FP8, with scales for blocks."""
    import torch
    from safetensors.torch import load_file, save_file

    make_tokenizer(folder)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    quantised = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            quantised[name] = tensor
            continue
        rows, columns = (-(-size // 128) for size in tensor.shape)
        padded = torch.nn.functional.pad(tensor, (0, -tensor.shape[1] % 128, 0, -tensor.shape[0] % 128))
        blocks = padded.view(rows, 128, columns, 128)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        scaled = (blocks / scales[:, None, :, None]).view_as(padded)[: tensor.shape[0], : tensor.shape[1]]
        quantised[name] = scaled.to(torch.float8_e4m3fn).contiguous()
        quantised[f"{name}_scale_inv"] = scales.contiguous()
    save_file(quantised, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that `save_pretrained` wrote, by name."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def make_phi3(folder: Path) -> str:
    """A random Phi-3 of three layers: a family that is not in the package."""
    import transformers

    make_tokenizer(folder)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "eos_token_id": 2,
    }
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes))
    _randomize(model, seed=0, head=0.08)
    model.save_pretrained(folder)
    return str(folder)


def _randomize(model: Any, *, seed: int, head: float) -> None:
    import torch

    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=chance)
            scale = head if name == "lm_head.weight" else 0.08
            weight.copy_(scale * noise if weight.ndim > 1 else 1 + 0.1 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.rand(buffer.shape, generator=chance))


def publish(folder: Path, *, model: str, policy_version: int, cuts: int = 1) -> str:
    """Publish a model folder's weights as a trainer does; a scripted model has none."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(model).glob("*.safetensors"))
    if not sources:
        write_publication(folder, [], policy_version, {})
        return str(folder)
    from safetensors.torch import load_file

    tensors = {name: tensor for source in sources for name, tensor in load_file(source).items()}
    return publish_tensors(folder, tensors, policy_version, cuts=cuts)


def publish_tensors(folder: Path, tensors: dict[str, Any], policy_version: int, *, cuts: int = 1) -> str:
    """Publish these tensors; the host copies of `cuts` ranks, each with some rows, are in the folder too."""
    from yatt.weights.checksum import box_sum

    folder.mkdir(parents=True, exist_ok=True)
    stems = [folder / f"host-{rank}" for rank in range(cuts)]
    for rank, stem in enumerate(stems):
        _write_host_copy(stem, rank, cuts, tensors, policy_version)
    sums = {name: box_sum(t, (0,) * t.dim(), tuple(t.shape)) for name, t in tensors.items()}
    write_publication(folder, stems, policy_version, sums)
    return str(folder)


def _write_host_copy(stem: Path, rank: int, cuts: int, tensors: dict[str, Any], policy_version: int) -> None:
    import torch

    from yatt.weights.checksum import dtype_name

    planned, parts, at = [], [], 0
    for name, tensor in tensors.items():
        rows = tensor.tensor_split(cuts)
        part = rows[rank].contiguous()
        if not part.numel():
            continue
        offset = (sum(len(each) for each in rows[:rank]), *(0 for _ in tensor.shape[1:]))
        box = m.WeightBox(offset=offset, shape=tuple(part.shape), at=at)
        planned.append(
            m.PlannedWeight(name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), boxes=(box,))
        )
        parts.append((at, part.view(-1).view(torch.uint8)))
        at += aligned_size(part.nbytes)
    plan = m.WeightPlan(rank=rank, weights=tuple(planned))
    weight_plan_path(stem).write_bytes(msgspec.msgpack.encode(plan))
    segment = SegmentWriter(segment_path(stem, "weights"), at)
    data = torch.frombuffer(segment.data, dtype=torch.uint8)
    for begin, part in parts:
        data[begin : begin + len(part)] = part
    segment.complete(Stamp(1, policy_version))


def write_publication(folder: Path, stems: list[Path], policy_version: int, sums: dict[str, int]) -> None:
    """The index, as a controller writes it."""
    index = PublicationIndex(
        policy_version=policy_version, attempt=1, stems=tuple(map(str, stems)), sums=sums
    )
    (folder / INDEX_NAME).write_bytes(msgspec.json.encode(index))
