"""The launcher was killed (for memory, or by hand): a step sees to it that the job goes on.

Slurm then ends the whole job, for good, and tells the steps so by SIGTERM; they have KillWait seconds left.
A step asks whether that is why, and if so claims the job's next start and asks for it, by the rules of the
dead-man's switch (`yatt.core.deadman`).
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
"""Slurm kills what is left after KillWait, which is 30 s where a site has not set it."""


@dataclass(slots=True)
class BatchDeath:
    """One step's part.

    Attributes:
        say: prints one line for people.
    """

    requeue: Requeue
    say: Callable[[str], None]
    _threads: list[threading.Thread] = field(default_factory=list)
    _told_s: float = -math.inf

    def look_into(self) -> None:
        """After SIGTERM: find out, and act, in a thread of its own; once. For a signal handler."""
        if not self._threads:
            self._threads.append(threading.Thread(target=self._run, name="batch-death", daemon=True))
            self._threads[0].start()

    def wait(self) -> None:
        """Until that is done, if it was begun."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        until_s = clock.monotonic_s() + ASK_S
        # Neither heartbeat nor wire count here: the launcher has neither.
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
                    done = f"job {reply.out} goes on" if reply.out else "requeued"
                    self.say(f"the launcher was killed: {done if reply.code == 0 else reply.says}")
                    time.sleep(0 if reply.code == 0 else RETRY_S)
                return rules.RequeueReturned()
            case _:
                state = self.requeue.state()
                self._told_s = clock.monotonic_s()
                return rules.SlurmSaid(Job.OVER if state is Job.SAME else state)
