"""What changed in a block of 16-bit words since a former version, in bytes that are applied to the former.

With the learning rates of reinforcement learning, most bfloat16 weights stay equal from one version to the
next: an update is smaller than half the distance to the neighbouring number. A change is the steps from one
changed word to the next (minus 1), then the new words; both are 16-bit, little-endian. No step is too long
for that, because every 65,536th word counts as changed.
"""

from yatt.errors import WorkerFailed

Buffer = bytes | bytearray | memoryview
WORD_BYTES = 2
_LONGEST_STEP = 1 << 16
_WORTH = 0.75
"""A change above this share of the block is not worth its time."""


def change_between(former: Buffer, present: Buffer) -> bytes | None:
    """Returns the change from `former` to `present`; None if it is not much shorter than the block.

    Args:
        former, present: of the same size.
    """
    import numpy as np

    if len(present) % WORD_BYTES:
        return None
    now = np.frombuffer(present, "<u2")
    is_changed = now != np.frombuffer(former, "<u2")
    is_changed[_LONGEST_STEP - 1 :: _LONGEST_STEP] = True
    if 2 * WORD_BYTES * int(np.count_nonzero(is_changed)) > _WORTH * len(present):
        return None
    places = np.flatnonzero(is_changed)
    steps = np.diff(places, prepend=-1) - 1
    return steps.astype("<u2").tobytes() + now[places].tobytes()


def apply_change(change: Buffer, block: memoryview) -> None:
    """Turns the former block into the present one, in place.

    Raises:
        WorkerFailed: it is not a change of a block of this size; nothing was written.
    """
    import numpy as np

    parts, words = len(change) // WORD_BYTES, np.frombuffer(block, "<u2")
    if len(change) % (2 * WORD_BYTES):
        raise WorkerFailed(f"a change of weights has {len(change)} bytes, which is no multiple of 4")
    both = np.frombuffer(change, "<u2")
    places = np.cumsum(both[: parts // 2].astype(np.int64) + 1) - 1
    if len(places) and places[-1] >= len(words):
        raise WorkerFailed(f"a change of weights is of word {places[-1]}, but the block has {len(words)}")
    words[places] = both[parts // 2 :]
