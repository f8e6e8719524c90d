"""Renders a completion into a GenRM's prompt, and parses a GenRM's text into a score. Pure.

A template is Python format text with four fields and nothing else: no attributes, no indexing, no
format specification. Inserted text is not parsed as a template again, so braces in a completion are
harmless.
"""

import re
import string
from dataclasses import dataclass

from yatt.config.schema import VerdictSection
from yatt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSample:
    """The values that a template may show the GenRM; the names are the template's fields."""

    prompt: str
    completion: str
    ground_truth: str
    data_source: str


_NUMBER = re.compile(r"[-+]?[0-9]{1,15}(\.[0-9]{1,15})?|[-+]?\.[0-9]{1,15}", re.ASCII)
"""Plain decimal numbers; 1_0, 1e308 and numbers in other scripts do not match."""

FIELDS = ("prompt", "completion", "ground_truth", "data_source")


def check_template(template: str, key: str) -> None:
    """Refuses a template that `render` could not fill.

    Args:
        key: its key in the run file, for the message.

    Raises:
        ConfigError: an unknown field, a lone brace, or anything beside a bare field name.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"{key}: {error}. Write {{{{ and }}}} for braces that are text.") from error
    for _, name, spec, conversion in parts:
        if name is not None and (name not in FIELDS or spec or conversion):
            written = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ConfigError(
                f"{key}: unknown field {{{written}}}; known are {', '.join(f'{{{f}}}' for f in FIELDS)}. "
                "Write {{ and }} for braces that are text."
            )


def check_verdict(verdict: VerdictSection, key: str) -> None:
    """Refuses a verdict section with which `parse` could never find a score.

    Raises:
        ConfigError: the pattern is empty, is not a regular expression, or has no group 1.
    """
    if not verdict.pattern:
        raise ConfigError(f"{key}.pattern is empty; write the regular expression of the verdict.")
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


def render(template: str, sample: JudgedSample) -> list[tuple[str, bool]]:
    """Returns the filled template, as pieces of text; True: the piece is the template's own text.

    The template must have passed `check_template`. Only its own text may contain control tokens.
    """
    parts: list[tuple[str, bool]] = []
    for text, name, _, _ in string.Formatter().parse(template):
        parts.append((text, True))
        if name is not None:
            parts.append((getattr(sample, name), False))
    return [(text, is_own) for text, is_own in parts if text]


def parse(text: str, verdict: VerdictSection) -> float | None:
    """Returns the score of the last match in `text`, or None if there is no valid one.

    The last match counts, because a model that reasons quotes the choices before it decides. The time of a
    match is not limited here: call this in a process that can be killed.
    """
    found = None
    for found in re.finditer(verdict.pattern, text):  # noqa: B007 - the last one is wanted
        pass
    if found is None or found.group(1) is None:
        return None
    word = found.group(1).strip()
    if verdict.scores:
        return verdict.scores.get(word)
    if not _NUMBER.fullmatch(word):
        return None
    value = float(word)
    return value if verdict.minimum <= value <= verdict.maximum else None
