"""Renders a completion into a GenRM's prompt, and parses a GenRM's text into a score. Pure.

A template is Python format text with a few fields and nothing else: no attributes, no indexing, no
format specification. Inserted text is not parsed as a template again, so braces in a completion are
harmless.
"""

import json
import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from yatt.config.schema import VerdictSection
from yatt.errors import ConfigError
from yatt.records.episode import IMAGE_MARK, MediaRef

ShownText = str | tuple[str | MediaRef, ...]
"""Text; or pieces of it, with an environment's pictures between them: a mark in a piece is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The values that a template may show the GenRM; the names are the template's fields."""

    prompt: str
    ground_truth: str
    data_source: str
    completion: ShownText = ""
    completion_a: ShownText = ""
    completion_b: ShownText = ""
    completions: ShownText = ""
    media: ShownText = ""
    """Only the place of pictures; text has nothing there."""


_NUMBER = re.compile(r"[-+]?[0-9]{1,15}(\.[0-9]{1,15})?|[-+]?\.[0-9]{1,15}", re.ASCII)
"""Plain decimal numbers; 1_0, 1e308 and numbers in other scripts do not match."""

_INTEGER = re.compile(r"[0-9]{1,6}", re.ASCII)
COMPLETIONS = {
    "pointwise": ("completion",),
    "pairwise": ("completion_a", "completion_b"),
    "listwise": ("completions",),
}
"""The fields for completions, by way of judging."""

CONVERSATION = "{prompt}\n\n{completion}"
"""What people are shown of a conversation that a scalar reward model was shown in its chat template."""

MOST_JSON = 1 << 20
"""Longest verdict in JSON, in characters."""


def check_template(template: str, key: str, judging: str, *, sees: bool = False) -> None:
    """Refuses a template that `render_template` could not fill.

    Args:
        key: its key in the run file, for the message.
        sees: whether the GenRM is shown pictures.

    Raises:
        ConfigError: an unknown or missing field, a lone brace, or anything beside a bare field name.
    """
    fields = ("prompt", *COMPLETIONS[judging], "ground_truth", "data_source", *(("media",) if sees else ()))
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"{key}: {error}. Write {{{{ and }}}} for braces that are text.") from error
    for _, name, spec, conversion in parts:
        if name is not None and (name not in fields or spec or conversion):
            written = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ConfigError(
                f"{key}: unknown field {{{written}}}; known are {', '.join(f'{{{f}}}' for f in fields)}. "
                "Write {{ and }} for braces that are text."
            )
    if sum(name == "media" for _, name, _, _ in parts) > 1:
        raise ConfigError(f"{key}: {{media}} stands there twice; pictures are shown once.")
    missing = [name for name in COMPLETIONS[judging] if name not in {part[1] for part in parts}]
    if missing:
        raise ConfigError(f"{key}: {{{missing[0]}}} is missing; {judging} judging shows it to the GenRM.")


def check_verdict(verdict: VerdictSection, key: str, judging: str = "pointwise") -> None:
    """Refuses a verdict section with which `parse` could never find a score.

    Raises:
        ConfigError: there is neither pattern nor choices nor schema, or what there is cannot give a score.
    """
    if verdict.choices and judging == "listwise":
        raise ConfigError(f"{key}.choices cannot have every ranking; write a pattern or json_schema.")
    if verdict.choices:
        unread = [choice for choice in verdict.choices if parse_verdict(choice, verdict) is None]
        if unread:
            raise ConfigError(f"{key}.choices: {unread[0]!r} gives no score; add it to {key}.scores.")
        return
    if verdict.json_schema:
        _check_schema(verdict, key)
        return
    if not verdict.pattern:
        raise ConfigError(
            f"{key}.pattern is empty; write the verdict's regular expression, or choices, or json_schema."
        )
    try:
        groups = re.compile(verdict.pattern).groups
    except re.error as error:
        raise ConfigError(
            f"{key}.pattern: {verdict.pattern!r} is not a regular expression: {error}."
        ) from error
    if groups < 1:
        raise ConfigError(
            f"{key}.pattern: {verdict.pattern!r} has no group; put what is the verdict in parentheses, "
            "as in 'score: ([0-9]+)'."
        )


def _check_schema(verdict: VerdictSection, key: str) -> None:
    try:
        schema = json.loads(verdict.json_schema)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}.json_schema is not JSON ({error}).") from error
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or verdict.json_key not in properties:
        raise ConfigError(f"{key}.json_schema has no property {verdict.json_key!r} (json_key).")
    wanted = properties[verdict.json_key]
    if isinstance(wanted, dict):
        values = wanted.get("enum", [])
        unread = [
            each for each in values if parse_verdict(json.dumps({verdict.json_key: each}), verdict) is None
        ]
        if wanted.get("type") == "boolean" or unread:
            shown = repr(unread[0]) if unread else "a boolean"
            raise ConfigError(f"{key}.json_schema: {shown} gives no score; use numbers, or add {key}.scores.")


def structure_of(verdict: VerdictSection) -> str:
    """What the engine may write, as JSON: {"choice": [...]} or {"json": schema}; empty: any text."""
    if verdict.choices:
        return json.dumps({"choice": verdict.choices})
    return json.dumps({"json": json.loads(verdict.json_schema)}) if verdict.json_schema else ""


def render_template(template: str, shown: Shown) -> list[tuple[str, bool]]:
    """Returns the filled template, as pieces of text; True: the piece is the template's own text.

    The template must have passed `check_template`. Only its own text may contain control tokens.
    """
    parts: list[tuple[str, bool]] = []
    for text, name, _, _ in string.Formatter().parse(template):
        parts.append((text, True))
        if name is not None:
            pieces = _pieces_of(getattr(shown, name))
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
    texts = shown.prompt.split(IMAGE_MARK)
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
            found = ["".join(texts) if pictures else shown.prompt]
        elif name is not None:
            found = _pieces_of(getattr(shown, name))
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


def parse_verdict(text: str, verdict: VerdictSection) -> float | None:
    """Returns the score in `text`, or None if there is no valid one."""
    word = verdict_word(text, verdict)
    if word is None:
        return None
    if verdict.scores:
        return verdict.scores.get(word)
    if not _NUMBER.fullmatch(word):
        return None
    value = float(word)
    return value if verdict.minimum <= value <= verdict.maximum else None


def parse_ranking(text: str, verdict: VerdictSection, size: int) -> tuple[int, ...] | None:
    """Returns the completions, from 0, the best first; None if `text` does not name each of them once."""
    word = verdict_word(text, verdict)
    found = [int(number) - 1 for number in _INTEGER.findall(word or "")]
    return tuple(found) if sorted(found) == list(range(size)) else None


def verdict_word(text: str, verdict: VerdictSection) -> str | None:
    """Returns the verdict as it stands in `text`, or None.

    The last match of a pattern counts, because a model that reasons quotes the choices before it decides. The
    time of a match is not limited here: call this in a process that can be killed.
    """
    if verdict.choices:
        word = text.strip()
        return word if word in {choice.strip() for choice in verdict.choices} else None
    if verdict.json_schema:
        return _json_word(text, verdict.json_key)
    found = None
    for found in re.finditer(verdict.pattern, text):  # noqa: B007 - the last one is wanted
        pass
    if found is None or found.group(1) is None:
        return None
    return found.group(1).strip()


FENCE, FENCED = "```", ("```", "```json", "```JSON")
"""JSON between fences, as services write it that do not keep to a schema."""


def _without_fences(text: str) -> str:
    text = text.strip()
    first, _, rest = text.partition("\n")
    if first.strip() not in FENCED or not rest.endswith(FENCE):
        return text
    return rest.removesuffix(FENCE)


def _json_word(text: str, key: str) -> str | None:
    if len(text) > MOST_JSON:
        return None
    try:
        value = json.loads(_without_fences(text))
    except (ValueError, RecursionError):
        return None
    found = value.get(key) if isinstance(value, dict) else None
    if isinstance(found, bool) or found is None:
        return None
    return _word(found)


def _word(value: Any) -> str:
    """A JSON value as a verdict is written: numbers in plain decimals."""
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else format(Decimal(repr(round(value, 15))), "f")
    return json.dumps(value) if isinstance(value, list) else str(value).strip()


def transformed_values(transform: str, values: Sequence[float]) -> list[float]:
    """Returns the scores from the numbers of a scalar reward model.

    Args:
        transform: none; sigmoid; or standardize: less the mean, divided by the (population) standard
            deviation, all 0 if it is 0.
        values: of the completions of one prompt, where they are standardized.
    """
    if transform == "sigmoid":
        return [
            1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value)) for value in values
        ]
    if transform == "none":
        return list(values)
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / deviation if deviation else 0.0 for value in values]
