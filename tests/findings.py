"""Reads findings in tests."""

from collections.abc import Iterable
from dataclasses import replace

from yatt.errors import Finding


def words_by_key(found: Iterable[Finding]) -> dict[str, str]:
    """What is said of each key, without it."""
    return {each.key: replace(each, key="").in_words() for each in found}
