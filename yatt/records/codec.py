"""Bytes to records and back. One union of all messages; an unknown tag or field is refused."""

import functools
import operator
from typing import Any

import msgspec

from yatt.records import message as m


def _leaves(base: type[m.Message]) -> list[type[m.Message]]:
    return [leaf for sub in base.__subclasses__() for leaf in (_leaves(sub) or [sub])]


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, _leaves(m.Message)))


_ENCODER = msgspec.msgpack.Encoder()
_FRAME = msgspec.msgpack.Decoder(m.Frame)


def encode_frame(attempt: int, seq: int, reply_to: int, body: m.Message, *, token: int = 0) -> bytes:
    """One message in its envelope."""
    raw = msgspec.Raw(_ENCODER.encode(body))
    return _ENCODER.encode(m.Frame(attempt, token, seq, reply_to, raw))


PROBE, WORKING, UNKNOWN = -1, -2, -3
"""In place of `reply_to`: is the request of this seq worked on? It is; it is not known here."""


def encode_notice(attempt: int, seq: int, kind: int, progress: int = 0) -> bytes:
    """A frame about the request with this seq, instead of a message."""
    return _ENCODER.encode(m.Frame(attempt, 0, seq, kind, msgspec.Raw(_ENCODER.encode(progress))))


def decode_progress(frame: m.Frame) -> int:
    """The progress that a WORKING notice tells.

    Raises:
        msgspec.ValidationError: not a number.
    """
    return msgspec.msgpack.decode(frame.body, type=int)


def decode_frame(data: bytes) -> m.Frame:
    """The envelope; its body stays encoded until `decode_body`.

    Raises:
        msgspec.ValidationError: not a frame.
    """
    return _FRAME.decode(data)


def decode_body(frame: m.Frame) -> m.Message:
    """The message inside.

    Raises:
        msgspec.ValidationError: unknown tag, unknown or missing field, wrong type.
    """
    return _decoder().decode(frame.body)  # type: ignore[no-any-return]
