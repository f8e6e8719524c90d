"""The recipe from a run file, or from a run's config and changes of it (`yatt resume RUN key=value`), to a
config that is ready."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from yatt.adapters.run_folder.ledger import known_commit, run_is_finished
from yatt.adapters.run_folder.run_config import record_changes
from yatt.config.changing import Change, change_kind, changed_keys, is_allowed
from yatt.config.check import broken_relations
from yatt.config.load import load_over
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig
from yatt.config.tree import argument_tree
from yatt.errors import ConfigError
from yatt.launch.resolve.completed import completed_config
from yatt.launch.resolve.data_files import with_made_data
from yatt.launch.resolve.plan import Resized, effective_config
from yatt.launch.resolve.site_defaults import with_store
from yatt.paths import RunPaths
from yatt.printable import printable

NO_SITE, UNCHANGED = SiteConfig(), Resized()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A config that is ready.

    Attributes:
        config: as the run folder keeps it from the next attempt on.
        listed: what differs from `before`, the run's config so far.
        site, resized: what its attempts have of a site file, and their numbers of nodes.
    """

    config: RunConfig
    listed: tuple[Change, ...] = ()
    before: RunConfig | None = None
    site: SiteConfig = NO_SITE
    resized: Resized = UNCHANGED

    @property
    def of_attempt(self) -> RunConfig:
        """The config of the next attempt.

        Raises:
            ConfigError: the run's sizes do not fit on its nodes.
        """
        return effective_config(self.config, self.site, self.resized)

    @property
    def is_extended(self) -> bool:
        """Whether it has more iterations than before, so a finished run continues."""
        before = self.before or self.config
        return self.config.trainer.total_iterations > before.trainer.total_iterations

    def is_over(self, paths: RunPaths) -> bool:
        """Whether the run is finished and stays so."""
        return run_is_finished(paths) and not self.is_extended

    def check(self, paths: RunPaths) -> None:
        """Checks the changes against what the run has done.

        Raises:
            ConfigError: it has fewer iterations than are done.
            OSError: the run folder does not answer.
        """
        done, total = known_commit(paths)[0], self.config.trainer.total_iterations
        if self.listed and total < done:
            raise ConfigError(
                f"trainer.total_iterations is {total}, but iteration {done} is saved already; write {done} "
                "or more."
            )

    def record(self, paths: RunPaths) -> None:
        """Makes it the run's config. Nothing of the run may be active.

        Raises:
            ConfigError: it has fewer iterations than are done.
            OSError: the run folder does not answer.
        """
        if not self.listed:
            return
        self.check(paths)
        if self.is_extended:  # first: without the change, the next attempt only finishes the run again
            paths.finished.unlink(missing_ok=True)
        record_changes(paths, self.config, list(self.listed))
        for change in self.listed:
            sys.stdout.write(f"changed {printable(change.in_words())}\n")


def resolve_config(
    config: RunConfig,
    site: SiteConfig = NO_SITE,
    changes: Sequence[str] | None = None,
    resized: Resized = UNCHANGED,
) -> Resolved:
    """The one way from what a user has written to a config that is ready.

    Args:
        config: of a run file; with `changes`, that of a run.
        changes: ``key=value`` each.
        resized: other numbers of nodes of the next attempt.

    Raises:
        ConfigError: a path, the data, or a key cannot be used; or a key does not exist or may not change.
    """
    if changes is None:
        ready = with_store(with_made_data(completed_config(config)), site)
        return Resolved(config=ready, site=site, resized=resized)
    if wrong := [word for word in changes if "=" not in word]:
        raise ConfigError(f"argument '{wrong[0]}': write KEY=VALUE; overlay files are for new runs.")
    new = with_made_data(_loaded(config, list(changes))) if changes else config
    listed = changed_keys(config, new)
    refused = [each for each in listed if not is_allowed(each, deterministic=config.run.deterministic)]
    if refused:
        lines = "\n".join(f"  {each.in_words()} {_why(each)}" for each in refused)
        raise ConfigError(
            f"a resumed run keeps these keys; nothing was started:\n{lines}\nFor other values start a new "
            "run: write another run.dir, and run.from_checkpoint to begin with the weights of this one."
        )
    return Resolved(config=new, listed=tuple(listed), before=config, site=site, resized=resized)


def _loaded(config: RunConfig, arguments: list[str]) -> RunConfig:
    """Returns the changed config. Data files keep their weights by their paths; those that have moved have
    the weights of those that are not in the list any more, in its order."""
    data, weights = config.data, config.data.weights
    given = _keys_of("data", arguments)
    if not weights or "train_files" not in given:
        return completed_config(load_over(config, arguments, broken_relations))
    bare = replace(config, data=replace(data, weights={}))
    new = completed_config(load_over(bare, arguments, broken_relations))
    if "weights" in given:
        return new
    before, now = data.train_files, new.data.train_files
    if len(before) != len(now):
        raise ConfigError(
            f"the run has {len(before)} files with data.weights, and these are {len(now)}; write as many, "
            "in the same order.",
            key="data.train_files",
        )
    gone = iter([file for file in before if file not in now])
    was = {file: file if file in before else next(gone) for file in now}
    kept = {file: weights[old] for file, old in was.items() if old in weights}
    return replace(new, data=replace(new.data, weights=kept))


def _keys_of(section: str, arguments: list[str]) -> set[str]:
    """Returns the section's keys that have values in arguments."""
    written = [argument_tree(argument, []).value.get(section) for argument in arguments]
    return {key for node in written if node and isinstance(node.value, dict) for key in node.value}


def _why(change: Change) -> str:
    if change_kind(change.key) == "layout":
        return "(the order of sums changes, and run.deterministic is true)"
    return "(it decides what is trained, or which run this is)"
