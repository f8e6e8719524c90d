"""The process of `yatt sft`: ``python -m yatt.trainer.sft_main RESOLVED.yaml``."""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_as
from yatt.config.schema import DataSection
from yatt.config.sections.sft import VIDEOS, NewModel, SftConfig, sft_rules
from yatt.errors import ConfigError, YattError
from yatt.models.families import FAMILIES
from yatt.models.folder import decoder_config
from yatt.models.model import read_config
from yatt.trainer.sft import SftModel, SftSettings, sft_run_config, train_sft
from yatt.trainer.sft_rows import Example, read_examples


def main() -> int:
    """Trains; returns the exit code."""
    try:
        train_model(load_as(SftConfig, [Path(sys.argv[1])], [], sft_rules))
    except YattError as error:
        sys.stderr.write(f"yatt sft: {error}\n")
        return error.exit_code
    return 0


def train_model(config: SftConfig) -> None:
    """Trains a model and writes it to the folder `config.output`."""
    output = Path(config.output)
    if not config.start:
        write_character_tokenizer(config.new.characters, output)
    tokenizer = Tokenizer(config.start or config.output)
    folder = config.start or config.output
    limit = longest_sequence(config)
    prepared = config.prepared_folder
    settings = SftSettings(
        max_steps=config.max_steps,
        lr=config.lr,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        seed=config.seed,
        threads=config.threads,
        vision=config.vision,
        prepared=prepared,
    )
    data = DataSection(
        train_files=(config.train_file,),
        image_key=config.image_key,
        video_key=VIDEOS,
        media_store=config.media_store,
    )
    seeing = replace(sft_run_config(folder, settings), data=data, media=config.media) if prepared else None
    examples = read_examples(Path(config.train_file), tokenizer, folder, limit, seeing)
    file = config.validation.file
    held_out = read_examples(Path(file), tokenizer, folder, limit, seeing) if file else []
    evaluation = Evaluation(config, held_out[: config.validation.max_prompts])
    start = config.start or new_config(config.new)
    result = train_sft(start, shuffled_batches(examples, config), output, settings, evaluation)
    sys.stdout.write(f"{output}: {result.num_steps} steps, loss {result.loss:.4f}, {evaluation.said}\n")


class Evaluation:
    """Evaluates the model at regular steps; returns True once it is good enough."""

    def __init__(self, config: SftConfig, held_out: list[Example]) -> None:
        self._config, self._held_out = config, held_out
        self._began_s = time.monotonic()
        self.said = "no held-out rows"

    def __call__(self, step: int, loss: float, student: SftModel) -> bool:
        section = self._config.validation
        if not self._held_out or step % section.every:
            return False
        exact = self._num_exact(step, student)
        share = exact / len(self._held_out)
        self.said = f"{share:.3f} of held-out completions exact"
        seconds = time.monotonic() - self._began_s
        sys.stdout.write(f"step {step}  loss {loss:.4f}  {self.said}  {seconds:.0f} s\n")
        sys.stdout.flush()
        return share >= section.stop_at

    def _num_exact(self, step: int, student: SftModel) -> int:
        longest = max(len(each.completion) for each in self._held_out)
        temperature = self._config.validation.temperature
        sampled = student.complete(self._held_out, longest, temperature=temperature, seed=step)
        right = (each.completion for each in self._held_out)
        return sum(ids[: len(wanted)] == wanted for ids, wanted in zip(sampled, right, strict=True))


def longest_sequence(config: SftConfig) -> int:
    """Returns the model's context length in tokens; 0 if its config does not have it.

    Raises:
        ConfigError: the folder to start from has no readable config.json.
    """
    if not config.start:
        return config.new.max_position_embeddings
    limit = decoder_config(read_config(config.start)).get("max_position_embeddings", 0)
    return limit if type(limit) is int else 0


def shuffled_batches(examples: list[Example], config: SftConfig) -> Iterator[list[Example]]:
    """Yields batches without end; every row is used once before any row is repeated."""
    draw = random.Random(f"sft/{config.seed}")
    waiting: list[Example] = []
    while True:
        while len(waiting) < config.batch_size:
            fresh = list(examples)
            draw.shuffle(fresh)
            waiting += fresh
        yield waiting[: config.batch_size]
        waiting = waiting[config.batch_size :]


def new_config(new: NewModel) -> Any:
    """Returns the transformers config of a new model.

    Raises:
        ConfigError: an unknown model type.
    """
    import transformers

    if new.model_type not in FAMILIES:
        raise ConfigError(f"new.model_type: '{new.model_type}' is not one of {', '.join(sorted(FAMILIES))}.")
    end = len(new.characters) - 1
    return transformers.AutoConfig.for_model(
        new.model_type,
        vocab_size=len(new.characters),
        hidden_size=new.hidden_size,
        intermediate_size=new.intermediate_size,
        num_hidden_layers=new.num_hidden_layers,
        num_attention_heads=new.num_attention_heads,
        num_key_value_heads=new.num_key_value_heads,
        head_dim=new.head_dim,
        max_position_embeddings=new.max_position_embeddings,
        rope_theta=new.rope_theta,
        tie_word_embeddings=new.tie_word_embeddings,
        architectures=[FAMILIES[new.model_type].architecture],
        initializer_range=new.initializer_range,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )


def write_character_tokenizer(characters: str, folder: Path) -> None:
    """Writes a tokenizer with one token per character; the last character ends a completion."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {character: index for index, character in enumerate(characters)}
    fast = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=characters[-1]))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens([characters[-1]])
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": characters[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
