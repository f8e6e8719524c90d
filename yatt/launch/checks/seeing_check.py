"""Checks that who is to see pictures can, before anything starts: a GenRM, and a policy its environment's."""

from collections.abc import Iterator
from pathlib import Path

from yatt.adapters.files.patience import is_passing
from yatt.adapters.inputs.data_rows import Row, has_column
from yatt.adapters.inputs.encoded_prompt import encode_question
from yatt.adapters.inputs.media_head import MediaRefused, head_by_parts
from yatt.adapters.inputs.text_parts import PICTURE, TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.schema import GenRMSection, RunConfig
from yatt.errors import ConfigError
from yatt.judging.template import Shown, render_with_pictures
from yatt.media.fetch import MediaSources
from yatt.models.folder import missing_config, takes_pictures
from yatt.models.pictures.tokens import picture_tokens, unlimited_tokens
from yatt.records.episode import IMAGE_MARK, MediaRef
from yatt.records.media import MediaItem


def refuse_blind(config: RunConfig, genrm: GenRMSection, key: str) -> None:
    """Refuses a GenRM that is to see and cannot.

    Raises:
        ConfigError: its model or engine takes no pictures, or there are none. Whether a service takes some is
            known by its answer only (`yatt check --ask`).
    """
    if genrm.has_engine and not takes_pictures(genrm.model):
        raise ConfigError(
            f"{genrm.model} takes no pictures; name another model, or remove it.",
            key=f"{key}.sees",
            missing=missing_config(genrm.model),
        )
    if genrm.has_engine and genrm.engine == "transformers":
        raise ConfigError("engine transformers takes no pictures; write vllm.", key=f"{key}.sees")
    if not takes_pictures(config.model.path):
        raise ConfigError(
            f"the policy {config.model.path} takes text only, so prompts have no pictures; remove it.",
            key=f"{key}.sees",
            missing=missing_config(config.model.path),
        )


def seeing_notes(
    config: RunConfig, genrm: GenRMSection, key: str, tokenizer: Tokenizer, shortest: Shown
) -> list[str]:
    """Encodes a question with the largest picture; returns notes.

    Args:
        shortest: the shortest values that a template may show.

    Raises:
        ConfigError: the chat template leaves it out.
    """
    tokens = picture_tokens(genrm.model, config.media.min_pixels, config.media.max_pixels)
    shown = {**shortest, "prompt": IMAGE_MARK}
    refs = [MediaRef("", "", *tokens.largest_size)]
    rendered = render_with_pictures(genrm.template or "{completion}", shown, refs)
    parts = [PICTURE if isinstance(part, MediaRef) else TextPart(*part) for part in rendered]
    try:
        ids, _ = encode_question(parts, refs, tokens, tokenizer, is_chat=genrm.chat)
    except ValueError as error:
        raise ConfigError(
            f"the chat template of {genrm.model} does not show a picture ({error}); use the template of the "
            "model's own folder.",
            key=f"{key}.sees",
        ) from error
    if genrm.max_model_tokens and len(ids) >= genrm.max_model_tokens:
        return [
            f"{key}.max_model_tokens: a question with the largest picture has {len(ids)} tokens, and the "
            f"GenRM takes {genrm.max_model_tokens} with its answer. Write a smaller media.max_pixels."
        ]
    return []


def check_answer(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Encodes an answer of the environment, and one with a picture if there may be some.

    Raises:
        ConfigError: the chat template does not show it.
    """
    role, folder = config.environment.role, config.model.path
    tokenizer.encode_answer(role, "an answer")
    if not config.environment.images:
        return
    ids = tokenizer.encode_answer(role, [TextPart("an answer", False), PICTURE])
    if ids.count(unlimited_tokens(folder).image_token_id) != 1:
        raise ConfigError(
            f"the chat template of {folder} shows no picture in a message of the role {role}; write another "
            "role.",
            key="environment.role",
        )


SHOWN_PICTURES = 3


class PictureHeads:
    """Looks at the head of every picture of data files."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._sources: MediaSources | None = None
        self._first: list[str] = []
        self._num_changed = 0
        self._has_column = False

    def look(self, row: Row, place: str) -> None:
        """Notes the pictures of a row that cannot be used.

        Raises:
            ConfigError: the run's engines take no pictures.
        """
        data = self._config.data
        self._has_column |= not row.raw.keys().isdisjoint((data.image_key, data.video_key))
        if any(ref.is_video for ref in row.media) and any(g.sees != "none" for g in self._config.genrms):
            raise ConfigError(f"{place} has videos, which a GenRM is not shown; remove genrms[].sees.")
        if row.media and self._config.rollout.engine == "transformers":
            raise ConfigError(
                f"{place} has pictures, which rollout.engine=transformers does not take; write vllm."
            )
        for fault in filter(None, map(self._fault, row.media)):
            self._num_changed += 1
            if len(self._first) < SHOWN_PICTURES:
                self._first.append(f"{place}: {fault}")

    def _fault(self, ref: MediaRef) -> str:
        """What has changed about a picture since its reference was made, by its head; empty: nothing."""
        name = ref.path or ref.sha256
        try:
            with self._opened().opened_source(MediaItem(ref.path, ref.sha256)) as source:
                if ref.is_video:
                    return ""  # a file of this kind is known by its digest only
                size = head_by_parts(source.read_at).shown_size
        except MediaRefused as error:
            return f"{name} {error}"
        except OSError as error:
            if is_passing(error):
                raise
            return f"{name} cannot be read ({error.strerror})"
        now, before = f"{size[0]} x {size[1]}", f"{ref.width} x {ref.height}"
        return "" if now == before else f"{name} has {now} pixels, and had {before}"

    def notes(self, files: tuple[str, ...]) -> Iterator[str]:
        """Tells of pictures that are not shown, and of a column that no row has.

        A text run reads only needed columns of parquet files: these are asked for their columns' names.
        """
        key, folder = self._config.data.image_key, self._config.model.path
        parquet = (Path(name) for name in files if name.endswith(".parquet"))
        keys = key, self._config.data.video_key
        is_there = self._has_column or any(has_column(path, keys) for path in parquet)
        if self._config.data.media_store or is_there is takes_pictures(folder):
            return
        named = ", ".join(files)
        if is_there:
            yield (
                f"{named}: rows have a column '{key}' (data.image_key), but {folder} takes text only: "
                "pictures are not shown."
            )
        else:
            yield (
                f"the model takes pictures, but no row of {named} has a column '{key}' (data.image_key): all "
                "prompts are text."
            )

    def _opened(self) -> MediaSources:
        data, media = self._config.data, self._config.media
        if self._sources is None:
            self._sources = MediaSources(
                data.media_root, data.media_store, media.storage_options, media.timeout_s
            )
        return self._sources

    def refuse_changed(self) -> None:
        """Refuses what was noted.

        Raises:
            ConfigError: some were.
        """
        if self._first:
            raise ConfigError(
                f"{self._num_changed} pictures are not what they were when the data was made; put them back, "
                "or remove the made file:\n  " + "\n  ".join(self._first)
            )
