"""The state of a run as plain data: for `yatt status --json` and `yatt.open_run`."""

from dataclasses import asdict
from typing import Any

from yatt import clock
from yatt.adapters.run_folder.ledger import STARTED, Attempt, inputs_of, newest_attempt, record_of_attempt
from yatt.adapters.run_folder.run_config import changes_of, load_run
from yatt.adapters.slurm.slurm import PERSON_S, Slurm
from yatt.core.figures.limiting import Limit, limit_of
from yatt.launch.folder.jobs import JobView, job_view, present_state, state_in_words
from yatt.obs.metrics import strict_row
from yatt.obs.story.account import Account, AccountFold
from yatt.obs.story.view import RunView
from yatt.paths import RunPaths

LIVELY = ("running", "starting")


class Summary:
    """The state of a run when this was made.

    Attributes:
        fields: what the run folder says, with the state of its job.
        job: the run's job in Slurm, if any.
        limit: what limits the run.
        account: where its time went.
    """

    def __init__(self, paths: RunPaths) -> None:
        config, account_fold = load_run(paths), AccountFold()
        view = RunView(paths, config.trainer.total_iterations)
        view.also = account_fold.take
        view.refresh()
        self.job: JobView = job_view(paths, Slurm(limit_s=PERSON_S))
        fields: dict[str, Any] = view.summary()
        state, why = state_in_words(paths, fields["state"], self.job)
        fields |= {"state": state, "why": why, "attempt": newest_attempt(paths), "kind": config.run.kind}
        if state not in LIVELY:
            fields |= {"holders": {}, "workers": {}, "eta_s": None, "uploading": 0}
        self.limit: Limit | None = limit_of(view.rows)
        fields["limit"] = self.limit and asdict(self.limit)
        fields["changes"] = [asdict(changed) for changed in changes_of(paths)]
        fields["inputs"] = inputs_of(
            Attempt(fields["attempt"], record_of_attempt(paths, fields["attempt"], STARTED))
        )
        self.fields = fields
        self.account: Account = account_fold.account(
            paths, config.checkpoint, present_state(state, clock.wall_s())
        )

    def as_json(self) -> dict[str, Any]:
        """Returns all of it as values of JSON; a number that is not finite is its name."""
        return {**strict_row(self.fields), **self.account.as_json(), "job": asdict(self.job)}
