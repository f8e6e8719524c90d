"""Events of processes: workers, nurseries, and calls that took too long."""

from yatt.records.events.event import Count, Event, FrequentEvent, Seconds


def worker_name(start: str) -> str:
    """Returns the name of a worker, from that of one of its starts: `rollout-n0s0.2` is the second one of
    `rollout-n0s0`."""
    return start.rpartition(".")[0]


class WorkerStarted(Event, tag="worker.start", frozen=True, kw_only=True):
    """A process of a worker began."""

    worker: str
    pid: Count
    log: str = ""
    cpus: str = ""
    is_forked: bool = False


NOT_NEEDED = "not needed any more"
"""How a process ended that was killed because nothing wanted it."""


class WorkerEnded(Event, tag="worker.end", frozen=True, kw_only=True):
    """The process is over; `how` is its exit code or signal in words."""

    worker: str
    pid: Count = 0
    how: str
    log: str = ""


class WorkerDelayed(Event, tag="worker.delay", frozen=True, kw_only=True):
    """A process cannot be started yet."""

    worker: str
    error: str


class WorkerReported(Event, tag="worker.failed", frozen=True, kw_only=True):
    """A worker answered an order with a failure."""

    worker: str
    error: str
    trace: str = ""


class NurseryReady(FrequentEvent, tag="nursery.ready", frozen=True, kw_only=True):
    """A process from which workers are forked has imported its libraries."""

    nursery: str
    pid: Count
    seconds: Seconds = 0.0


class NurseryEnded(Event, tag="nursery.end", frozen=True, kw_only=True):
    """A nursery is over; its workers are started by exec."""

    nursery: str
    why: str


class RewardCallKilled(Event, tag="reward.kill", frozen=True, kw_only=True):
    """A reward function took too long; `call` names it."""

    worker: str
    call: str = ""
    limit_s: Seconds


class MediaCallKilled(Event, tag="media.kill", frozen=True, kw_only=True):
    """The preparation of a picture took too long."""

    worker: str
    limit_s: Seconds


class MediaRoomChosen(Event, tag="media.room", frozen=True, kw_only=True):
    """The node's prepared pictures may take so many bytes."""

    cache_bytes: Count
