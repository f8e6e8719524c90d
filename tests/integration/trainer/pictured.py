"""Samples with pictures, their prepared files, and what transformers says of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from yatt.records import message as m

SIZES = {"first": (112, 84), "second": (56, 140), "third": (64, 96)}
SHOWN = ((), ("first", "second"), ("third",), ("first",))
"""Pictures of the prompt groups, in turn."""

BEGIN, PAD, END, OTHER = 3, 5, 4, 60
"""Tokens around and for pictures; samples have the second one as text too. `OTHER` is a token of text."""


class Placed(NamedTuple):
    """A picture: grid, tokens, the digest of its file and of its prepared file."""

    grid: tuple[int, int, int]
    num_tokens: int
    sha256: str
    digest: str


def picture(name: str) -> Any:
    """A picture of noise."""
    import numpy as np
    from PIL import Image

    width, height = SIZES[name]
    draw = np.random.default_rng(len(name))
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def prepare_pictures(folder: Path, model: str) -> str:
    """Writes the prepared files of all pictures, as a model's media process does; returns the folder."""
    from yatt.adapters.node_local.media_file import media_digest
    from yatt.media.kept import KeptFiles
    from yatt.media.prepare import load_preparation
    from yatt.models.pictures.tokens import picture_tokens

    preparation, tokens, table = load_preparation(Path(model)), picture_tokens(model), {}
    files = KeptFiles(folder, 1 << 24)
    with files.order(1):
        for name, size in SIZES.items():
            grid, patches = preparation.patches_of(picture(name))
            assert grid == tokens.grid_of(*size)
            digest = media_digest(name, preparation.digest)
            with files.claimed_file(1, digest):
                files.keep_file(1, digest, grid, patches)
            table[name] = Placed(grid, tokens.placeholder_ids(grid).count(PAD), name, digest)
    (folder / "table.json").write_text(json.dumps(table))
    return str(folder)


def pictures_in(folder: Path) -> dict[str, Placed]:
    """What `prepare_pictures` wrote."""
    table = json.loads((folder / "table.json").read_text())
    return {name: Placed(tuple(grid), *rest) for name, (grid, *rest) in table.items()}


def with_pictures(
    facts: Sequence[m.SampleFact], rollouts: Sequence[m.Rollout], table: dict[str, Placed]
) -> tuple[tuple[m.SampleFact, ...], tuple[m.Rollout, ...]]:
    """Samples with pictures after the first token of their prompts."""
    found_facts, found_rollouts = [], []
    for fact, rollout in zip(facts, rollouts, strict=True):
        prompt, *turns = rollout.turns
        ids, media = m.unpack_ids(prompt.token_ids), list[m.PlacedMedia]()
        first, rest = ids[:1], ids[1:]
        for name in SHOWN[fact.prompt_group % len(SHOWN)]:
            each = table[name]
            ref = m.MediaRef(f"{name}.png", each.sha256, *SIZES[name])
            media.append(m.PlacedMedia(ref, len(first) + 1, each.num_tokens, each.grid))
            first += [BEGIN, *[PAD] * each.num_tokens, END]
        prompt = m.Turn(m.pack_ids([*first, *rest]), media=tuple(media))
        found_facts.append(msgspec.structs.replace(fact, num_prompt_tokens=len(first) + len(rest)))
        found_rollouts.append(msgspec.structs.replace(rollout, turns=(prompt, *turns)))
    return tuple(found_facts), tuple(found_rollouts)


def see_pictures(worker: Any, order: m.Train, folder: Path) -> None:
    """Has the first rank of a model copy compute features, one of them twice and one first missing."""
    names = sorted({
        each.ref.sha256 for rollout in order.rollouts for turn in rollout.turns for each in turn.media
    })  # fmt: skip
    table = pictures_in(folder)
    asked = tuple(m.PreparedPicture(name, table[name].digest) for name in names)
    if not asked:
        return
    lacking = (*asked[:1], m.PreparedPicture("none", "0" * 64))
    common = {"iteration": order.iteration, "folder": str(folder)}
    assert worker.handle(m.SeePictures(pictures=lacking, **common)) == m.PicturesSeen(missing=(1,))
    assert worker.handle(m.SeePictures(pictures=asked, **common)) == m.PicturesSeen()


def transformers_logprobs(folder: Path) -> tuple[Any, Callable[[Any, m.Rollout], torch.Tensor]]:
    """A model of transformers, and what computes the log-probs of a sample's completion with it."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None  # in the samples it is a token like any other
    return model, PicturedLogprobs(AutoImageProcessor.from_pretrained(folder))


def processed(processor: Any, pictures: Sequence[Any]) -> dict[str, Any]:
    """What a model of transformers takes of pictures, by its own processor."""
    made = dict(processor(images=list(pictures), return_tensors="pt"))
    made.pop("num_patches", None)  # of tiles: for who writes the prompt
    return made


class PicturedLogprobs:
    """Log-probs of the sampled tokens by transformers, whose processor prepares the pictures.

    Args:
        processor: of the model.
        temperature: of the sampler.
    """

    def __init__(self, processor: Any, temperature: float = 0.8) -> None:
        self._processor, self._temperature = processor, temperature

    def __call__(self, model: Any, rollout: m.Rollout) -> torch.Tensor:
        prompt, said = (m.unpack_ids(turn.token_ids) for turn in rollout.turns)
        ids = torch.tensor([[*prompt, *said]])
        types = torch.zeros_like(ids, dtype=torch.int)
        inputs: dict[str, Any] = {}
        for each in rollout.turns[0].media:
            types[0, each.start : each.start + each.num_tokens] = 1
        if rollout.turns[0].media:
            names = [each.ref.sha256 for each in rollout.turns[0].media]
            inputs = processed(self._processor, [picture(name) for name in names])
        plain = model.model.get_placeholder_mask
        model.model.get_placeholder_mask = lambda given, *rest, **more: plain(
            torch.where((types == 0) & (given == PAD), OTHER, given), *rest, **more
        )
        try:
            more = {"mm_token_type_ids": types} if hasattr(model.model, "get_rope_index") else {}
            logits = model(input_ids=ids, **more, **inputs).logits[0]
        finally:
            model.model.get_placeholder_mask = plain
        rows = (logits[len(prompt) - 1 : -1].float() / self._temperature).log_softmax(-1)
        return rows.gather(1, ids[0, len(prompt) :, None])[:, 0]
