"""The run's algorithm: the configured one, or a user's own from a file."""

from pathlib import Path

from yatt.adapters.user_module import load_module
from yatt.algo.algorithm import Algorithm, ConfiguredAlgorithm
from yatt.config.schema import AlgorithmSection
from yatt.errors import ConfigError

METHODS = ("needs", "advantages", "loss")


def algorithm_of(section: AlgorithmSection) -> Algorithm:
    """Makes the algorithm.

    Raises:
        ConfigError: the file cannot be imported, or does not give an algorithm.
    """
    if not section.path:
        return ConfiguredAlgorithm(section)
    path = Path(section.path).absolute()
    factory = getattr(load_module(path, "algorithm"), section.factory, None)
    if not callable(factory):
        raise ConfigError(f"algorithm.factory: {path} has no function {section.factory}.")
    made = factory(section)
    missing = [name for name in METHODS if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"algorithm.factory: what {section.factory} in {path} returns has no {', '.join(missing)}; see "
            "docs/extending.md."
        )
    return made  # type: ignore[no-any-return]  # as checked
