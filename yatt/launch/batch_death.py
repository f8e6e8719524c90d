"""Requeues the job when its launcher was killed (out of memory, or by a user).

Slurm then ends the whole job and sends SIGTERM to its steps; they have KillWait seconds left. A step checks
whether the launcher was killed. If so, it claims the job's next start and requeues the job, by the rules of
the dead-man's switch (`yatt.core.deadman`).
"""

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from yatt import clock
from yatt.adapters.requeue import Requeue
from yatt.core import deadman as rules
from yatt.core.deadman import Action, Job, Observer, ObserverStage

LIMITS = rules.Limits(silence_s=1.0)
LOOK_S, RETRY_S = 0.5, 2.0
ASK_S = 60.0
"""Upper limit for the requeue; Slurm sends SIGKILL after KillWait, by default 30 s."""


@dataclass(slots=True)
class BatchDeath:
    """The part of one step.

    Attributes:
        say: prints one line for the user.
    """

    requeue: Requeue
    say: Callable[[str], None]
    _threads: list[threading.Thread] = field(default_factory=list)
    _told_s: float = -math.inf

    def look_into(self) -> None:
        """Starts the check in a thread, once; called from the SIGTERM handler."""
        if not self._threads:
            self._threads.append(threading.Thread(target=self._run, name="batch-death", daemon=True))
            self._threads[0].start()

    def wait(self) -> None:
        """Waits for the check, if it was started."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        until_s = clock.monotonic_s() + ASK_S
        # The launcher has no heartbeat and no connection: only Slurm can answer.
        observer, action = (
            Observer(stage=ObserverStage.ASKING, counter=0, moved_s=-math.inf),
            Action.ASK_SLURM,
        )
        while action is not Action.END_SELF and clock.monotonic_s() < until_s:
            if action is Action.NOTHING:
                time.sleep(LOOK_S)
                event: rules.Event = rules.Look(clock.monotonic_s(), math.inf, 0)
            else:
                event = self._do(action, observer)
            observer, action = rules.step(observer, event, LIMITS)

    def _do(self, action: Action, observer: Observer) -> rules.Event:
        match action:
            case Action.CLAIM:
                return rules.ClaimTried(self.requeue.claim(observer.claim))
            case Action.REQUEUE:
                if rules.is_fresh(self._told_s, clock.monotonic_s(), LIMITS):
                    reply = self.requeue.succeed([], os.environ)
                    done = f"job {reply.out} continues the run" if reply.out else "requeued"
                    self.say(f"the launcher was killed: {done if reply.code == 0 else reply.says}")
                    time.sleep(0 if reply.code == 0 else RETRY_S)
                return rules.RequeueReturned()
            case _:
                state = self.requeue.state()
                self._told_s = clock.monotonic_s()
                return rules.SlurmSaid(Job.OVER if state is Job.SAME else state)
