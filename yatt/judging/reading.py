"""Parses a GenRM's text into a score. Pure."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from yatt.config.schema import VerdictSection
from yatt.errors import ConfigError

_NUMBER = re.compile(r"[-+]?[0-9]{1,15}(\.[0-9]{1,15})?|[-+]?\.[0-9]{1,15}", re.ASCII)
"""Plain decimal numbers; 1_0, 1e308 and numbers in other scripts do not match."""

_INTEGER = re.compile(r"[0-9]{1,6}", re.ASCII)
MOST_JSON = 1 << 20
"""Longest verdict in JSON, in characters."""

_DIGITS = "0123456789"


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
            raise ConfigError(f"{unread[0]!r} gives no score; add it to {key}.scores.", key=f"{key}.choices")
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
        says = f"{verdict.pattern!r} is not a regular expression: {error}."
        raise ConfigError(says, key=f"{key}.pattern") from error
    if groups < 1:
        raise ConfigError(
            f"{verdict.pattern!r} has no group; put what is the verdict in parentheses, as in 'score: "
            "([0-9]+)'.",
            key=f"{key}.pattern",
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
            says = f"{shown} gives no score; use numbers, or add {key}.scores."
            raise ConfigError(says, key=f"{key}.json_schema")


def structure_of(verdict: VerdictSection, criteria: Sequence[str] = ()) -> str:
    """What the engine may write, as JSON: {"choice": [...]} or {"json": schema}; empty: any text.

    Args:
        criteria: names of which the answer is to have a value each, in this order.
    """
    if criteria:
        value: dict[str, Any] = {"type": "number", "minimum": verdict.minimum, "maximum": verdict.maximum}
        if verdict.scores:
            value = {"enum": list(verdict.scores)}
        properties = dict.fromkeys(criteria, value)
        schema = {"type": "object", "properties": properties, "required": list(criteria)}
        return json.dumps({"json": {**schema, "additionalProperties": False}})
    if verdict.choices:
        return json.dumps({"choice": verdict.choices})
    return json.dumps({"json": json.loads(verdict.json_schema)}) if verdict.json_schema else ""


def unwritable_text(structure: str, can_write: Callable[[str], bool]) -> str:
    """Returns the first word or sign that a form of verdicts needs and a model cannot write; empty: none.

    Args:
        structure: see `structure_of`.
        can_write: whether the model can write a text.

    Raises:
        RecursionError: the form is nested too deeply.
    """
    form = json.loads(structure or "{}")
    texts = [*form.get("choice", ()), *_texts_of(form.get("json"), can_write)]
    return next((text for text in texts if not can_write(text)), "")


def _texts_of(schema: Any, can_write: Callable[[str], bool]) -> Iterator[str]:
    """Yields what JSON texts of a schema are made of, as far as its simplest words tell: values to choose
    from, names and signs as they are, since vLLM takes no escapes for them; of digits one that can be
    written."""
    if not isinstance(schema, dict):
        return
    if isinstance(values := schema.get("enum"), list):
        yield from map(_as_written, values)
    elif schema.get("type") in ("number", "integer"):
        yield next(filter(can_write, _DIGITS), _DIGITS)
    elif schema.get("type") == "object" and isinstance(properties := schema.get("properties"), dict):
        yield from ("{", "}", ":", *([","] if len(properties) > 1 else []))
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            yield _as_written(name)
            yield from _texts_of(properties.get(name) if isinstance(name, str) else None, can_write)


def _as_written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def parse_verdict(text: str, verdict: VerdictSection) -> float | None:
    """Returns the score in `text`, or None if there is no valid one."""
    return _score_of(verdict_word(text, verdict), verdict)


def _score_of(word: str | None, verdict: VerdictSection) -> float | None:
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


def parse_values(text: str, verdict: VerdictSection, criteria: Sequence[str]) -> dict[str, float] | None:
    """Returns the value of each criterion; None if `text` is no JSON object that has them all."""
    words = {name: _json_word(text, name) for name in criteria}
    values = {name: _score_of(word, verdict) for name, word in words.items()}
    found = {name: value for name, value in values.items() if value is not None}
    return found if len(found) == len(criteria) else None


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
    found = _last_match(text, verdict)
    if found is None or found.group(1) is None:
        return None
    return found.group(1).strip()


def verdict_place(text: str, verdict: VerdictSection) -> int:
    """Returns where the verdict's word begins in a text that has one, by choices or pattern."""
    if verdict.choices:
        return len(text) - len(text.lstrip())
    found = _last_match(text, verdict)
    assert found is not None, "a verdict was read"
    word = found.group(1)
    return found.start(1) + len(word) - len(word.lstrip())


def _last_match(text: str, verdict: VerdictSection) -> re.Match[str] | None:
    found = None
    for found in re.finditer(verdict.pattern, text):  # noqa: B007 - the last one is wanted
        pass
    return found


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
