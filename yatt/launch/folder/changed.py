"""Changes of a run's config when it is resumed: `yatt resume RUN key=value`."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from yatt.adapters.run_folder.ledger import known_commit, run_is_finished
from yatt.adapters.run_folder.run_config import record_changes
from yatt.config.changing import Change, change_kind, changed_keys, is_allowed
from yatt.config.check import broken_relations
from yatt.config.load import load_over
from yatt.config.schema import RunConfig
from yatt.config.tree import argument_tree
from yatt.errors import ConfigError
from yatt.launch.folder.folder import open_existing
from yatt.launch.resolve.completed import completed_config
from yatt.launch.resolve.data_files import with_made_data
from yatt.paths import RunPaths
from yatt.printable import printable


@dataclass(frozen=True, slots=True)
class NewConfig:
    """The run's config from its next attempt on, and what differs from the one before."""

    config: RunConfig
    listed: tuple[Change, ...]
    is_extended: bool
    """It has more iterations than before, so a finished run continues."""

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


def take_changes(folder: Path, arguments: list[str]) -> RunConfig:
    """Reads the run's config again, because another resume may have changed it, and records the changes.

    Returns:
        The config of the next attempt. Nothing of the run may be active.

    Raises:
        ConfigError, OSError: see `with_changes` and `NewConfig.record`.
    """
    paths, config = open_existing(folder)
    new = with_changes(config, arguments)
    new.record(paths)
    return new.config


def with_changes(config: RunConfig, arguments: list[str]) -> NewConfig:
    """Returns the config with the values of `arguments`, ``key=value`` each.

    Raises:
        ConfigError: a key does not exist, its value is not possible, or it may not change.
    """
    if wrong := [word for word in arguments if "=" not in word]:
        raise ConfigError(f"argument '{wrong[0]}': write KEY=VALUE; overlay files are for new runs.")
    new = with_made_data(_loaded(config, arguments)) if arguments else config
    listed = changed_keys(config, new)
    refused = [each for each in listed if not is_allowed(each, deterministic=config.run.deterministic)]
    if refused:
        lines = "\n".join(f"  {each.in_words()} {_why(each)}" for each in refused)
        raise ConfigError(
            f"a resumed run keeps these keys; nothing was started:\n{lines}\nFor other values start a new "
            "run: write another run.dir, and run.from_checkpoint to begin with the weights of this one."
        )
    return NewConfig(
        new, tuple(listed), is_extended=new.trainer.total_iterations > config.trainer.total_iterations
    )


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
            f"data.train_files: the run has {len(before)} files with data.weights, and these are {len(now)}; "
            "write as many, in the same order."
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
