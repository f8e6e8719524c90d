"""Packs token ids and log-probs as bytes: little-endian int32 and float32."""

import array
import sys

assert sys.byteorder == "little", "arrays travel as little-endian bytes"


def pack_ids(ids: list[int]) -> bytes:
    """Returns token ids as little-endian int32."""
    return array.array("i", ids).tobytes()


def unpack_ids(raw: bytes) -> list[int]:
    """Inverse of `pack_ids`."""
    return array.array("i", raw).tolist()


def pack_floats(values: list[float]) -> bytes:
    """Returns log-probs as little-endian float32."""
    return array.array("f", values).tobytes()


def unpack_floats(raw: bytes) -> list[float]:
    """Inverse of `pack_floats`."""
    return array.array("f", raw).tolist()
