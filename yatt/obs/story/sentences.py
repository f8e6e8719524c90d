"""Notable events of a run as sentences for its user. Pure.

Only events whose sentence depends on nothing else; `yatt.obs.story.view` adds those that depend on the state
of the run. The fields that `yatt.obs.story.events.FIELDS` names are there.
"""

from collections.abc import Callable, Mapping
from typing import Any

from yatt.obs.story.events import inputs_said_changed
from yatt.obs.story.slab_events import as_split_choice, split_in_words

Event = Mapping[str, Any]


def sentence_of(event: Event) -> str:
    """Returns the event's sentence; empty if it is not notable."""
    words = _SENTENCES.get(event["kind"])
    return words(event) if words is not None else ""


def _expired(event: Event) -> str:
    whose = event.get("worker") or f"GPU set {event['slab']}"
    return f"lease of {whose} expired: {event['cause']}"


def _node_lost(event: Event) -> str:
    then = "the run continues without it" if event["goes_on"] else "the run cannot continue without it"
    return f"node{event['node']} {event['why']}: {then}"


def _restarted(event: Event) -> str:
    return "" if event["worker"].endswith(".1") else f"{event['worker']} was restarted"


def _resumed(event: Event) -> str:
    where = ", which only the nodes' disks have" if event.get("is_local") is True else ""
    if not event["iteration"] and not _again(event):
        return ""
    changed = inputs_said_changed(event)
    others = f"; others than then: {', '.join(changed)}" if changed else ""
    return f"resumed from iteration {event['iteration']}{where}{_again(event)}{others}"


def _again(event: Event) -> str:
    """What is said of iterations that an earlier attempt had run and not saved."""
    first, last = event["iteration"] + 1, event.get("lost", 0)
    if not isinstance(last, int) or last < first:
        return ""
    which = f"iteration {first} is" if first == last else f"iterations {first} to {last} are"
    return f"; {which} trained again"


def _committed(event: Event) -> str:
    return f"checkpoint {event['iteration']} committed ({event['size_bytes'] / 1e6:.1f} MB)"


def _kept(event: Event) -> str:
    return (
        f"checkpoint {event['iteration']} is on the nodes' disks only ({event['size_bytes'] / 1e6:.1f} MB): "
        "there was no time for the store. The next start on the same nodes uploads it"
    )


def _backpressure(event: Event) -> str:
    return (
        f"the checkpoint store is slow: {event['size_bytes'] / 1e6:.1f} MB of checkpoint "
        f"{event['iteration']} were copied aside in {event['seconds']:.1f} s"
    )


def _not_local(event: Event) -> str:
    return (
        f"node{event.get('node', 0)} has no local files of checkpoint {event['iteration']}: {event['error']}"
    )


def _late(event: Event) -> str:
    return (
        f"events and metrics could not be written for {event['seconds']:.1f} s; "
        f"{event['lost']} lines were lost"
    )


def _split(event: Event) -> str:
    choice = as_split_choice(event)
    if choice is None or not choice.is_change:
        return ""
    return f"the split changes: {split_in_words(choice)}"


def _unfit(event: Event) -> str:
    return (
        f"no engine of {event['holder']} can be built on GPU set {event['slab']}, which stays with its first "
        f"role: {event['error']}"
    )


def nursery_ended(event: Event) -> str:
    """The end of a nursery that was needed, which only costs time."""
    return f"{event['nursery']}: {event['why']}; its workers are started by exec until there is another"


def _validation_failed(event: Event) -> str:
    return (
        f"validation at iteration {event['iteration']}: {event['failed']} of {event['count']} completions of "
        f"{event['source']} have no score by {event['reward']} and are left out: {event['why']}"
    )


_SENTENCES: dict[str, Callable[[Event], str]] = {
    "attempt.resume": _resumed,
    "validation.failed": _validation_failed,
    "lease.expire": _expired,
    "lease.not_free": lambda event: f"GPU set {event['slab']} is not free yet: {event['cause']}",
    "engine.expire": _expired,
    "lease.quarantine": lambda event: f"GPU set {event['slab']} is quarantined: {event['cause']}",
    "node.joined": lambda event: f"node{event['node']} takes part again",
    "node.lost": _node_lost,
    "worker.failed": lambda event: f"{event['worker']} failed: {' '.join(str(event['error']).split())}",
    "worker.start": _restarted,
    "nursery.end": nursery_ended,
    "split.choose": _split,
    "engine.unfit": _unfit,
    "ckpt.commit": _committed,
    "ckpt.fail": lambda e: f"checkpoint {e['iteration']} failed, training goes on: {e['error']}",
    "ckpt.postpone": lambda event: (
        f"checkpoint {event['iteration']} is postponed: {event['in_flight']} is still being uploaded"
    ),
    "ckpt.backpressure": _backpressure,
    "ckpt.local": _not_local,
    "ckpt.given_up": lambda event: (
        f"checkpoint {event['iteration']} would come too late: its upload was given up"
    ),
    "ckpt.kept": _kept,
    "ckpt.skip": lambda event: f"checkpoint skipped: {event['reason']}",
    "alarm.begin": lambda event: f"ALARM {event['alarm']}: {event['message']}",
    "alarm.drops": lambda event: str(event["message"]),
    "telemetry.late": _late,
    "rollouts.lost": lambda e: (
        f"{e['samples']} samples of iteration {e['iteration']} were not recorded on node{e.get('node', 0)}: "
        f"{e['error']}"
    ),
}
