"""Encodes and decodes messages, as one union of all types; an unknown tag or field is refused."""

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


def encode_body(body: m.Message) -> msgspec.Raw:
    """Returns the message without an envelope, for frames to several receivers."""
    return msgspec.Raw(_ENCODER.encode(body))


def encode_frame(
    attempt: int,
    seq: int,
    reply_to: int,
    body: m.Message | msgspec.Raw,
    *,
    token: int = 0,
    waits_from: int = 0,
) -> bytes:
    """Returns one message, encoded in its envelope."""
    raw = body if isinstance(body, msgspec.Raw) else encode_body(body)
    return _ENCODER.encode(m.Frame(attempt, token, seq, reply_to, waits_from, raw))


PROBE, WORKING, UNKNOWN = -1, -2, -3
"""Values of `reply_to` in notices: is the request with this seq in progress? It is; it is unknown here."""


def encode_notice(attempt: int, seq: int, kind: int, progress: int = 0) -> bytes:
    """Returns a frame about the request with this seq, without a message."""
    return _ENCODER.encode(m.Frame(attempt, 0, seq, kind, 0, msgspec.Raw(_ENCODER.encode(progress))))


def decode_progress(frame: m.Frame) -> int:
    """Returns the progress in a WORKING notice.

    Raises:
        msgspec.ValidationError: not a number.
    """
    return msgspec.msgpack.decode(frame.body, type=int)


def decode_frame(data: bytes) -> m.Frame:
    """Returns the envelope; its body stays encoded until `decode_body`.

    Raises:
        msgspec.ValidationError: not a frame.
    """
    return _FRAME.decode(data)


def decode_body(frame: m.Frame) -> m.Message:
    """Returns the message in the envelope.

    Raises:
        msgspec.ValidationError: unknown tag, unknown or missing field, wrong type.
    """
    return _decoder().decode(frame.body)  # type: ignore[no-any-return]
