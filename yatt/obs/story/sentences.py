"""Notable events of a run as sentences for its user. Pure.

Only events whose sentence depends on nothing else; `yatt.obs.story.view` adds those that depend on the state
of the run.
"""

from collections.abc import Callable, Mapping
from typing import Any

from yatt.obs.story.slabs_now import split_in_words
from yatt.records.events import attempts, groups, processes, saves, slabs
from yatt.records.events.log import LoggedEvent


def sentence_of(logged: LoggedEvent) -> str:
    """Returns the event's sentence; empty if it is not notable."""
    event = logged.event
    match event:
        case saves.LocalFilesLacking():
            return f"node{logged.node} has no local files of checkpoint {event.iteration}: {event.error}"
        case groups.SamplesLost():
            where = f"were not recorded on node{logged.node}"
            return f"{event.samples} samples of iteration {event.iteration} {where}: {event.error}"
    words = _SENTENCES.get(type(event))
    return words(event) if words is not None else ""


def _node_lost(event: attempts.NodeExcluded) -> str:
    then = "the run continues without it" if event.goes_on else "the run cannot continue without it"
    return f"node{event.node} {event.why}: {then}"


def _restarted(event: processes.WorkerStarted) -> str:
    return "" if event.worker.endswith(".1") else f"{event.worker} was restarted"


def _resumed(event: attempts.AttemptResumed) -> str:
    where = ", which only the nodes' disks have" if event.is_local else ""
    if not event.iteration and not _again(event):
        return ""
    others = f"; others than then: {', '.join(event.changed)}" if event.changed else ""
    return f"resumed from iteration {event.iteration}{where}{_again(event)}{others}"


def _again(event: attempts.AttemptResumed) -> str:
    """What is said of iterations that an earlier attempt had run and not saved."""
    first, last = event.iteration + 1, event.lost
    if last < first:
        return ""
    which = f"iteration {first} is" if first == last else f"iterations {first} to {last} are"
    return f"; {which} trained again"


def _committed(event: saves.CheckpointCommitted) -> str:
    return f"checkpoint {event.iteration} committed ({event.size_bytes / 1e6:.1f} MB)"


def _kept(event: saves.CheckpointKeptLocally) -> str:
    return (
        f"checkpoint {event.iteration} is on the nodes' disks only ({event.size_bytes / 1e6:.1f} MB): "
        "there was no time for the store. The next start on the same nodes uploads it"
    )


def _backpressure(event: saves.StoreTooSlow) -> str:
    return (
        f"the checkpoint store is slow: {event.size_bytes / 1e6:.1f} MB of checkpoint "
        f"{event.iteration} were copied aside in {event.seconds:.1f} s"
    )


def _late(event: attempts.TelemetryLate) -> str:
    return f"events and metrics could not be written for {event.seconds:.1f} s; {event.lost} lines were lost"


def _unfit(event: slabs.EngineUnfit) -> str:
    return (
        f"no engine of {event.holder} can be built on GPU set {event.slab}, which stays with its first "
        f"role: {event.error}"
    )


def nursery_ended(event: processes.NurseryEnded) -> str:
    """The end of a nursery that was needed, which only costs time."""
    return f"{event.nursery}: {event.why}; its workers are started by exec until there is another"


def _validation_failed(event: groups.ValidationFailed) -> str:
    return (
        f"validation at iteration {event.iteration}: {event.failed} of {event.count} completions of "
        f"{event.source} have no score by {event.reward} and are left out: {event.why}"
    )


_SENTENCES: Mapping[type, Callable[[Any], str]] = {
    attempts.AttemptResumed: _resumed,
    groups.ValidationFailed: _validation_failed,
    slabs.LeaseExpired: lambda event: f"lease of GPU set {event.slab} expired: {event.cause}",
    slabs.MemoryNotFree: lambda event: f"GPU set {event.slab} is not free yet: {event.cause}",
    slabs.EngineExpired: lambda event: f"lease of {event.worker} expired: {event.cause}",
    slabs.SlabQuarantined: lambda event: f"GPU set {event.slab} is quarantined: {event.cause}",
    slabs.LeaseRefused: lambda e: f"{e.holder} did not release GPU set {e.slab}, and is ended: {e.error}",
    attempts.NodeReturned: lambda event: f"node{event.node} takes part again",
    attempts.NodeExcluded: _node_lost,
    attempts.JobRequeued: lambda event: f"{event.by} asked for a requeue of the job: {event.reason}",
    processes.WorkerReported: lambda event: f"{event.worker} failed: {' '.join(event.error.split())}",
    processes.WorkerStarted: _restarted,
    processes.NurseryEnded: nursery_ended,
    slabs.SplitChosen: lambda e: f"the split changes: {split_in_words(e)}" if e.is_change else "",
    slabs.EngineUnfit: _unfit,
    saves.CheckpointCommitted: _committed,
    saves.CheckpointFailed: lambda e: f"checkpoint {e.iteration} failed, training goes on: {e.error}",
    saves.CheckpointPostponed: lambda event: (
        f"checkpoint {event.iteration} is postponed: {event.in_flight} is still being uploaded"
    ),
    saves.StoreTooSlow: _backpressure,
    saves.CheckpointGivenUp: lambda event: (
        f"checkpoint {event.iteration} would come too late: its upload was given up"
    ),
    saves.CheckpointKeptLocally: _kept,
    saves.CheckpointSkipped: lambda event: f"checkpoint skipped: {event.reason}",
    saves.CommitRefused: lambda event: f"{event.name} is of a stale attempt, and is not used",
    saves.OriginTaken: lambda e: f"the run begins from {e.name} of run {e.run_id} (take: {e.take})",
    saves.RetentionFailed: lambda event: f"an old checkpoint was not removed: {event.reason}",
    groups.AlarmBegan: lambda event: f"ALARM {event.alarm}: {event.message}",
    groups.DropsNoted: lambda event: event.message,
    attempts.TelemetryLate: _late,
}
