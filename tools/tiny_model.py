"""Makes a small Qwen3 with random weights and a real tokenizer, to test a run file without a model.

    python tools/tiny_model.py FOLDER TEXT.jsonl [TEXT.jsonl ...]

trains a byte-level BPE on every text column of the JSONL files and writes a Hugging Face folder. The model
is untrained: a run with it shows that the setup works, but not that the policy learns.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

END, PAD = "<|im_end|>", "<|endoftext|>"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Writes tokenizer and model into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    vocab_size = make_tokenizer(arguments.folder, arguments.texts, arguments.vocab_size)
    parameters = make_model(
        arguments.folder, vocab_size=vocab_size, hidden_size=arguments.hidden_size,
        layers=arguments.layers, max_tokens=arguments.max_tokens, seed=arguments.seed,
    )  # fmt: skip
    print(f"{arguments.folder}: {parameters / 1e6:.1f} M parameters, {vocab_size} tokens")


def make_tokenizer(folder: Path, texts: list[Path], vocab_size: int) -> int:
    """Trains and writes a byte-level BPE with Qwen's special tokens; returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    fast.train_from_iterator(_columns(texts), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD,
        "chat_template": CHAT,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return fast.get_vocab_size()


def make_model(
    folder: Path, *, vocab_size: int, hidden_size: int, layers: int, max_tokens: int, seed: int
) -> int:
    """Writes the model; returns its number of parameters. The head size is 32, vLLM's minimum on CPU."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    heads = hidden_size // 32
    config = transformers.Qwen3Config(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
        head_dim=32, max_position_embeddings=max_tokens, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def _columns(texts: list[Path]) -> Iterator[str]:
    for path in texts:
        for line in path.read_text(encoding="utf-8").splitlines():
            yield from (value for value in json.loads(line).values() if isinstance(value, str))


if __name__ == "__main__":
    main()
