"""How many file descriptors a controller needs: a bound from counts of peers, workers and files. Pure.

The numbers a peer and a worker were counted in /proc/self/fd; tests/integration/test_descriptors.py counts
them again.
"""

BASE = 256
"""Everything whose number does not grow with the run: the interpreter, zmq, logs, stores, published files."""

PER_PEER = 4
"""The socket to it, its connection, the connection from it: three. One more while a connection is renewed."""

PER_WORKER = 5
"""Its connection and its log: two. Three more while it starts: /dev/null, and the pipe of a failed exec."""


def needed_descriptors(*, num_peers: int, num_workers: int, num_files: int) -> int:
    """Most descriptors that a controller has open at once.

    Args:
        num_peers: other controllers that it talks to.
        num_workers: processes that it runs.
        num_files: data files that it reads rows from.
    """
    return BASE + PER_PEER * num_peers + PER_WORKER * num_workers + num_files
