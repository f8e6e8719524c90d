"""Frames for fuzzing: every message of the records with random content, damaged in many ways.

`is_message` says what is valid by the protocol's rules alone: plain msgpack, then each rule by itself.
"""

import random
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from yatt.records import cluster, message as m
from yatt.records.codec import _leaves, encode_frame

assert cluster, "imported, so that its messages are known too"
HUGE = (2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
SHARE_THERE = 0.5
TEXTS = ("", "rollout", "node1", "é\u2028", "\0", "\x1b[2J", "../../etc", "x" * 5000)


def message_types() -> list[type[m.Message]]:
    """Every message there is, by name."""
    return sorted(set(_leaves(m.Message)), key=lambda each: each.__name__)


def drawn(kind: Any, chance: random.Random) -> Any:
    """A value of an annotated type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and inner[-1] is Ellipsis:
        return tuple(drawn(inner[0], chance) for _ in range(chance.randrange(4)))
    if origin is tuple:
        return tuple(drawn(each, chance) for each in inner)
    if origin is dict:
        return {chance.choice(TEXTS): drawn(inner[1], chance) for _ in range(chance.randrange(3))}
    if origin in (types.UnionType, typing.Union):
        (one,) = (each for each in inner if each is not type(None))  # no message has another one
        return drawn(one, chance) if chance.random() < SHARE_THERE else None
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{name: drawn(hints[name], chance) for name in kind.__struct_fields__})
    plain: dict[type, Callable[[], Any]] = {
        bool: lambda: chance.random() < 0.5,
        int: lambda: chance.choice((0, 1, -1, 7, *HUGE)),
        float: lambda: chance.choice((0.0, -1.5, 1e308, float("nan"), float("-inf"))),
        str: lambda: chance.choice(TEXTS),
        bytes: lambda: chance.randbytes(chance.choice((0, 3, 4, 64))),
    }
    return plain[kind]()


def damaged(frame: bytes, chance: random.Random) -> bytes:
    """The frame cut, with bytes changed, taken out or put in."""
    data = bytearray(frame)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if at < len(data):
                data[at] = chance.randrange(256)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = chance.randbytes(chance.randrange(1, 9))
            case _:
                del data[at : at + chance.randrange(1, 9)]
    return bytes(data)


def nonsense(attempt: int, seq: int, chance: random.Random) -> bytes:
    """No frame at all, or an envelope that keeps no rule."""
    number = chance.choice((0, -1, None, 1.5, "1", [], True, b"", *HUGE))
    body = {"type": chance.choice((*TEXTS, "Frame", "Message", 3, None)), "worker": number}
    parts = [attempt, 0, seq, 0, 0, body]
    parts[chance.randrange(5)] = number
    match chance.randrange(7):
        case 0:
            return chance.randbytes(chance.randrange(200))
        case 1:
            return msgspec.msgpack.encode(parts)
        case 2:
            return msgspec.msgpack.encode([attempt, 0, seq, chance.randrange(-9, 1), 0, body])
        case 3:  # deeper than any decoder goes, or announces more than there is
            depth = chance.choice((2000, 200_000))
            inside = b"\x91" * depth + b"\x01"
            announced = b"\xdd\xff\xff\xff\xff"
            return (
                b"\x96\x01\x00"
                + bytes([chance.randrange(1, 128)])
                + b"\x00\x00"
                + chance.choice((inside, announced))
            )
        case 4:
            return msgspec.msgpack.encode([*parts, "more"])
        case 5:
            return msgspec.msgpack.encode(parts[: chance.randrange(6)])
        case _:
            return chance.randbytes(64) * chance.choice((1, 100, 20_000))


def frames(attempt: int, count: int, chance: random.Random) -> Iterator[list[bytes]]:
    """So many messages of one part (a few: of none or several), most of them damaged.

    Valid ones have seqs from 1 on without gaps, so that none is taken for a repeated one.
    """
    known, seq = message_types(), 1
    for number in range(count):
        kind = known[number % len(known)]
        good = encode_frame(attempt, seq, 0, drawn(kind, chance))
        match chance.randrange(8):
            case 0:
                data = good
            case 1:
                data = encode_frame(chance.randrange(attempt), seq, 0, drawn(kind, chance))
            case 2 | 3:
                data = nonsense(attempt, seq, chance)
            case _:
                data = damaged(good, chance)
        seq += seq_of(data) == seq
        extra = [data] if chance.random() < 0.95 else [b"", data, *[data] * chance.randrange(3)]
        yield extra


def seq_of(data: bytes) -> int:
    """The seq of a frame that is a message, else 0."""
    return plain[1] if (plain := as_message(data)) is not None else 0


def as_message(data: bytes) -> list[Any] | None:
    """Attempt, seq, reply_to and the message of a frame; None if it is none. By plain msgpack."""
    try:
        plain = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not isinstance(plain, list) or len(plain) != 6 or any(type(each) is not int for each in plain[:5]):
        return None
    attempt, token, seq, reply_to, waits_from, body = plain
    if min(attempt, token, reply_to, waits_from) < 0 or seq < 1 or not isinstance(body, dict):
        return None
    kind = next((each for each in message_types() if each.__name__ == body.get("type")), None)
    try:
        return None if kind is None else [attempt, seq, reply_to, msgspec.convert(body, kind)]
    except msgspec.ValidationError:
        return None
