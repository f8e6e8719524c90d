"""What every event is, and the types of its fields."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Ticks = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Nanoseconds: after 104 days without a reboot they are more than a `Count` may be."""

Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Code = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What happened. The tag is its kind; a field with a default may be missing in logs of other versions."""


class FrequentEvent(Event, frozen=True, kw_only=True):
    """One of many, about single prompt groups, engines or loads: a look back at a whole run leaves it out."""
