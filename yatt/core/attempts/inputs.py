"""Which inputs of a run are others than before, and what follows. Pure.

An *input* is what a run reads beside its config and its training rows: functions, models, a tokenizer,
held-out rows. It has a name, in the words of the config, and a digest that says whether it is the same
(`yatt.adapters.inputs.input_digests`).

Training rows are not among them: their fingerprint is that of their content, in whatever files
(`yatt.control.rollouts.groups.data_shard`), and other rows are always refused.
"""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from yatt.records.inputs import (
    CRITIC_CONFIG,
    CRITIC_WEIGHTS,
    HELD_OUT,
    MODEL_CONFIG,
    TEMPLATE,
    TOKENIZER,
    WEIGHTS,
)

_OF_NUMBERS = (TOKENIZER, TEMPLATE, MODEL_CONFIG, CRITIC_CONFIG, HELD_OUT)
_WORDS = {
    TOKENIZER: "the tokenizer of model.path",
    TEMPLATE: "the chat template of model.path",
    MODEL_CONFIG: "config.json or generation_config.json of model.path",
    WEIGHTS: "the weights of model.path",
    CRITIC_CONFIG: "config.json of the critic's folder",
    CRITIC_WEIGHTS: "the weights in the critic's folder",
}

Digests = Mapping[str, str]
"""Of each input, by its name; an input that could not be read is missing."""


@dataclass(frozen=True, slots=True)
class InputRules:
    """What a change costs.

    Attributes:
        has_reference: whether the weights of `model.path` are a reference of the KL penalty.
        is_deterministic: whether a resumed run has to be bit-equal: no input may change.
        accepted: names of inputs that may change although they would be refused.
    """

    has_reference: bool
    is_deterministic: bool
    accepted: frozenset[str] = frozenset()

    def refuse(self, name: str) -> bool:
        """Whether a run whose input of this name has changed may not go on.

        Tokenizer, template, ends of sequence, held-out rows and a reference decide what a token or a number
        means, and so does the shape of a critic: with others the run's curves would go on with another
        meaning. Functions, judges and environments may change on purpose. A critic's first weights are not
        used after the first checkpoint, as those of a policy without a reference.
        """
        if name in self.accepted:
            return False
        return self.is_deterministic or name in _OF_NUMBERS or (name == WEIGHTS and self.has_reference)


@dataclass(frozen=True, slots=True)
class ChangedInputs:
    """Names of the inputs that are others now."""

    refused: tuple[str, ...] = ()
    told: tuple[str, ...] = ()


def changed_digests(before: Digests, now: Digests, rules: InputRules) -> ChangedInputs:
    """Compares the inputs that are known both times. Others came or went with a key of the config."""
    names = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    return ChangedInputs(
        tuple(name for name in names if rules.refuse(name)),
        tuple(name for name in names if not rules.refuse(name)),
    )


def in_words(names: Collection[str]) -> str:
    """Returns the names in a sentence."""
    return ", ".join(_WORDS.get(name, name) for name in names)


def refusal_of_inputs(names: Collection[str], root: str) -> str:
    """Returns what a person is told whose run may not go on with these inputs."""
    listed = ",".join(f'"{name}"' if "[" in name else name for name in names)
    return (
        f"not what they were when this run wrote its last checkpoint: {in_words(names)}. Its numbers would "
        "go on with another meaning. Put back what was there; or start a new run from this run's checkpoint "
        "(run.from_checkpoint); or, to go on all the same, "
        f"`yatt resume {shlex.quote(root)} 'run.accept_changed=[{listed}]'`."
    )


def notice_of_inputs(names: Collection[str], iteration: int) -> str:
    """Returns what is said of inputs that have changed since a checkpoint, where the run goes on."""
    return (
        f"not what they were at iteration {iteration}: {in_words(names)}. The run goes on with what is there "
        "now"
    )
