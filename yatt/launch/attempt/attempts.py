"""Runs the attempts of one start of a run, one after another; the same loop on every backend.

Each attempt claims an attempt number and is carried out by a backend: controllers as child processes
(`yatt.launch.attempt.on_this_machine`), or in steps of a Slurm job (`yatt.launch.attempt.on_slurm`).
`yatt.core.attempts.outcome` decides what follows from an attempt's end, `yatt.core.attempts.restart` whether
another attempt may begin.
"""

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from yatt import clock
from yatt.adapters.files.patience import exit_code_of
from yatt.adapters.run_folder.attempt_claim import claim_attempt, mark_finished
from yatt.adapters.run_folder.ledger import (
    ENDED,
    known_commit,
    look_whether_finished,
    newest_attempt,
    started_attempts,
    write_record,
)
from yatt.config.schema import RunConfig
from yatt.core.attempts.inputs import notice_of_inputs
from yatt.core.attempts.outcome import Outcome, Verdict
from yatt.core.attempts.restart import AttemptEnd, Decision, may_begin
from yatt.core.samples.reasons import without_examples
from yatt.errors import (
    EXIT_FINISHED,
    EXIT_WILL_CONTINUE,
    ConfigError,
    FolderUnreachable,
    StoreTakenOver,
    StoreUnreachable,
)
from yatt.launch.attempt.follower import Followers
from yatt.launch.folder.committed import await_committed, committed_if_known
from yatt.launch.folder.folder import open_attempt
from yatt.launch.folder.folder_wait import FolderWait
from yatt.launch.folder.inputs import changed_inputs, inputs_before, inputs_now
from yatt.launch.folder.surroundings import describe_machine
from yatt.paths import RunPaths

RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0
"""Pause between attempts of a start, and between retries of a question to Slurm."""

POLL_S = 0.2

State = Literal["finished", "failed", "no progress"]


@dataclass(frozen=True, slots=True)
class Messages:
    """Sends the notifications of one run.

    Attributes:
        say: prints one line for the user, if a message could not be sent.
    """

    config: RunConfig
    paths: RunPaths
    say: Callable[[str], None]

    def send(self, state: State, text: str) -> None:
        """Sends one message. `text` is a separate field, which chat services require. Takes at most 10 s."""
        url = self.config.logging.webhook_url
        if not url:
            return
        from yatt.adapters.net.webhook import post_message  # takes a while to import

        root, text = str(self.paths.root), without_examples(text)  # prompts stay here
        content = {"text": f"yatt: {root}: {text}", "run": root, "id": self.config.run.id, "state": state}
        if wrong := post_message(url, content):
            self.say(f"logging.webhook_url: the message '{state}' was not sent ({wrong})")


class Backend(Protocol):
    """Runs attempts, and reports requests to end them.

    Attributes:
        absent: nodes of the run that the next attempt leaves out.
    """

    absent: frozenset[int]

    @property
    def submission(self) -> str:
        """Id of the submission; attempts without progress are counted within one submission."""
        ...

    def told(self) -> str:
        """Returns why this start has to end now, without another attempt; empty if it may continue."""
        ...

    def is_warned(self) -> bool:
        """Whether this start has to end now or soon; then no wait continues."""
        ...

    def superseded(self, *, has_begun: bool) -> str:
        """Returns why this start may not begin another attempt; empty if it may. May wait for Slurm's answer.

        Args:
            has_begun: whether this start has run an attempt already.
        """
        ...

    def about(self) -> dict[str, Any]:
        """Returns this start's fields of `started.json`."""
        ...

    def carry_out(self, attempt: int, followers: Followers) -> Outcome:
        """Runs an attempt to its end, checks the followers meanwhile, and leaves no process behind."""
        ...

    def leave(self, attempt: int, outcome: Outcome) -> None:
        """Ends this start after that outcome; requests the next start if one has to follow."""
        ...


@dataclass(slots=True)
class Attempts:
    """Runs the attempts of one start.

    Attributes:
        wait: calls functions that use the run folder, and waits while the folder fails.
        say: prints one line for the user.
        attempt: number of this start's newest attempt.
        began: wall time at which this start began.
    """

    config: RunConfig
    paths: RunPaths
    backend: Backend
    wait: FolderWait
    say: Callable[[str], None]
    attempt: int = 0
    began: str = field(default_factory=clock.wall_iso)

    def run(self, env: Mapping[str, str]) -> int:
        """Runs attempts until this start is over; returns the exit code.

        Args:
            env: environment of the followers.

        Raises:
            CheckpointsMissing, StoreTakenOver: see `await_committed`.
            FolderUnreachable, StoppedWaiting: see `FolderWait`.
            StaleAttempt: a newer attempt was claimed.
        """
        followers = Followers(self.paths, self.say)
        if not self.wait(partial(look_whether_finished, self.paths)):
            followers.start(self.config, env)
        try:
            for count in itertools.count():
                code = self._attempt(followers)
                if code is not None:
                    return code
                self._pause(min(RETRY_MOST_S, RETRY_FIRST_S * count))
            raise AssertionError("the loop returns")
        except (StoreTakenOver, FolderUnreachable, ConfigError) as error:
            self._send("failed", f"{error} (exit code {exit_code_of(error)})")
            raise
        finally:
            followers.end()

    def _attempt(self, followers: Followers) -> int | None:
        """Runs one attempt; returns None if another has to follow in this start, else the exit code."""
        wait, paths = self.wait, self.paths
        if wait(partial(look_whether_finished, paths)):
            self.say(finished_text(paths))
            return EXIT_FINISHED
        if not self._may_begin():
            return EXIT_WILL_CONTINUE
        try:
            found = self._committed()
        except StoreUnreachable as error:
            self.say(str(error))
            return EXIT_WILL_CONTINUE
        if found is not None and (code := self._refused(found)) is not None:
            return code
        inputs = inputs_now(self.config, is_told=self.backend.is_warned, say=self.say)
        changed = changed_inputs(self.config, paths, wait(partial(inputs_before, paths)), inputs)
        if told := self.backend.told():
            self.say(told)
            return EXIT_WILL_CONTINUE
        # If a warning came meanwhile, the attempt saves as soon as it has begun, and the job is requeued.
        committed = wait(self._last_known) if found is None else found
        if self.attempt:
            self.say(f"starting again from iteration {committed}")
        if changed:
            self.say(notice_of_inputs(changed, committed))
        self.attempt = attempt = wait(partial(claim_attempt, paths))
        about = {
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "wall": clock.wall_iso(),
            "began": self.began,
            "submission": self.backend.submission,
            "committed": committed,
            "absent": sorted(self.backend.absent),
            "surroundings": describe_machine(self.config.launch.device),
            "inputs": inputs,
        }
        open_attempt(wait, paths, attempt, self.config, {**about, **self.backend.about()})
        return self._after(attempt, self.backend.carry_out(attempt, followers))

    def _may_begin(self) -> bool:
        """Whether this start may begin another attempt, as far as it can find out."""
        if self.attempt and self.wait(partial(newest_attempt, self.paths)) > self.attempt:
            self.say("a newer start of this run exists: this one ends")
            return False
        if superseded := self.backend.superseded(has_begun=bool(self.attempt)):
            self.say(superseded)
            return False
        return True

    def _committed(self) -> int | None:
        """Returns the newest committed iteration from the store; None if a warning came first."""
        begins = not self.wait(partial(started_attempts, self.paths))
        return await_committed(
            self.config, self.paths.root, is_told=self.backend.is_warned, say=self.say, begins=begins
        )

    def _refused(self, committed: int) -> int | None:
        """Returns the exit code of a run that makes no progress; None if another attempt may begin."""
        decision, last = self.wait(partial(self._decision, committed))
        if not decision.again:
            said = f"{decision.reason}; reason of the last one: {last}"
            self.say(said)
            self._send("failed", f"{said} (exit code {decision.exit_code})")
            return decision.exit_code
        if decision.num_in_vain == self.config.run.max_attempts_without_progress:
            told = f"{decision.num_in_vain} attempts in a row ended without a checkpoint"
            self._send("no progress", f"{told} after iteration {committed}; starting another")
        return None

    def _decision(self, committed: int) -> tuple[Decision, str]:
        """Returns whether another attempt may begin, and why the last one ended.

        An attempt's progress is the iteration that the next attempt found committed.
        """
        mine = [
            a for a in started_attempts(self.paths) if a.started.get("submission") == self.backend.submission
        ]
        found = [*(int(a.started["committed"]) for a in mine[1:]), committed][: len(mine)]
        ends = [
            AttemptEnd(a.ended.get("exit_code"), after, str(a.ended.get("reason", "")))
            for a, after in zip(mine, found, strict=True)
        ]
        limit = self.config.run.max_attempts_without_progress
        last = str(mine[-1].ended.get("reason", "cut off")) if mine else ""
        return may_begin(ends, committed=committed, max_without_progress=limit), last

    def _after(self, attempt: int, outcome: Outcome) -> int | None:
        ended_at = clock.wall_iso()
        known = self.wait(self._last_known)
        committed = committed_if_known(self.config, self.paths.root, otherwise=known)
        verdict = outcome.verdict
        if verdict is not Verdict.FINISHED:
            self.say(f"attempt {attempt} ended at iteration {committed}: {outcome.reason}")
        if verdict is not Verdict.KILLED:
            ended = {
                "exit_code": outcome.exit_code,
                "reason": outcome.reason,
                "committed": committed,
                "wall": ended_at,
            }
            more = {"unfit": sorted(outcome.unfit)} if outcome.unfit else {}
            self.wait(partial(write_record, self.paths, attempt, ENDED, {**ended, **more}))
        if verdict is Verdict.FINISHED:
            self.wait(partial(mark_finished, self.paths, attempt))
            self.say(finished_text(self.paths))
            self._send("finished", finished_text(self.paths))
        elif verdict is Verdict.GIVE_UP:
            self._send("failed", f"{outcome.reason} (exit code {outcome.exit_code})")
        if verdict is Verdict.AGAIN:
            return None
        self.backend.leave(attempt, outcome)
        codes = {Verdict.FINISHED: EXIT_FINISHED, Verdict.GIVE_UP: outcome.exit_code}
        return codes.get(verdict, EXIT_WILL_CONTINUE)

    def _send(self, state: State, text: str) -> None:
        Messages(self.config, self.paths, self.say).send(state, text)

    def _last_known(self) -> int:
        """Returns the newest committed iteration recorded in the ledger."""
        return known_commit(self.paths)[0]

    def _pause(self, seconds: float) -> None:
        until_s = clock.monotonic_s() + seconds
        while clock.monotonic_s() < until_s and not self.backend.is_warned():
            time.sleep(POLL_S)


def finished_text(paths: RunPaths) -> str:
    """Returns the message about a finished run."""
    model = f"; the trained model is {paths.model}" if paths.model.is_dir() else ""
    return f"finished: `yatt report {paths.root}` shows how it went{model}"
