"""Folders with a tiny processor of each family, as a model's folder has them; made offline."""

import json
from pathlib import Path

FAMILIES = {
    "qwen2_5_vl": ("Qwen2VLImageProcessor", 14, {"shortest_edge": 28 * 28, "longest_edge": 224 * 224}),
    "qwen3_vl": ("Qwen2VLImageProcessor", 16, {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}),
    "glm4v_moe": ("Glm4vImageProcessor", 14, {"shortest_edge": 56 * 56, "longest_edge": 2 * 224 * 224}),
    "internvl": ("GotOcr2ImageProcessor", 14, {"height": 56, "width": 56}),
}
"""Class of the processor, side of a patch, and limits of a picture's pixels; GLM's are of two frames, and
InternVL's the sides of a tile."""

_MARKS = {"glm4v_moe": ("image_start_token_id", "image_end_token_id")}
_TILES = {"crop_to_patches": True, "min_patches": 1, "max_patches": 4}
_AROUND = [{"id": number, "content": name} for number, name in ((3, "<img>"), (4, "</img>"))]

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def write_processor(folder: Path, family: str = "qwen3_vl", **changes: object) -> Path:
    """Writes preprocessor_config.json of a family, and the keys of config.json that go with it; returns the
    folder."""
    kind, patch, size = FAMILIES[family]
    settings = {
        "image_processor_type": kind, "patch_size": patch, "merge_size": 2, "temporal_patch_size": 2,
        "size": size, "image_mean": MEAN, "image_std": STD, "resample": 3, "do_convert_rgb": True,
        "do_normalize": True, "do_rescale": True, "do_resize": True, "rescale_factor": 1 / 255, **changes,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    vision: dict[str, object] = {}
    if family == "internvl":
        for key in ("patch_size", "merge_size", "temporal_patch_size"):
            settings.pop(key, None)
        settings, vision = _TILES | settings, {"image_size": [56, 56], "patch_size": [14, 14]}
        if not (folder / "tokenizer.json").exists():
            (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": _AROUND}))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if family == "qwen3_vl":
        write_video_processor(folder, settings)
    begin, end = _MARKS.get(family, ("vision_start_token_id", "vision_end_token_id"))
    config = {"model_type": family, "vision_config": vision, begin: 3, end: 4, "image_token_id": 5}
    (folder / "config.json").write_text(json.dumps(config | {"video_token_id": 6}))
    return folder


def write_video_processor(folder: Path, settings: dict[str, object], **changes: object) -> None:
    """Writes video_preprocessor_config.json, with what is the same for pictures."""
    own = {
        "video_processor_type": "Qwen3VLVideoProcessor", "cap_pixels_per_frame": False,
        "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 4 * 128 * 128},
    }  # fmt: skip
    shared = {key: value for key, value in settings.items() if key != "image_processor_type"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(shared | own | changes))
