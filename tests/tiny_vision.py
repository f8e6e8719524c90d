"""Tiny random vision-language models with tokenizer and processor, made on the spot.

A head has 32 elements, the least that vLLM's attention on CPU takes.
"""

import json
import random
from pathlib import Path
from typing import Any

from tests.tiny_models import VISION_CHAT, VISION_TOKENS, VOCAB_SIZE, make_tokenizer
from tests.tiny_processors import MEAN, STD, write_processor
from yatt.adapters.node_local.prepared_media import as_tiles, noise_picture, with_frames
from yatt.models.pictures.probe import ProbeTokens, probe_media
from yatt.models.pictures.tiles import TileTokens
from yatt.models.pictures.tokens import picture_tokens, pixel_scale

IDS = {
    "vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6,
}  # fmt: skip
IDS_OF_GLM = {
    "image_start_token_id": 3, "image_end_token_id": 4, "image_token_id": 5, "video_token_id": 6,
    "video_start_token_id": 7, "video_end_token_id": 8,
}  # fmt: skip
_GLM_TOKENS = [
    "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>", "<|begin_of_video|>",
    "<|end_of_video|>",
]  # fmt: skip
_QWEN_TOKENS, _QWEN_WRITTEN = [*VISION_TOKENS, "<|video_pad|>"], "<|vision_start|><|image_pad|><|vision_end|>"
_TOKENS = {
    "glm4v_moe": (_GLM_TOKENS, "<|begin_of_image|><|image|><|end_of_image|>"),
    "internvl": (["<img>", "</img>", "<IMG_CONTEXT>", "<video>"], "<IMG_CONTEXT>"),
}
"""Special tokens of the other families, and what their templates write for a picture."""
KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe", "internvl")
_TEXT = {
    "vocab_size": VOCAB_SIZE, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
_VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "spatial_merge_size": 2, "in_channels": 3,
    "temporal_patch_size": 2,
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1],
    "norm_topk_prob": True,
}  # fmt: skip


def config_of(kind: str) -> Any:
    """transformers' config of a tiny model."""
    import transformers

    def rope(sections: list[int], **more: Any) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}

    if kind.startswith("internvl"):
        return _config_of_intern(transformers, has_experts=kind == "internvl_moe")
    if kind == "qwen2_5_vl":
        text = _TEXT | {"hidden_size": 128, "rope_parameters": rope([4, 6, 6])}
        vision = {
            "depth": 2, "patch_size": 14, "out_hidden_size": 128, "window_size": 56,
            "fullatt_block_indexes": [1],
        }  # fmt: skip
        make = transformers.Qwen2_5_VLConfig
    elif kind == "glm4v_moe":
        text = _TEXT | {
            "hidden_size": 64, "head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "attention_bias": True,
            "use_qk_norm": False,            "rope_parameters": rope([2, 3, 3], partial_rotary_factor=0.5),
        }  # fmt: skip
        vision = {"depth": 2, "patch_size": 14, "out_hidden_size": 64, "image_size": 112}
        return transformers.Glm4vMoeConfig(
            text_config=text, vision_config=_VISION | vision, tie_word_embeddings=False, **IDS_OF_GLM
        )
    else:
        sections = rope([6, 5, 5], mrope_interleaved=True)
        text = _TEXT | {"hidden_size": 64, "head_dim": 32, "rope_parameters": sections}
        vision = {
            "depth": 3, "patch_size": 16, "out_hidden_size": 64, "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        }  # fmt: skip
        make = transformers.Qwen3VLConfig
        if kind == "qwen3_vl_moe":
            text |= _EXPERTS
            make = transformers.Qwen3VLMoeConfig
    return make(text_config=text, vision_config=_VISION | vision, tie_word_embeddings=False, **IDS)


def _config_of_intern(transformers: Any, *, has_experts: bool) -> Any:
    text = _TEXT | {"model_type": "qwen3", "hidden_size": 64, "head_dim": 32}
    if has_experts:
        text |= _EXPERTS | {"model_type": "qwen3_moe"}
    vision = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True,
    }  # fmt: skip
    return transformers.InternVLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=5,
        image_seq_length=4,
        tie_word_embeddings=False,
    )


def make_vision_model(folder: Path, kind: str, seed: int = 0) -> str:
    """A random model far from zero, so that mistakes show."""
    import torch
    import transformers

    family = {"qwen3_vl_moe": "qwen3_vl", "internvl_moe": "internvl"}.get(kind, kind)
    tokens, written = _TOKENS.get(family, (_QWEN_TOKENS, _QWEN_WRITTEN))
    make_tokenizer(folder, tokens, VISION_CHAT.replace(_QWEN_WRITTEN, written))
    if family == "internvl":
        _name_tokens(folder / "tokenizer_config.json")
    write_processor(folder, family)
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config_of(kind)).float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.05)
            elif "embed" not in name and "patch" not in name:
                tensor.mul_(3.0)
        model.get_input_embeddings().weight[0].normal_(0, 0.02)  # transformers leaves padding's at 0
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(torch.linspace(-0.2, 0.2, len(bias)))
    model.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        transpose_experts(folder / "model.safetensors")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return str(folder)


def _name_tokens(file: Path) -> None:
    """The names by which InternVL's processor finds its tokens."""
    keys = "start_image_token", "end_image_token", "context_image_token", "video_token"
    names = dict(zip(keys, _TOKENS["internvl"][0], strict=True))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": names}))


def transpose_experts(file: Path) -> None:
    """From transformers' way to the released one, and back: it saves experts the other way round."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})


def as_engines_read(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a folder with one for each matrix of an expert."""
    found = {}
    for name, tensor in tensors.items():
        layer, is_expert, leaf = name.partition(".experts.")
        if not is_expert or tensor.dim() != 3:
            found[name] = tensor
            continue
        leaves = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
        for number, block in enumerate(tensor):
            for own, matrix in zip(leaves, block.T.chunk(len(leaves)), strict=True):
                found[f"{layer}.experts.{number}.{own}.weight"] = matrix.contiguous()
    return found


def probe_rows(model: str) -> list[list[int]]:
    """Sequences of the sync probe: text, text, and one with a picture."""
    tokens = ProbeTokens(VOCAB_SIZE, picture_tokens(model))
    return tokens.sequences(random.Random(5), num_prompts=2, num_tokens=12, most=200)


def probe_of_transformers(model: Any, folder: str, ids: list[int], *, is_blind: bool = False) -> Any:
    """transformers' log-probs of a row of `probe_rows`; blind: a picture's tokens are text."""
    import torch

    from yatt.engine.vllm_pictures import frames_of
    from yatt.trainer.mcore.tower import normalised_pixels

    tokens, row = picture_tokens(folder), torch.tensor([ids])
    inputs: dict[str, Any] = {}
    if probe_media(ids, tokens) and not is_blind:
        noise = noise_picture(tokens)
        inputs = {"image_grid_thw": torch.tensor([noise.grid]), "mm_token_type_ids": (row == 5).int()}
        if isinstance(tokens, TileTokens):
            pixels = torch.from_numpy(as_tiles(noise)).float() * pixel_scale(folder).factor
            mean, deviation = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
            inputs = {"pixel_values": (pixels - mean) / deviation}
        else:
            patches = torch.from_numpy(with_frames(noise, frames_of(folder)))
            inputs["pixel_values"] = normalised_pixels(patches, pixel_scale(folder))
    if is_blind:
        row = torch.where(row == 5, 60, row)
    with torch.no_grad():
        logits = model(input_ids=row, attention_mask=torch.ones_like(row), **inputs).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
