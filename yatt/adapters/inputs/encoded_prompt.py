"""A data row's prompt as text and as token ids, with the placeholder tokens of its pictures and videos."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from yatt.adapters.inputs.dataset import Row, prompt_text
from yatt.adapters.inputs.text_parts import PICTURE, VIDEO, TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.schema import RunConfig
from yatt.core.samples.placeholders import PictureTokens, with_placeholders
from yatt.errors import ConfigError
from yatt.models.pictures.tokens import picture_tokens
from yatt.models.pictures.videos import VideoTokens, video_tokens
from yatt.records.episode import IMAGE_MARK, VIDEO_MARK, MediaRef, PlacedMedia

_PARTS = {IMAGE_MARK: PICTURE, VIDEO_MARK: VIDEO}


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt.

    Attributes:
        text: for people and functions: without the model's control tokens; a mark stands for a picture.
        ids: with one token for each feature of a picture.
        media: the places in `ids` of pictures, and of the pairs of frames of videos.
    """

    text: str
    ids: list[int]
    media: tuple[PlacedMedia, ...] = ()


@dataclass(frozen=True, slots=True)
class TimedVideos:
    """Videos as token ids: `TimedTokens` of a model's folder with its tokenizer."""

    tokens: VideoTokens
    tokenizer: Tokenizer

    @property
    def video_token_id(self) -> int:
        """See TimedTokens."""
        return self.tokens.video_token_id

    def grid_of_ref(self, ref: MediaRef) -> tuple[int, int, int]:
        """See TimedTokens."""
        return self.tokens.grid_of_ref(ref)

    def timed_ids(self, ref: MediaRef) -> list[list[int]]:
        """See TimedTokens."""
        return self.tokens.pair_ids(ref, self.tokenizer.encode_plain)


def encode_prompt(row: Row, tokenizer: Tokenizer, config: RunConfig) -> EncodedPrompt:
    """Encodes a row's prompt.

    Chat messages are rendered by the model's template; text in their contents never becomes a control token,
    nor a placeholder.

    Raises:
        ConfigError: the template refuses it, or the model does not take its pictures.
    """
    text = prompt_text(row.prompt)
    if not row.media:
        return EncodedPrompt(text, _text_ids(row, text, tokenizer, config))
    tokens = picture_tokens(config.model.path, config.media.min_pixels, config.media.max_pixels)
    timed = _timed_videos(tokenizer, config) if any(ref.is_video for ref in row.media) else None
    try:
        with_marks = _ids_with_marks(row, tokens, timed, tokenizer, config)
        ids, media = with_placeholders(with_marks, row.media, tokens, timed)
    except ValueError as error:
        raise ConfigError(
            f"a prompt with pictures cannot be encoded: {error}. It begins: {text[:80]!r}"
        ) from error
    return EncodedPrompt(text, ids, media)


def _timed_videos(tokenizer: Tokenizer, config: RunConfig) -> TimedVideos:
    asked = config.media.video
    limits = asked.min_pixels, asked.max_pixels
    return TimedVideos(video_tokens(config.model.path, asked.fps, asked.max_frames, *limits), tokenizer)


def _text_ids(row: Row, text: str, tokenizer: Tokenizer, config: RunConfig) -> list[int]:
    if isinstance(row.prompt, list) and config.data.apply_chat_template:
        return tokenizer.encode_chat(row.prompt)
    return tokenizer.encode_parts([_plain_part(row, text, config)], adds_special=True)


def _ids_with_marks(
    row: Row, tokens: PictureTokens, timed: TimedVideos | None, tokenizer: Tokenizer, config: RunConfig
) -> list[int]:
    """Returns the ids of a prompt with one placeholder for each mark."""
    marks = {VIDEO_MARK if ref.is_video else IMAGE_MARK for ref in row.media}
    if isinstance(row.prompt, list) and config.data.apply_chat_template:
        messages = [message | {"content": _split(message["content"], marks)} for message in row.prompt]
        return tokenizer.encode_chat(messages)
    plain = _plain_part(row, str(row.prompt), config)
    parts = _split(plain.text, marks, is_trusted=plain.is_trusted)
    if timed is not None:
        video = TextPart(tokenizer.decode(list(timed.tokens.mark_ids), skip_special=False), True)
        parts = [video if part is VIDEO else part for part in parts]
    return _plain_ids(parts, tokens, tokenizer)


def _plain_ids(
    parts: Sequence[TextPart | None],
    tokens: PictureTokens,
    tokenizer: Tokenizer,
    *,
    adds_special: bool = True,
) -> list[int]:
    """Returns the ids of text that no template renders, with one placeholder for each picture."""
    picture = TextPart(tokenizer.decode(list(tokens.mark_ids), skip_special=False), True)
    every = [picture if part is None else part for part in parts]
    return tokenizer.encode_parts(every, adds_special=adds_special)


def encode_question(
    parts: Sequence[TextPart | None],
    refs: Sequence[MediaRef],
    tokens: PictureTokens,
    tokenizer: Tokenizer,
    *,
    is_chat: bool,
) -> tuple[list[int], tuple[PlacedMedia, ...]]:
    """Encodes a question to a GenRM that is shown pictures.

    Raises:
        ValueError: the model does not take one of them, or its template leaves them out.
    """
    if is_chat:
        ids = tokenizer.encode_chat([{"role": "user", "content": parts}])
    else:
        ids = _plain_ids(parts, tokens, tokenizer)
    return with_placeholders(ids, refs, tokens)


def encode_observation(text: str, tokens: PictureTokens, tokenizer: Tokenizer, role: str) -> list[int]:
    """Encodes an environment's answer with pictures, with one placeholder for each.

    Args:
        text: with a mark for each picture.
        role: of the message in the model's template; empty: no template renders it.
    """
    parts = _split(text)
    if role:
        return tokenizer.encode_answer(role, parts)
    return _plain_ids(parts, tokens, tokenizer, adds_special=False)


def _plain_part(row: Row, text: str, config: RunConfig) -> TextPart:
    """The text of a prompt that no template renders."""
    if isinstance(row.prompt, str):
        return TextPart(text, config.data.allow_special_tokens)
    return TextPart("\n".join(str(message["content"]) for message in row.prompt), False)


def _split(
    text: str, marks: Collection[str] = (IMAGE_MARK,), *, is_trusted: bool = False
) -> list[TextPart | None]:
    """Splits text at these marks."""
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    return [_PARTS[piece] if piece in marks else TextPart(piece, is_trusted) for piece in pieces if piece]
