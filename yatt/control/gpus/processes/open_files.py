"""Checks that a controller may open as many file descriptors as its node needs."""

from yatt.control.gpus.processes.worker_plan import planned_workers
from yatt.control.node import Node
from yatt.core.attempts.descriptors import needed_descriptors
from yatt.errors import WorkerFailed


def descriptors_of(node: Node) -> int:
    """Returns the largest number of descriptors that the controller of this node needs at once."""
    data = node.config.data
    return needed_descriptors(
        num_peers=len(peers_of(node)),
        num_workers=len(planned_workers(node)),
        num_files=len(data.train_files) + len(data.val_files) if node.is_trainer_node else 0,
    )


def peers_of(node: Node) -> frozenset[int]:
    """Returns the controllers that this one exchanges messages with.

    Two engine nodes exchange none; every other pair of nodes may.
    """
    others = (
        node.present if node.is_trainer_node else node.present & ({0} | set(node.placement.trainer_nodes))
    )
    return others - {node.index}


def check_own_descriptors(node: Node, limit: int) -> None:
    """Checks the limit before the controller begins.

    Args:
        limit: descriptors that this process may have.

    Raises:
        WorkerFailed: the node needs more.
    """
    needed = descriptors_of(node)
    if needed > limit:
        raise WorkerFailed(
            f"{node.name} needs {needed} file descriptors ({len(node.present)} nodes, "
            f"{len(planned_workers(node))} worker processes here), but `ulimit -Hn` is {limit} on this "
            "machine. Raise the hard limit there (limits.conf, or LimitNOFILE of slurmd)."
        )
