"""The state of a scripted trainer: tensors of the model's shapes, whose every element follows from 32 bytes.

A tensor's elements repeat a pattern of 32 numbers, the state's bytes mixed with the tensor's name, so the
state can be read off any 32 consecutive elements, and one wrong byte anywhere is found. Each number is a byte
over 256, which float32 and bfloat16 have exactly.
"""

import hashlib
import struct
from collections.abc import Iterator

from yatt.checkpoint.commit.pieces import ITEM_BYTES

STATE_BYTES = 32
BLOCK_ELEMENTS = 1 << 15
"""Elements that are written at once; a multiple of the pattern's length."""

MODEL, MAIN, MOMENTS = "model", "main", ("exp_avg", "exp_avg_sq")
"""Kinds of tensors, as in checkpoints of the real trainer (`yatt.trainer.state.snapshot`)."""

_FLOATS = [struct.pack("<f", byte / 256) for byte in range(256)]
_BYTES = {"float32": {word: byte for byte, word in enumerate(_FLOATS)}}
_BYTES["bfloat16"] = {word[2:]: byte for byte, word in enumerate(_FLOATS)}


def state_after(state: bytes, *parts: bytes) -> bytes:
    """Returns the state that follows from a state and what happened."""
    digest = hashlib.blake2b(state, digest_size=STATE_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def state_elements(key: str, dtype: str, state: bytes, first: int, count: int) -> Iterator[bytes]:
    """Yields the bytes of a tensor's elements [first, first + count), in blocks.

    Args:
        key: kind and name of the tensor.
        dtype: float32 or bfloat16.
        first: index in the flattened tensor.
    """
    words = [word[4 - ITEM_BYTES[dtype] :] for word in _FLOATS]
    mixed = [words[byte ^ mask] for byte, mask in zip(state, _mask(key), strict=True)]
    turn = first % STATE_BYTES
    block = b"".join(mixed[turn:] + mixed[:turn]) * (BLOCK_ELEMENTS // STATE_BYTES)
    left = count * ITEM_BYTES[dtype]
    while left > 0:
        yield block if left >= len(block) else block[:left]
        left -= len(block)


def state_in(key: str, dtype: str, first: int, data: bytes) -> bytes | None:
    """Returns the state that a tensor's elements from `first` on show; None if they show none."""
    item, known = ITEM_BYTES[dtype], _BYTES[dtype]
    found = [known.get(data[at : at + item]) for at in range(0, STATE_BYTES * item, item)]
    if len(data) < STATE_BYTES * item or None in found:
        return None
    turn = -first % STATE_BYTES
    mixed = [byte for byte in found[turn:] + found[:turn] if byte is not None]
    return bytes(byte ^ mask for byte, mask in zip(mixed, _mask(key), strict=True))


def _mask(key: str) -> bytes:
    """Bytes that differ between tensors, but not between a parameter and its main copy."""
    kind, _, name = key.partition(".")
    key = f"{MAIN}.{name}" if kind == MODEL else key
    return hashlib.blake2b(key.encode(), digest_size=STATE_BYTES).digest()
