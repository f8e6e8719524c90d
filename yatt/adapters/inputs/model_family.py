"""The run's model: a family that yatt knows, or a user's own from a file."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from yatt.adapters.inputs.tensor_header import read_header
from yatt.adapters.inputs.user_module import load_module, where_raised
from yatt.config.schema import ModelSection, RunConfig
from yatt.errors import ConfigError, Finding, words_of
from yatt.models.config_types import MODEL_KEY as MODEL_KEY
from yatt.models.families import FAMILIES, Family
from yatt.models.model import Model, model_of, read_config, read_model, with_value_head
from yatt.models.tensors import turned_shape

NAME = "family"


def _of_key(key: str, found: Finding) -> Finding:
    return replace(found, key=key) if found.key == MODEL_KEY else found


def model_of_run(section: ModelSection, *, key: str = MODEL_KEY) -> Model:
    """Shape and weight table of the policy.

    Args:
        key: what gives the folder, for messages.

    Raises:
        ConfigError: the family's file cannot be imported or raises, or the model is not supported.
    """
    own, path = own_family(section), Path(section.family).absolute()
    try:
        return read_model(section.path, own)
    except OSError:
        raise
    except ConfigError as error:
        raise error.with_each(partial(_of_key, key)) from error.__cause__
    except Exception as error:
        if own is None:
            raise
        raise ConfigError(f"{where_raised(error, path)}: {words_of(error)}.", key="model.family") from error


def trained_model(config: RunConfig) -> Model:
    """Shape and weight table of what the run trains: the policy, or a reward model with its value head.

    Raises:
        ConfigError: see `model_of_run`.
    """
    model = model_of_run(config.model)
    return with_value_head(model) if config.run.kind == "reward_model" else model


def critic_of_run(config: RunConfig) -> Model | None:
    """Shape and weight table of the critic, with its value head; None: the run has no critic.

    Raises:
        ConfigError: see `model_of_run`; it names critic.path if that is written.
    """
    if not config.has_critic:
        return None
    return with_value_head(model_of_run(config.critic_model, key=critic_key(config)))


def critic_key(config: RunConfig) -> str:
    """The key that names the critic's first folder: without one of its own it begins as the policy."""
    return "critic.path" if config.critic.path else MODEL_KEY


def has_turned_experts(folder: str) -> bool:
    """Whether a folder has the experts of a layer in one tensor, the other way round than released:
    transformers saves them so, and vLLM cannot load them.

    Raises:
        ConfigError: config.json or a file with weights is damaged.
        OSError: a transient error.
    """
    values = read_config(folder)
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None or family.tower is None:
        return False
    turned = {row.stacked.name: turned_shape(row) for row in model_of(values).rows if row.stacked}
    files = sorted(Path(folder).glob("*.safetensors")) if turned else []
    places = (item for file in files for item in read_header(file).items())
    return any(turned.get(name) == place.shape for name, place in places)


def has_some_windows(folder: str, own: Family | None = None) -> bool:
    """Whether some layers of a model have a window and others have none, and vLLM would give all of them the
    same, without a word.

    Args:
        own: a family of the user, for its model type.

    Raises:
        ConfigError: config.json is damaged.
        OSError: a transient error.
    """
    values = read_config(folder)
    known = FAMILIES | ({own.model_type: own} if own else {})
    family = known.get(str(values.get("model_type")))
    if family is None or family.has_layer_windows:
        return False
    try:
        return len(set(model_of(values, own).shape.windows)) > 1
    except ConfigError:
        return False  # it cannot be trained; an engine may run it


def own_family(section: ModelSection) -> Family | None:
    """The family in the user's file; None if the run names no file.

    Raises:
        ConfigError: the file cannot be imported, or has no family.
    """
    if not section.family:
        return None
    path = Path(section.family).absolute()
    own = getattr(load_module(path, "model.family"), NAME, None)
    if not isinstance(own, Family):
        raise ConfigError(f"{path} has no {NAME} = Family(...); see docs/extending.md.", key="model.family")
    return own
