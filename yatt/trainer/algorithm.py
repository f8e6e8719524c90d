"""The run's algorithm: the configured one, or a user's own from a file."""

from yatt.algo.algorithm import Algorithm, ConfiguredAlgorithm
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.trainer.own_algorithm import OwnAlgorithm


def algorithm_of(config: RunConfig) -> Algorithm:
    """Makes the algorithm.

    Raises:
        ConfigError: the file cannot be imported, or does not give an algorithm; or the algorithm compares
            completions of one prompt and there is only one.
    """
    section = config.algorithm
    made: Algorithm = OwnAlgorithm(section) if section.path else ConfiguredAlgorithm(section)
    if made.needs.group_baseline and config.rollout.n < 2:
        raise ConfigError("rollout.n: the algorithm compares completions of one prompt; write 2 or more.")
    return made
