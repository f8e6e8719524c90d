"""The inputs of a run at a start, compared with those of its newest checkpoint
(`yatt.core.attempts.inputs`)."""

import sys
from collections.abc import Callable
from functools import partial

from yatt.adapters.files.patience import until_answered
from yatt.adapters.inputs.input_digests import add_input_digests, input_rules
from yatt.adapters.run_folder.ledger import STARTED, Attempt, inputs_of, known_commit, record_of_attempt
from yatt.config.schema import RunConfig
from yatt.core.attempts import inputs
from yatt.errors import ConfigError
from yatt.paths import RunPaths

LIMIT_S = 60.0
"""Longest time for reading the inputs. A start does not fail of it: whoever needs a file says so."""


def inputs_before(paths: RunPaths) -> dict[str, str]:
    """Returns the digests of the inputs of the attempt that wrote the run's newest checkpoint, which its
    manifest has too; empty if there is none.

    Raises:
        OSError: the run folder does not answer.
    """
    writer = known_commit(paths)[1]  # not a later one, which has only restored it
    return inputs_of(Attempt(writer, record_of_attempt(paths, writer, STARTED))) if writer else {}


def inputs_now(
    config: RunConfig, *, is_told: Callable[[], bool], say: Callable[[str], None]
) -> dict[str, str]:
    """Returns the digests of the inputs; of those whose files answer in time.

    Args:
        is_told: whether this start has to end: then nothing is waited for.
        say: prints a line for the user.
    """
    found: dict[str, str] = {}
    try:
        until_answered(
            partial(add_input_digests, config, found),
            errors=(),
            limit_s=LIMIT_S,
            is_told=is_told,
            say=lambda _: say("reading the files of models and functions takes long"),
        )
    except TimeoutError:
        say(f"not all models and functions could be compared with earlier ones within {LIMIT_S:g} s")
    return dict(found)


def changed_inputs(
    config: RunConfig, paths: RunPaths, before: inputs.Digests, now: inputs.Digests
) -> tuple[str, ...]:
    """Returns the names of the inputs that are others than before, where the run may go on with them.

    Raises:
        ConfigError: it may not.
    """
    found = inputs.changed_digests(before, now, input_rules(config))
    if found.refused:
        raise ConfigError(inputs.refusal_of_inputs(found.refused, str(paths.root)))
    return found.told


def check_inputs_of_resume(config: RunConfig, paths: RunPaths, *, tells: bool) -> None:
    """Refuses inputs that are others than before; tells the user of those that may be.

    Args:
        tells: False if an attempt follows at once, which tells it too.

    Raises:
        ConfigError: the run may not go on with them.
        OSError: the run folder does not answer.
    """
    now = inputs_now(config, is_told=lambda: False, say=_say)
    changed = changed_inputs(config, paths, inputs_before(paths), now)
    if changed and tells:
        _say(inputs.notice_of_inputs(changed, known_commit(paths)[0]))


def _say(text: str) -> None:
    sys.stderr.write(f"yatt: {text}\n")
