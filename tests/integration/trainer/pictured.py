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

FILM, NUM_FRAMES, RATE, FILM_SIZE = "film", 7, 3.0, (70, 100)
SAMPLING = (2.0, 64, 4096, 32_768)
SHOWN_WITH_VIDEO = (*SHOWN[:2], ("third", FILM, "first"), (FILM,))
"""As `SHOWN`, for models that take videos: four of its frames are taken, which are two pairs."""

BEGIN, PAD, END, OTHER, VIDEO_PAD, TIME = 3, 5, 4, 60, 6, 61
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


def film() -> Any:
    """The frames of a video of noise."""
    import numpy as np

    width, height = FILM_SIZE
    return np.random.default_rng(7).integers(0, 256, (NUM_FRAMES, height, width, 3), dtype=np.uint8)


def prepare_pictures(folder: Path, model: str) -> str:
    """Writes the prepared files of all pictures, and of a video if the model takes some, as a model's media
    process does; returns the folder."""
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
        if "Qwen3" in json.loads(Path(model, "config.json").read_text())["architectures"][0]:
            table[FILM] = _prepare_film(files, model)
    (folder / "table.json").write_text(json.dumps(table))
    return str(folder)


def _prepare_film(files: Any, model: str) -> Placed:
    from yatt.adapters.node_local.media_file import media_digest
    from yatt.media.videos import VideoPreparation
    from yatt.models.pictures.videos import video_tokens

    preparation = VideoPreparation(video_tokens(model, *SAMPLING))
    taken = preparation.tokens.sampled_frames(NUM_FRAMES, RATE)
    grid = preparation.tokens.grid_of_video(*FILM_SIZE, len(taken))
    digest = media_digest(FILM, preparation.digest)
    with files.claimed_file(1, digest):
        frames = (film()[number] for number in taken)
        files.keep_file(1, digest, grid, preparation.patches_of_video(grid, frames, lambda: None))
    return Placed(grid, grid[1] * grid[2] // 4, FILM, digest)


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
        shown = SHOWN_WITH_VIDEO if FILM in table else SHOWN
        for name in shown[fact.prompt_group % len(shown)]:
            each = table[name]
            if name == FILM:
                first += _put_film(each, len(first), media)
                continue
            ref = m.MediaRef(f"{name}.png", each.sha256, *SIZES[name])
            media.append(m.PlacedMedia(ref, len(first) + 1, each.num_tokens, each.grid))
            first += [BEGIN, *[PAD] * each.num_tokens, END]
        prompt = m.Turn(m.pack_ids([*first, *rest]), media=tuple(media))
        found_facts.append(msgspec.structs.replace(fact, num_prompt_tokens=len(first) + len(rest)))
        found_rollouts.append(msgspec.structs.replace(rollout, turns=(prompt, *turns)))
    return tuple(found_facts), tuple(found_rollouts)


def _put_film(film: Placed, start: int, media: list[m.PlacedMedia]) -> list[int]:
    """The tokens of a video that begin at a place; notes its pairs of frames."""
    pairs, height, width = film.grid
    ref = m.MediaRef("film.mp4", film.sha256, *FILM_SIZE, NUM_FRAMES, RATE)
    found = [BEGIN]
    for part in range(pairs):
        found += [TIME, TIME + part, BEGIN]
        grid = 1, height, width
        place = start + len(found)
        media.append(m.PlacedMedia(ref, place, film.num_tokens, grid, part=part, num_parts=pairs))
        found += [*[VIDEO_PAD] * film.num_tokens, END]
    return [*found, END]


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
    return model, PicturedLogprobs(AutoImageProcessor.from_pretrained(folder), folder=folder)


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
        folder: of the model, for samples with a video.
    """

    def __init__(self, processor: Any, temperature: float = 0.8, folder: Path | str = "") -> None:
        self._processor, self._temperature, self._folder = processor, temperature, folder

    def __call__(self, model: Any, rollout: m.Rollout) -> torch.Tensor:
        prompt, said = (m.unpack_ids(turn.token_ids) for turn in rollout.turns)
        ids = torch.tensor([[*prompt, *said]])
        types = torch.zeros_like(ids, dtype=torch.int)
        inputs: dict[str, Any] = {}
        for each in rollout.turns[0].media:
            types[0, each.start : each.start + each.num_tokens] = 2 if each.ref.is_video else 1
        names = [each.ref.sha256 for each in rollout.turns[0].media if not each.ref.is_video]
        if names:
            inputs = processed(self._processor, [picture(name) for name in names])
        if (types == 2).any():
            inputs |= self._film()
        plain = model.model.get_placeholder_mask
        model.model.get_placeholder_mask = lambda given, *rest, **more: plain(
            torch.where((types == 0) & ((given == PAD) | (given == VIDEO_PAD)), OTHER, given), *rest, **more
        )
        try:
            more = {"mm_token_type_ids": types} if hasattr(model.model, "get_rope_index") else {}
            logits = model(input_ids=ids, **more, **inputs).logits[0]
        finally:
            model.model.get_placeholder_mask = plain
        rows = (logits[len(prompt) - 1 : -1].float() / self._temperature).log_softmax(-1)
        return rows.gather(1, ids[0, len(prompt) :, None])[:, 0]

    def _film(self) -> dict[str, Any]:
        """The video by transformers' processor, which takes frames itself."""
        from transformers.models.qwen3_vl import Qwen3VLVideoProcessor
        from transformers.video_utils import VideoMetadata

        processor = Qwen3VLVideoProcessor.from_pretrained(self._folder)
        made = processor(
            [film()], video_metadata=[VideoMetadata(total_num_frames=NUM_FRAMES, fps=RATE)], fps=SAMPLING[0],
            return_tensors="pt",
        )  # fmt: skip
        assert made["video_grid_thw"].tolist() == [[2, 6, 4]]
        return dict(made)
