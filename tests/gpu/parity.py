"""The trainer against transformers, family by family, on this device: log-probs in float32 and bfloat16.

    python -m tests.gpu.parity [--toy] [--only CASE ...] --out FOLDER

float32 must agree within 1e-4. bfloat16 has no right answer: our distance from the float32 answer must not
be more than twice that of transformers.
"""

from pathlib import Path

from tests.gpu.cases import Benchmark, Case, Place, Row
from tests.gpu.rank import Rank

EXACT, MOST_RATIO = 1e-4, 2.0
SIZES = {
    "vocab_size": 62, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "eos_token_id": 2,
}  # fmt: skip


KINDS = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 128}}
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LARGE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16}


def cases(is_toy: bool) -> list[Case]:
    """Each architecture with its own and with tied output weights; of the toy ones, one each."""
    return [
        Case(f"{kind}-{'tied' if tied else 'untied'}", {"kind": kind, "tied": tied})
        for number, kind in enumerate(KINDS)
        for tied in (True, False)
        if not is_toy or tied == bool(number % 2)
    ]


def measure(settings: Row, place: Place) -> Row:
    """Compares one architecture."""
    import transformers

    kind = settings["kind"]
    more = KINDS[kind] if not place.is_toy else {}
    sizes = {**SIZES, **(TOY if place.is_toy else LARGE), **more, "tie_word_embeddings": settings["tied"]}
    if place.is_toy and kind == "qwen3":
        sizes["head_dim"] = 16
    config = transformers.AutoConfig.for_model(kind, **sizes)
    row = compare(place.work / f"{kind}-{settings['tied']}", config)
    limit = MOST_RATIO * row["bfloat16_mean_of_transformers"]
    if row["float32_most"] > EXACT or row["bfloat16_mean"] > limit:
        row["failed"] = f"not equal: more than {EXACT:g} in float32, or {MOST_RATIO:g} times their noise"
    return row


def compare(folder: Path, config) -> Row:
    """Mean and largest difference of log-probs."""
    import torch
    import transformers

    from tests.tiny_models import make_tokenizer

    folder.mkdir()
    make_tokenizer(folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (0.5 / config.hidden_size**0.5))
            if weight.ndim == 1:
                weight.add_(1.0)
    model.save_pretrained(folder)
    probe = [[(7 * row + 3 * at) % 59 + 3 for at in range(40 + 9 * row)] for row in range(4)]
    theirs = {dtype: _theirs(model, probe, dtype) for dtype in ("float32", "bfloat16")}
    ours = {
        dtype: torch.tensor([x for row in Rank(folder, dtype).publish(folder / dtype, probe) for x in row])
        for dtype in ("float32", "bfloat16")
    }
    exact = (ours["float32"] - theirs["float32"]).abs().max().item()
    noise = {
        name: (given["bfloat16"] - theirs["float32"]).abs().mean().item()
        for name, given in (("ours", ours), ("theirs", theirs))
    }
    return {
        "float32_most": exact, "bfloat16_mean": noise["ours"],
        "bfloat16_mean_of_transformers": noise["theirs"],
    }  # fmt: skip


def _theirs(model, probe: list[list[int]], dtype: str):
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device, getattr(torch, dtype)).eval()
    rows = []
    for ids in probe:
        with torch.no_grad():
            logits = model(torch.tensor([ids], device=device)).logits[0, :-1].float().log_softmax(-1)
        rows.append(logits.gather(1, torch.tensor(ids[1:], device=device)[:, None])[:, 0].cpu())
    model.float()
    return torch.cat(rows)


if __name__ == "__main__":
    Benchmark("parity", __doc__, cases, measure).main()
