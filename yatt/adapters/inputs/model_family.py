"""The run's model: a family that yatt knows, or a user's own from a file."""

from pathlib import Path

from yatt.adapters.inputs.user_module import load_module, where_raised
from yatt.config.schema import ModelSection
from yatt.errors import ConfigError, words_of
from yatt.models.families import Family
from yatt.models.model import Model, read_model

NAME = "family"


def model_of_run(section: ModelSection) -> Model:
    """Shape and weight table of the policy.

    Raises:
        ConfigError: the family's file cannot be imported or raises, or the model is not supported.
    """
    own, path = own_family(section), Path(section.family).absolute()
    try:
        return read_model(section.path, own)
    except (ConfigError, OSError):
        raise
    except Exception as error:
        if own is None:
            raise
        raise ConfigError(f"model.family: {where_raised(error, path)}: {words_of(error)}.") from error


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
        raise ConfigError(f"model.family: {path} has no {NAME} = Family(...); see docs/extending.md.")
    return own
