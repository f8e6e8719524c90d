"""Renders completions into a GenRM's prompt. Pure.

A template is Python format text with a few fields and nothing else: no attributes, no indexing, no
format specification. Inserted text is not parsed as a template again, so braces in a completion are
harmless.
"""

import string
from collections.abc import Mapping, Sequence

from yatt.errors import ConfigError
from yatt.records.episode import IMAGE_MARK, MediaRef

ShownText = str | tuple[str | MediaRef, ...]
"""Text; or pieces of it, with an environment's pictures between them: a mark in a piece is text."""


Shown = Mapping[str, ShownText]
"""What a GenRM is shown, by the names of the template's fields."""

ROW_FIELDS = ("prompt", "ground_truth", "data_source")
"""Fields that every template may have. {media} is only the place of pictures."""

CONVERSATION = "{prompt}\n\n{completion}"
"""What people are shown of a conversation that a scalar reward model was shown in its chat template."""


def check_template(
    template: str, key: str, of_way: Sequence[str], way: str = "pointwise", *, sees: bool = False
) -> None:
    """Refuses a template that `render_template` could not fill.

    Args:
        key: its key in the run file, for the message.
        of_way: fields that the way of judging shows.
        way: its name.
        sees: whether the GenRM is shown pictures.

    Raises:
        ConfigError: an unknown or missing field, a lone brace, or anything beside a bare field name.
    """
    fields = ("prompt", *of_way, "ground_truth", "data_source", *(("media",) if sees else ()))
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"{error}. Write {{{{ and }}}} for braces that are text.", key=key) from error
    for _, name, spec, conversion in parts:
        if name is not None and (name not in fields or spec or conversion):
            written = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ConfigError(
                f"unknown field {{{written}}}; known are {', '.join(f'{{{f}}}' for f in fields)}. "
                "Write {{ and }} for braces that are text.",
                key=key,
            )
    if sum(name == "media" for _, name, _, _ in parts) > 1:
        raise ConfigError("{media} stands there twice; pictures are shown once.", key=key)
    missing = [name for name in of_way if name not in {part[1] for part in parts}]
    if missing:
        raise ConfigError(f"{{{missing[0]}}} is missing; {way} judging shows it to the GenRM.", key=key)


def shown_fields_of(template: str) -> set[str]:
    """Returns the names of a template's fields that are names; none of a template with a lone brace."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        return set()
    return {name for _, name, _, _ in parts if name and name.isidentifier()}


def render_template(template: str, shown: Shown) -> list[tuple[str, bool]]:
    """Returns the filled template, as pieces of text; True: the piece is the template's own text.

    The template must have passed `check_template`. Only its own text may contain control tokens.
    """
    parts: list[tuple[str, bool]] = []
    for text, name, _, _ in string.Formatter().parse(template):
        parts.append((text, True))
        if name is not None:
            pieces = _pieces_of(shown[name] if name != "media" else "")
            parts += [(each if isinstance(each, str) else IMAGE_MARK, False) for each in pieces]
    return [(text, is_own) for text, is_own in parts if text]


def _pieces_of(text: ShownText) -> tuple[str | MediaRef, ...]:
    return (text,) if isinstance(text, str) else text


def render_with_pictures(
    template: str, shown: Shown, pictures: Sequence[MediaRef]
) -> list[tuple[str, bool] | MediaRef]:
    """As `render_template`, with the pictures in their places: those of completions, and `pictures`, the
    prompt's: at `{media}`; else at the marks in the prompt, where that is shown first; else before all. Marks
    in other text are text."""
    fields = [name for _, name, _, _ in string.Formatter().parse(template)]
    texts = str(shown["prompt"]).split(IMAGE_MARK)
    where = "media" if "media" in fields else "prompt"
    if where not in fields or (where == "prompt" and len(texts) != len(pictures) + 1):
        where = ""
    pieces: list[tuple[str | MediaRef, bool]] = [] if where else [(each, False) for each in pictures]
    for text, name, _, _ in string.Formatter().parse(template):
        pieces.append((text, True))
        found: Sequence[str | MediaRef] = ()
        if name == where == "media":
            found, where = pictures, "shown"
        elif name == where == "prompt":
            found, where = _with_pictures_between(texts, pictures), "shown"
        elif name == "prompt":
            found = ["".join(texts) if pictures else str(shown["prompt"])]
        elif name is not None:
            found = _pieces_of(shown[name] if name != "media" else "")
        pieces += [(each, False) for each in found]
    return [(piece, own) if isinstance(piece, str) else piece for piece, own in pieces if piece != ""]


def _with_pictures_between(texts: Sequence[str], pictures: Sequence[MediaRef]) -> list[str | MediaRef]:
    """Returns texts with a picture between each two."""
    found: list[str | MediaRef] = [texts[0]]
    for picture, text in zip(pictures, texts[1:], strict=True):
        found += [picture, text]
    return found


def conversation_text(turns: Sequence[tuple[str, Sequence[MediaRef]]]) -> ShownText:
    """Returns turns with an empty line between each two.

    Args:
        turns: text of each, and the pictures that stand at the marks in it; without pictures a mark is text.
    """
    found: list[str | MediaRef] = []
    for text, pictures in turns:
        texts = text.split(IMAGE_MARK) if pictures else [text]
        found += ["\n\n"] if found else []
        found += _with_pictures_between(texts, pictures)
    return _joined(found)


def numbered_completions(completions: Sequence[ShownText]) -> ShownText:
    """The text for {completions}: each after its number, from 1."""
    found: list[str | MediaRef] = []
    for number, text in enumerate(completions, 1):
        found += ["\n\n" if found else "", f"[{number}]\n", *_pieces_of(text)]
    return _joined(found)


def _joined(pieces: Sequence[str | MediaRef]) -> ShownText:
    texts = [piece for piece in pieces if isinstance(piece, str)]
    return "".join(texts) if len(texts) == len(pieces) else tuple(pieces)
