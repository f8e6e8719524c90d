"""The task of `make vision-demo`: pictures of coloured squares, whose number is the answer.

    python tools/squares.py FOLDER

writes pictures, rows for both models and for the run, and two untrained models of Qwen3-VL's kind.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE, CELL, MOST = 64, 16, 6
COLOURS = ((220, 40, 40), (40, 180, 60), (50, 80, 230), (230, 200, 40))
CHARACTERS = "0123456789?YN+=."
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
NUM_TEACHING, NUM_TRAIN, NUM_VAL = 2500, 640, 256


def main() -> None:
    """Writes what is not there yet."""
    folder = Path(sys.argv[1])
    if (folder / "done").exists():
        return
    rows = [made_picture(folder, number) for number in range(NUM_TEACHING + NUM_TRAIN + NUM_VAL)]
    taught, trained, held_out = (
        rows[:NUM_TEACHING], rows[NUM_TEACHING:-NUM_VAL], rows[-NUM_VAL:],
    )  # fmt: skip
    for name, some in (("train", trained), ("val", held_out)):
        write_rows(folder / f"{name}.jsonl", [asked(*row) for row in some])
    for name, some in (("", taught), ("_val", held_out)):
        write_rows(folder / f"policy_sft{name}.jsonl", [asked(*row, completion=f"{row[1]}.") for row in some])
        judged = [each for number, row in enumerate(some) for each in verdicts_about(*row, number)]
        write_rows(folder / f"judge_sft{name}.jsonl", judged)
    Image.new("RGB", (SIDE, SIDE)).save(folder / "pictures" / "black.png")
    write_rows(folder / "val_blind.jsonl", [asked("black.png", count) for _, count in held_out])
    for seed, name in enumerate(("policy", "judge")):
        make_model(folder / f"new_{name}", seed)
    (folder / "done").touch()


def made_picture(folder: Path, number: int) -> tuple[str, int]:
    """Draws 1 to `MOST` squares on noise; returns the file's name and their number."""
    draw = random.Random(number)
    pixels = np.random.default_rng(number).integers(90, 120, (SIDE, SIDE, 3), dtype=np.uint8)
    count = draw.randint(1, MOST)
    for cell in draw.sample(range((SIDE // CELL) ** 2), count):
        row, column = (CELL * each for each in divmod(cell, SIDE // CELL))
        pixels[row + 2 : row + CELL - 2, column + 2 : column + CELL - 2] = draw.choice(COLOURS)
    name = f"{number:04d}.png"
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / "pictures" / name)
    return name, count


def asked(name: str, count: int, **more: str) -> dict[str, Any]:
    """A row: how many are there?"""
    return {"prompt": "<image>?", "images": [name], "ground_truth": str(count), **more}


def verdicts_about(name: str, count: int, number: int) -> list[dict[str, Any]]:
    """Rows about the right answer, a wrong number and any other text, as the GenRM is asked; it counts before
    its verdict. A policy finds each text that a judge has not seen and takes for right."""
    draw = random.Random(f"wrong/{number}")
    wrong = draw.choice([n for n in range(1, MOST + 1) if n != count])
    other = "".join(draw.choices(CHARACTERS[:-1], k=draw.randrange(3)))
    return [
        {"prompt": f"<image>{said}?", "images": [name], "completion": f"{count}{'NY'[said == str(count)]}."}
        for said in (str(count), str(wrong), other)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(folder: Path, seed: int) -> None:
    """Writes a random model with its processor, and a tokenizer with one token per character."""
    import tokenizers
    import torch
    import transformers

    vocab = {text: index for index, text in enumerate((*CHARACTERS, *SPECIAL))}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    fast.add_special_tokens([".", *SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "."}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    edge = SIDE * SIDE
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": edge, "longest_edge": edge},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, "rescale_factor": 1 / 255,
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    }))  # fmt: skip
    start, end, image, video = (vocab[text] for text in SPECIAL)
    torch.manual_seed(seed)
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": len(vocab), "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
            "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
            "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": vocab["."],
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2, "hidden_size": 96, "intermediate_size": 192, "num_heads": 3, "patch_size": 8,
            "spatial_merge_size": 2, "out_hidden_size": 96, "temporal_patch_size": 2, "in_channels": 3,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=False, vision_start_token_id=start, vision_end_token_id=end, image_token_id=image,
        video_token_id=video,
    )  # fmt: skip
    transformers.utils.logging.disable_progress_bar()
    transformers.AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab["."]}))


if __name__ == "__main__":
    main()
