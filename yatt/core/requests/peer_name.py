"""Names of controllers as their sockets have them: `node3`, and `node3.2` for the node's second life.

A *life* is one process of a node's controller within an attempt. Only engine nodes have more than one. Frames
of different lives have different senders, so that a late frame of a former life is recognized as one.
"""

import functools
import re

_NAME = re.compile(r"node(0|[1-9][0-9]{0,8})(?:\.([2-9]|[1-9][0-9]{1,8}))?", re.ASCII)


def peer_name(index: int, life: int = 1) -> str:
    """Returns the name of a node's controller in a life."""
    return f"node{index}" if life == 1 else f"node{index}.{life}"


@functools.lru_cache(maxsize=1 << 16)
def parsed_peer(sender: str, num_nodes: int) -> tuple[int, int] | None:
    """Returns the node's index and the life of this name; None if it is no controller of this run."""
    found = _NAME.fullmatch(sender)
    if found is None or int(found[1]) >= num_nodes:
        return None
    return int(found[1]), int(found[2] or 1)
