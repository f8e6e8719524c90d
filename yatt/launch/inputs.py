"""The inputs of a run at a start, compared with those of its newest checkpoint (`yatt.core.inputs`)."""

import sys
from collections.abc import Callable
from functools import partial

from yatt.adapters.input_digests import input_digests, input_rules
from yatt.adapters.ledger import attempts, has_committed, inputs_of, known_commit
from yatt.adapters.patience import until_answered
from yatt.config.schema import RunConfig
from yatt.core import inputs
from yatt.errors import ConfigError
from yatt.paths import RunPaths

LIMIT_S = 60.0
"""Longest time for reading the inputs. A start does not fail of it: whoever needs a file says so."""


def inputs_before(paths: RunPaths) -> dict[str, str]:
    """Returns the digests of the inputs when the run's newest checkpoint was made or restored; empty if there
    is none.

    Raises:
        OSError: the run folder does not answer.
    """
    earlier = [each for each in attempts(paths) if has_committed(paths, each.number)]
    return inputs.newest_known(map(inputs_of, earlier))


def inputs_now(
    config: RunConfig, *, is_told: Callable[[], bool], say: Callable[[str], None]
) -> dict[str, str]:
    """Returns the digests of the inputs; empty if their files do not answer.

    Args:
        is_told: whether this start has to end: then nothing is waited for.
        say: prints a line for the user.
    """
    try:
        found = until_answered(
            partial(input_digests, config), errors=(), limit_s=LIMIT_S, is_told=is_told,
            say=lambda _: say("reading the files of models and functions takes long"),
        )  # fmt: skip
    except TimeoutError:
        say(f"models and functions could not be compared with earlier ones: no answer within {LIMIT_S:g} s")
        return {}
    return found or {}


def changed_inputs(
    config: RunConfig, paths: RunPaths, before: inputs.Digests, now: inputs.Digests
) -> tuple[str, ...]:
    """Returns the names of the inputs that are others than before, where the run may go on with them.

    Raises:
        ConfigError: it may not.
    """
    found = inputs.changes(before, now, input_rules(config))
    if found.refused:
        raise ConfigError(inputs.refusal(found.refused, str(paths.root)))
    return found.told


def check_inputs(config: RunConfig, paths: RunPaths) -> None:
    """Tells the user of inputs that are others than before.

    Raises:
        ConfigError: the run may not go on with them.
        OSError: the run folder does not answer.
    """
    now = inputs_now(config, is_told=lambda: False, say=_say)
    if changed := changed_inputs(config, paths, inputs_before(paths), now):
        _say(inputs.notice(changed, known_commit(paths)[0]))


def _say(text: str) -> None:
    sys.stderr.write(f"yatt: {text}\n")
