"""vLLM with prepared pictures against transformers, which prepares them itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.contract.test_engine import options_for
from tests.integration.trainer.pictured import processed
from tests.packages import needs
from tests.tiny_models import publish_tensors, write_publication
from tests.tiny_vision import KINDS, make_vision_model, probe_of_transformers, probe_rows
from yatt.adapters.inputs.encoded_prompt import TimedVideos
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.node_local.media_file import media_digest
from yatt.core.samples.placeholders import with_placeholders
from yatt.engine.build import build_engine
from yatt.engine.protocol import Engine, EngineOptions
from yatt.engine.weights.published import INDEX_NAME, PublicationIndex
from yatt.errors import ConfigError, WorkerFailed
from yatt.media.kept import KeptFiles
from yatt.media.prepare import load_preparation
from yatt.media.videos import VideoPreparation
from yatt.models.pictures.tokens import picture_tokens
from yatt.models.pictures.videos import video_tokens
from yatt.records import message as m

pytestmark = needs("vllm")
PAD, TOLERANCE = 5, 5e-6
SAMPLING = (2.0, 64, 4096, 32_768)
SIZES = {"first": (112, 84), "second": (56, 140)}
FRAMES, RATE = 7, 3.0
VIDEO = m.MediaRef("film", "film", 70, 100, FRAMES, RATE)
"""Frames at a rate of which some are taken, as pairs of which the last has one frame twice."""


def picture(name: str) -> Image.Image:
    width, height = SIZES[name]
    draw = np.random.default_rng(len(name))
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


@dataclass(frozen=True)
class Scene:
    """A started engine, the same model in transformers, and prepared pictures."""

    engine: Engine
    options: EngineOptions
    model: Any
    processor: Any
    files: KeptFiles
    preparation: Any

    @property
    def takes_videos(self) -> bool:
        return "qwen3" in self.model.config.model_type

    def placed(self, *names: str) -> tuple[list[int], tuple[m.PlacedMedia, ...]]:
        """Ids of a prompt with these pictures, and their prepared files."""
        refs = [m.MediaRef(name, name, *SIZES[name]) for name in names]
        tokens = picture_tokens(self.options.model)
        ids = [40, *[token for _ in names for token in tokens.mark_ids], *range(60, 72)]
        expanded, media = with_placeholders(ids, refs, tokens)
        return expanded, tuple(self._prepared(each) for each in media)

    def placed_with_video(self) -> tuple[list[int], tuple[m.PlacedMedia, ...]]:
        """Ids of a prompt with a picture, a video and the picture again; and their prepared files."""
        tokenizer, taken = Tokenizer(self.options.model), video_tokens(self.options.model, *SAMPLING)
        refs = [m.MediaRef("first", "first", *SIZES["first"])] * 2
        ids = [40, 3, PAD, 4, 41, 3, 6, 4, 42, 43, 3, PAD, 4, *range(60, 72)]
        timed = TimedVideos(taken, tokenizer)
        expanded, media = with_placeholders(ids, [*refs, VIDEO], picture_tokens(self.options.model), timed)
        assert [each.part for each in media] == [0, 0, 1, 0], "two pairs of frames"
        return expanded, tuple(
            self._prepared_video(each) if each.ref.is_video else self._prepared(each) for each in media
        )

    def _prepared_video(self, media: m.PlacedMedia) -> m.PlacedMedia:
        preparation = VideoPreparation(video_tokens(self.options.model, *SAMPLING))
        digest = media_digest(media.ref.sha256, preparation.digest)
        with self.files.order(1), self.files.claimed_file(1, digest) as kept:
            if kept is None:
                taken = preparation.tokens.sampled_frames(FRAMES, RATE)
                frames = (film()[number] for number in taken)
                patches = preparation.patches_of_video(media.file_grid, frames, lambda: None)
                self.files.keep_file(1, digest, media.file_grid, patches)
        return msgspec.structs.replace(media, prepared=digest)

    def _prepared(self, media: m.PlacedMedia) -> m.PlacedMedia:
        digest = media_digest(media.ref.sha256, self.preparation.digest)
        with self.files.order(1), self.files.claimed_file(1, digest) as kept:
            if kept is None:
                grid, patches = self.preparation.patches_of(picture(media.ref.path))
                assert grid == media.grid, "a grid follows from the size"
                self.files.keep_file(1, digest, grid, patches)
        return msgspec.structs.replace(media, prepared=digest)

    def completed(self, ids: list[int], media: tuple[m.PlacedMedia, ...], **more: Any) -> m.Completed:
        asked = {
            "request_id": "0", "prompt_ids": m.pack_ids(ids), "seed": 3, "temperature": 1.0, "top_p": 1.0,
            "top_k": -1, "max_tokens": 10, "ignore_eos": True, "media": media,
        }  # fmt: skip
        self.engine.add(m.SampleRequest(**(asked | more)))
        while True:
            if found := self.engine.step():
                return found[0]

    def expected(self, prompt: list[int], completion: list[int], *names: str) -> torch.Tensor:
        """transformers' log-probs of a completion; its own processor prepares the pictures."""
        return _logprobs(self, torch.tensor([[*prompt, *completion]]), len(prompt), names)

    def difference(self, prompt: list[int], given: m.Completed, *names: str) -> float:
        expected = self.expected(prompt, m.unpack_ids(given.token_ids), *names)
        return float((torch.tensor(m.unpack_floats(given.logprobs)) - expected).abs().max())


def film() -> list[Any]:
    draw = np.random.default_rng(7)
    return list(draw.integers(0, 256, (FRAMES, VIDEO.height, VIDEO.width, 3), dtype=np.uint8))


def logprobs_with_video(scene: Scene, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """transformers' log-probs of a completion of `Scene.placed_with_video`; it samples frames itself."""
    from transformers.models.qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    ids = torch.tensor([[*prompt, *completion]])
    processor = Qwen3VLVideoProcessor.from_pretrained(scene.options.model)
    rate = VideoMetadata(total_num_frames=FRAMES, fps=RATE)
    made = processor([np.stack(film())], video_metadata=[rate], fps=SAMPLING[0], return_tensors="pt")
    pictures = scene.processor(images=[picture("first")] * 2, return_tensors="pt")
    types = (ids == PAD).int() + 2 * (ids == 6).int()
    types[0, len(prompt) :] = 0
    completed = torch.tensor(completion)
    assert not set(completion) & {PAD, 6}, "transformers takes those for pictures"
    with torch.no_grad():
        logits = scene.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, **pictures,
            pixel_values_videos=made["pixel_values_videos"], video_grid_thw=made["video_grid_thw"],
        ).logits  # fmt: skip
    rows = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return rows.gather(1, completed[:, None])[:, 0]


def _logprobs(scene: Scene, ids_1T: torch.Tensor, start: int, names: tuple[str, ...]) -> torch.Tensor:
    """Only the prompt's placeholders are pictures: the policy may sample the same token."""
    types = torch.zeros_like(ids_1T)
    types[0, :start] = (ids_1T[0, :start] == PAD).int()
    inputs: dict[str, Any] = {}
    if names:
        inputs = processed(scene.processor, [picture(name) for name in names])
        if hasattr(scene.model.model, "get_rope_index"):
            inputs["mm_token_type_ids"] = types
    plain = scene.model.model.get_placeholder_mask
    scene.model.model.get_placeholder_mask = lambda ids, *rest, **more: plain(
        torch.where((types == 0) & (ids == PAD), 60, ids), *rest, **more
    )
    try:
        with torch.no_grad():
            logits = scene.model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), **inputs).logits
    finally:
        scene.model.model.get_placeholder_mask = plain
    rows = logits[0, start - 1 : -1].float().log_softmax(-1)
    return rows.gather(1, ids_1T[0, start:, None])[:, 0]


@pytest.fixture(scope="module", params=KINDS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp(request.param)
    model = make_vision_model(folder / "model", request.param)
    options = options_for(
        model, deterministic=False, max_model_tokens=256, takes_pictures=True, most_pictures=4,
        media_folder=str(folder / "media"),
    )  # fmt: skip
    engine = build_engine("vllm", options)
    engine.start()
    yield Scene(
        engine=engine, options=options,
        model=AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval(),
        processor=AutoImageProcessor.from_pretrained(model), files=KeptFiles(folder / "media", 1 << 24),
        preparation=load_preparation(Path(model)),
    )  # fmt: skip
    engine.close()


@pytest.mark.parametrize("names", [(), ("first",), ("first", "second"), ("second", "second")])
def test_log_probs_are_those_of_transformers(scene: Scene, names: tuple[str, ...]) -> None:
    ids, media = scene.placed(*names)
    given = scene.completed(ids, media)
    assert scene.difference(ids, given, *names) <= TOLERANCE
    if names:
        blind = scene.expected(ids, m.unpack_ids(given.token_ids))
        assert float((torch.tensor(m.unpack_floats(given.logprobs)) - blind).abs().max()) > 1e-2, "it looks"


def test_log_probs_with_a_video_are_those_of_transformers(scene: Scene) -> None:
    """Each pair of frames is a picture for vLLM; its time is text. What takes time is an engine's start,
    which a whole run has too."""
    if not scene.takes_videos:
        with pytest.raises(ConfigError, match="videos are taken by models of the types qwen3_vl"):
            video_tokens(scene.options.model, *SAMPLING)
        return
    ids, media = scene.placed_with_video()
    given = scene.completed(ids, media)
    completion, found = m.unpack_ids(given.token_ids), torch.tensor(m.unpack_floats(given.logprobs))
    expected = logprobs_with_video(scene, ids, completion)
    assert float((found - expected).abs().max()) <= TOLERANCE
    first, pair, other, last = media
    turned = first, msgspec.structs.replace(pair, part=1), msgspec.structs.replace(other, part=0), last
    asked = m.pack_ids([*ids, *completion[:-1]])
    wrong = scene.completed(ids, turned, prompt_ids=asked, max_tokens=1, request_id="1")
    right = scene.completed(ids, media, prompt_ids=asked, max_tokens=1, request_id="2")
    assert m.unpack_floats(right.logprobs) != m.unpack_floats(wrong.logprobs), "it looks at their order"


def test_a_completion_that_goes_on_elsewhere_has_the_same_log_probs(scene: Scene) -> None:
    ids, media = scene.placed("first", "second")
    whole = scene.completed(ids, media)
    begun = [*ids, *m.unpack_ids(whole.token_ids)[:4]]
    rest = scene.completed(begun, media, request_id="1", seed=8, max_tokens=6)
    assert scene.difference(begun, rest, "first", "second") <= TOLERANCE


def test_pictures_in_another_order_are_another_prompt(scene: Scene) -> None:
    ids, _ = scene.placed("first", "second")
    other_ids, other = scene.placed("second", "first")
    assert len(ids) == len(other_ids)
    given = scene.completed(other_ids, other)
    assert scene.difference(other_ids, given, "second", "first") <= TOLERANCE
    completion = m.unpack_ids(given.token_ids)
    first, second = (scene.expected(i, completion, *names) for i, names in
                     ((ids, ("first", "second")), (other_ids, ("second", "first"))))  # fmt: skip
    assert float((first - second).abs().max()) > 1e-3


def test_a_hash_of_another_picture_would_give_its_features(scene: Scene) -> None:
    """A planted mistake: vLLM believes the hash, so it has to name file and preparation."""
    ids, media = scene.placed("first")
    scene.completed(ids, media)
    (scene_file,) = media
    digest = "e" * 64
    with scene.files.order(2), scene.files.claimed_file(2, digest):
        grid, patches = scene.preparation.patches_of(picture("first"))
        scene.files.keep_file(2, digest, grid, 255 - patches)
    inverted = msgspec.structs.replace(scene_file, prepared=digest)
    assert scene.difference(ids, scene.completed(ids, (inverted,)), "first") > 1e-2


def test_the_probe_of_a_weight_update_has_a_picture(scene: Scene) -> None:
    """The time is that of the engines' starts, which a whole run has too."""
    rows = probe_rows(scene.options.model)
    scores = scene.engine.score(rows)
    for row, score in zip(rows, scores, strict=True):
        expected = probe_of_transformers(scene.model, scene.options.model, row)
        assert float((torch.tensor(score) - expected).abs().max()) <= TOLERANCE
    blind = probe_of_transformers(scene.model, scene.options.model, rows[-1], is_blind=True)
    assert float((torch.tensor(scores[-1]) - blind).abs().max()) > 1e-2, "it looks"


def test_completions_of_a_prompt_share_its_pixels_as_long_as_one_has_them(scene: Scene) -> None:
    from yatt.engine.vllm_pictures import PictureInputs

    ids, media = scene.placed("second", "second")
    asked = m.SampleRequest(
        request_id="0", prompt_ids=m.pack_ids(ids), seed=3, temperature=1.0, top_p=1.0, top_k=-1,
        max_tokens=1, media=media,
    )  # fmt: skip
    inputs = PictureInputs(scene.options)
    first = inputs.input_of(asked, ids)
    (Path(scene.options.media_folder) / media[0].prepared).unlink()
    again = inputs.input_of(asked, ids)
    assert len({id(each) for one in (first, again) for each in one["mm_kwargs"]["image"]}) == 1
    del first, again
    with pytest.raises(WorkerFailed, match="a prepared picture cannot be read"):
        inputs.input_of(asked, ids)
    assert scene.placed("second")[1], "it is prepared again"


def test_an_engine_that_would_not_normalise_as_expected_is_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM only warns where its model's code cannot; another version may not say it at all."""
    from yatt.engine.vllm_pictures import ON_DEVICE, check_pictures

    llm = scene.engine._llm
    check_pictures(llm, scene.options)
    has_tiles = len(picture_tokens(scene.options.model).mark_ids) == 1
    for wrong in (True,) if has_tiles else (False, None):
        monkeypatch.setattr(llm.vllm_config.model_config.multimodal_config, ON_DEVICE, wrong)
        with pytest.raises(ConfigError, match="vLLM's code of this model takes no prepared pictures"):
            check_pictures(llm, scene.options)


def test_requests_that_this_engine_cannot_serve_are_refused(scene: Scene) -> None:
    """The time is that of two engines' starts, which a whole run has too."""
    ids, media = scene.placed("first")
    with pytest.raises(ValueError, match="has 5 pictures; this engine takes 4"):
        scene.completed(ids, media * 5)
    gone = msgspec.structs.replace(media[0], prepared="0" * 64)
    with pytest.raises(WorkerFailed, match="a prepared picture cannot be read"):
        scene.completed(ids, (gone,))


def test_a_new_tower_is_taken_compared_and_nothing_of_the_old_one_is_kept(
    scene: Scene, tmp_path: Path
) -> None:
    """Features of pictures are cached by hash, in three places: all of them are of the old weights. The time
    is that of two engines' starts, which a whole run has too."""
    ids, media = scene.placed("first", "second")
    scene.completed(ids, media)
    files = Path(scene.options.model).glob("*.safetensors")
    old = {name: tensor for file in files for name, tensor in load_file(file).items()}
    new = {
        name: tensor * 1.5 if _is_of_tower(name) and tensor.dim() == 1 else tensor
        for name, tensor in old.items()
    }
    folder = publish_tensors(tmp_path / "v7", new, 7)
    scene.engine.load_weights(7, folder)
    try:
        found = scene.engine.compare_weights(7, folder)
        assert found.differing == () and found.num_compared == found.num_readable > 30
        given = scene.completed(ids, media)
        assert scene.difference(ids, given, "first", "second") > 1e-3, "of the old tower"
        _scale_tower(scene.model, 1.5)
        assert scene.difference(ids, given, "first", "second") <= TOLERANCE
        _scale_tower(scene.model, 1 / 1.5)
        index = msgspec.json.decode((Path(folder) / INDEX_NAME).read_bytes(), type=PublicationIndex)
        tower = next(name for name, tensor in new.items() if _is_of_tower(name) and tensor.dim() == 1)
        stems = [Path(stem) for stem in index.stems]
        write_publication(Path(folder), stems, 7, index.sums | {tower: index.sums[tower] ^ 1})
        assert scene.engine.compare_weights(7, folder).differing == (tower,)
    finally:
        scene.engine.load_weights(8, publish_tensors(tmp_path / "v8", old, 8))
    assert scene.difference(ids, scene.completed(ids, media), "first", "second") <= TOLERANCE


def _scale_tower(model: Any, factor: float) -> None:
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if _is_of_tower(name) and tensor.dim() == 1:
                tensor.mul_(factor)


def _is_of_tower(name: str) -> bool:
    return "visual." in name or "vision_tower." in name
