"""File descriptors that a controller needs: a bound from counts of peers, workers and files. Pure.

The numbers per peer and per worker were counted in /proc/self/fd; tests/integration/test_descriptors.py
counts them again.
"""

BASE = 256
"""Descriptors that do not depend on the size of the run: interpreter, zmq, logs, stores, published files."""

PER_PEER = 4
"""Three: the socket to it, its connection, the connection from it. One more while a connection is renewed."""

PER_WORKER = 5
"""Two: its connection and its log. Three more while it starts: /dev/null, and the pipe of a failed exec."""


def needed_descriptors(*, num_peers: int, num_workers: int, num_files: int) -> int:
    """Returns the maximum number of descriptors that a controller has open.

    Args:
        num_peers: other controllers that it talks to.
        num_workers: processes that it runs.
        num_files: data files that it reads rows from.
    """
    return BASE + PER_PEER * num_peers + PER_WORKER * num_workers + num_files
