"""Names of a run's inputs, in the words of its config."""

import re

TOKENIZER, TEMPLATE, MODEL_CONFIG, WEIGHTS = "tokenizer", "chat_template", "model_config", "weights"
CRITIC_CONFIG, CRITIC_WEIGHTS = "critic.model_config", "critic.weights"
HELD_OUT, ENVIRONMENT = "data.val_files", "environment"
ALGORITHM, FAMILY = "algorithm.path", "model.family"

_NAMES = (
    TOKENIZER,
    TEMPLATE,
    MODEL_CONFIG,
    WEIGHTS,
    CRITIC_CONFIG,
    CRITIC_WEIGHTS,
    HELD_OUT,
    ENVIRONMENT,
    ALGORITHM,
    FAMILY,
)
_OF_LISTS = re.compile(r"rewards\[.+\]|genrms\[.+\]\.(?:path|model)")


def reward_input(name: str) -> str:
    """Returns the name of a reward function's input."""
    return f"rewards[{name}]"


def genrm_input(name: str, *, is_model: bool) -> str:
    """Returns the name of the input that is a GenRM's model, or of the one that is its functions."""
    return f"genrms[{name}].{'model' if is_model else 'path'}"


def is_input(name: str) -> bool:
    """Whether an input may have this name."""
    return name in _NAMES or _OF_LISTS.fullmatch(name) is not None
