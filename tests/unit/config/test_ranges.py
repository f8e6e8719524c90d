"""Every number of every config file has a range, and every text a rule."""

import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

from yatt.config.schema import RunConfig
from yatt.config.sections.ranges import Range, Text
from yatt.config.sections.sft import SftConfig
from yatt.config.site import SiteConfig


def leaves(hint: Any, key: str) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Every plain type below `hint`, with its key and its rules."""
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        for f in fields(hint):
            yield from leaves(hints[f.name], f"{key}.{f.name}")
    elif get_origin(hint) is Annotated:
        yield key, get_args(hint)[0], get_args(hint)[1:]
    elif get_origin(hint) in (tuple, dict, Union, types.UnionType):
        for part in get_args(hint):
            if part not in (Ellipsis, str) or get_origin(hint) is not dict:
                yield from leaves(part, f"{key}[]")
    else:
        yield key, hint, ()


CONFIGS = (RunConfig, SiteConfig, SftConfig)
ALL = [leaf for config in CONFIGS for leaf in leaves(config, config.__name__)]


def test_every_number_has_a_range() -> None:
    numbers = [leaf for leaf in ALL if leaf[1] is float or (leaf[1] is int and "[]" not in leaf[0])]
    assert len(numbers) > 80
    assert [key for key, _, rules in numbers if not any(isinstance(rule, Range) for rule in rules)] == []


def test_every_text_has_a_rule() -> None:
    texts = [leaf for leaf in ALL if leaf[1] is str]
    assert len(texts) > 40
    assert [key for key, _, rules in texts if not any(isinstance(rule, Text) for rule in rules)] == []


@pytest.mark.parametrize("leaf", [leaf for leaf in ALL if leaf[2] and isinstance(leaf[2][0], Range)], ids=str)
def test_no_range_takes_what_is_not_finite(leaf: tuple[str, Any, tuple[Any, ...]]) -> None:
    for value in (float("inf"), float("-inf"), float("nan")):
        assert value not in leaf[2][0]


def test_a_range_ends_where_it_says() -> None:
    ends = Range(low=0, high=1, low_open=True, also=-1, also_means="off")
    assert [value in ends for value in (-1, -0.5, 0, 1e-9, 1, 1.1)] == [True, False, False, True, True, False]
    assert str(ends) == "-1 (off), or above 0 and at most 1"
    half = Range(low=0, high=1, high_open=True)
    assert [value in half for value in (-1e-9, 0, 0.999, 1)] == [False, True, True, False]
