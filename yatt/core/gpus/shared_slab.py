"""A slab with the engines that hold it side by side: which of them is ended and started again alone. Pure.

If an engine of a role needs fewer GPUs than a slab has, the role has several engines on the slab, which work
under one grant and one token. So that the failure of one costs only that one, each engine has a lease of its
own *within* the slab's grant: the same machine (`yatt.core.gpus.lease`), on the engine's GPUs.

- Engine leases begin with the slab's grant. They end when the slab is taken back or its holder terminated:
  from then on no engine is started under that grant.
- An engine without a heartbeat for ``ttl_s``, or without progress for ``stall_s``, is terminated, then
  killed. What the other engines do does not count.
- An engine that has ended is started again under the same token, once the memory of its GPUs is measured
  free. Its former process is gone, so the token has one user.
- If an engine cannot be killed, or its memory is not released, the whole holder is terminated; the rules of
  the slab decide about what remains.

With several engines, ticks renew the slab's own lease, since each engine lease ends in time by itself. After
a request to release the slab, only ``release_s`` limits it: engines that sleep send no heartbeats.

A role with one engine on a slab, and the trainer, whose ranks cannot work without each other, have no engine
leases: for them these rules are those of the slab's lease.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from yatt.core.gpus import lease as rules
from yatt.core.gpus.lease import SlabLease, Stage, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSlab:
    """State of a slab: its lease, and the leases of the holder's engines if it has several."""

    lease: SlabLease = field(default_factory=SlabLease)
    engines: tuple[SlabLease, ...] = ()


@dataclass(frozen=True, slots=True)
class OfEngine:
    """An event of one engine of the holder: Beat (with the slab's token), Died or MemoryChecked."""

    index: int
    event: rules.Beat | rules.Died | rules.MemoryChecked


@dataclass(frozen=True, slots=True)
class ForEngine:
    """An action on one engine of the holder: Terminate, Kill, Measure, or Give, which starts it again."""

    index: int
    action: rules.Action


Event = rules.Event | OfEngine
Action = rules.Action | ForEngine
Result = tuple[SharedSlab, tuple[Action, ...]]


def step(
    slab: SharedSlab, event: Event, now_s: float, timing: Timing, num_engines: Mapping[str, int]
) -> Result:
    """Handles an event: returns the slab's next state and the actions, in order.

    Args:
        num_engines: the number of engines of each role on this slab; roles that are not in it have no
            engine leases.
    """
    if isinstance(event, OfEngine):
        return _step_engine(slab, event.index, _translated(slab, event), now_s, timing)
    if isinstance(event, rules.Tick) and slab.engines:
        renewal = rules.Beat(slab.lease.token, slab.lease.progress + 1)
        slab = replace(slab, lease=rules.step(slab.lease, renewal, now_s, timing)[0])
    lease, actions = rules.step(slab.lease, event, now_s, timing)
    engines = slab.engines if rules.is_live(lease, slab.lease.token) else ()
    if any(isinstance(action, rules.Give) for action in actions):
        engines = _granted(lease, num_engines.get(lease.holder, 1))
    slab, found = replace(slab, lease=lease, engines=engines), list[Action](actions)
    if isinstance(event, rules.Tick):
        for index in range(len(engines)):
            slab, more = _step_engine(slab, index, event, now_s, timing)
            found += more
    return slab, tuple(found)


def _granted(lease: SlabLease, count: int) -> tuple[SlabLease, ...]:
    """Returns the leases of the engines that a grant wakes; none for one engine."""
    return (lease,) * count if count > 1 else ()


def _translated(slab: SharedSlab, event: OfEngine) -> rules.Event:
    """Returns the event with the token of the engine's lease in place of the slab's."""
    inner = event.event
    if not isinstance(inner, rules.Beat) or not slab.engines:
        return inner
    is_current = rules.is_live(slab.lease, inner.token)
    return replace(inner, token=slab.engines[event.index].token if is_current else -1)


def _step_engine(slab: SharedSlab, index: int, event: rules.Event, now_s: float, timing: Timing) -> Result:
    if not slab.engines or slab.lease.stage is not Stage.HELD:
        return slab, ()
    engine, actions = rules.step(slab.engines[index], event, now_s, timing)
    engines = (*slab.engines[:index], engine, *slab.engines[index + 1 :])
    if any(isinstance(action, rules.Purge | rules.Quarantine) for action in actions):
        lease, ended = rules.step(slab.lease, rules.Broken(_cause(engine, index)), now_s, timing)
        return replace(slab, lease=lease, engines=()), ended
    return replace(slab, engines=engines), tuple(ForEngine(index, action) for action in actions)


def _cause(engine: SlabLease, index: int) -> str:
    why = engine.cause or "no measurement"
    if engine.stage is Stage.QUARANTINED:
        return f"engine {index}: {why}"
    return f"engine {index} has ended, and its GPUs are not free: {why}"
