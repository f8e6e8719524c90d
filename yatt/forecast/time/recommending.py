"""Chooses the settings that are compared with a config, and recommends one of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from yatt.config.check import num_slabs
from yatt.config.schema import RunConfig
from yatt.core.gpus.placement import genrm_role
from yatt.forecast.time import alternatives as a
from yatt.forecast.time.alternatives import Alternative
from yatt.forecast.time.comparing import (
    LARGE,
    NUM_ITERATIONS,
    NUM_OF_LARGE,
    SettingsComparison,
    SimulatedResult,
    SimulatedSetup,
)
from yatt.forecast.time.figures import RunFigures
from yatt.judging.judging import questions_per_completion

ALIKE = 0.03
"""Settings whose predicted times differ by less than this fraction count as alike."""

MOST_TRAINER_NODES = 3
"""Number of numbers of trainer nodes that are simulated."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What was simulated, the config's own setting first, and what follows from it."""

    results: tuple[SimulatedResult, ...]

    @property
    def own(self) -> SimulatedResult:
        """The result of the config as it is."""
        return self.results[0]

    @property
    def best(self) -> SimulatedResult:
        """The setting with the least predicted time; of equal ones the one with the youngest tokens."""
        return min(self.results, key=_order)

    @property
    def best_as_young(self) -> SimulatedResult:
        """The same among the settings that train on tokens no older than the config's own."""
        young = [each for each in self.results if each.most_age <= self.own.most_age]
        return min(young, key=_order)

    def gain(self, result: SimulatedResult) -> float:
        """Returns the fraction of the config's iteration time that a setting saves."""
        return 1 - result.iteration_s / self.own.iteration_s


def _order(result: SimulatedResult) -> tuple[float, int]:
    return result.iteration_s, result.most_age


def setup_of(
    config: RunConfig, figures: RunFigures, *, num_iterations: int | None, seed: int
) -> SimulatedSetup:
    """Returns what all alternatives of a config have in common.

    Args:
        num_iterations: by the number of samples if None.
    """
    asked = {genrm_role(g.name): questions_per_completion(g, config.rollout.n) for g in config.engine_genrms}
    figures = figures.over(RunFigures(questions=asked))
    most = max(num_slabs(each.config) for each in (Alternative(config), *_without_splits(config)))
    setup = SimulatedSetup(
        config=config, figures=figures, num_iterations=NUM_ITERATIONS, seed=seed, most_slabs=most
    )
    is_large = setup.num_samples / setup.share > LARGE
    return replace(setup, num_iterations=num_iterations or (NUM_OF_LARGE if is_large else NUM_ITERATIONS))


def recommended_setting(comparison: SettingsComparison) -> Recommendation:
    """Simulates the config and its alternatives."""
    config = comparison.setup.config
    results = [comparison.result(Alternative(config, is_own=True))]
    known = [config]

    def simulate(tried: Iterable[Alternative]) -> None:
        for alternative in tried:
            if alternative.config not in known and a.is_valid_alternative(alternative):
                known.append(alternative.config)
                results.append(comparison.result(alternative))

    simulate(_without_splits(config))
    simulate(_partial(comparison))
    simulate(_disaggregated(comparison))
    simulate([best.oversampled(factor) for best in _families(results) for factor in a.OVERSAMPLING])
    return Recommendation(tuple(results))


def _without_splits(config: RunConfig) -> list[Alternative]:
    return [a.as_colocated(config)] if a.is_uniform(config) else []


def _partial(comparison: SettingsComparison) -> Iterator[Alternative]:
    """The best fixed split, and the dynamic one from the config's split."""
    config = comparison.setup.config
    if not config.engine_genrms or not a.is_uniform(config):
        return
    shared = a.as_partial(config, 1).config
    if num_slabs(shared) <= len(config.engine_genrms):
        return
    predicted = _least(comparison, [a.as_partial(config, num) for num in a.genrm_slab_counts(shared)])
    near, step = predicted.config.placement.genrm_gpu_sets, a.first_step(shared)
    others = [a.as_partial(config, num) for num in a.genrm_slab_counts(shared, near=near, step=step)]
    yield min((predicted, *others), key=lambda each: comparison.result(each).iteration_s)
    is_partial = config.placement.mode == "partial"
    start = config.placement.genrm_gpu_sets if is_partial else max(num_slabs(shared) // 2, 1)
    yield a.as_partial(config, start, is_dynamic=True)


def _disaggregated(comparison: SettingsComparison) -> Iterator[Alternative]:
    """The numbers of trainer nodes with which sampling and training, by prediction, take the least time
    beside each other; each with its best predicted split."""
    config = comparison.setup.config
    found: list[tuple[float, Alternative]] = []
    for nodes in a.trainer_node_counts(config):
        split_off = a.as_disaggregated(config, nodes, 0, 0).config
        counts = a.genrm_slab_counts(split_off) if config.engine_genrms else iter((0,))
        tried = [a.as_disaggregated(config, nodes, num, 0) for num in counts]
        if tried := [each for each in tried if a.is_valid_alternative(each)]:
            best = _least(comparison, tried)
            train_s = comparison.setup.train_s(best)
            found.append((max(comparison.predicted_s(best), train_s), best))
    for _, best in sorted(found, key=lambda each: each[0])[:MOST_TRAINER_NODES]:
        placement = best.config.placement
        for ahead in (0, 1):
            yield a.as_disaggregated(config, placement.trainer_nodes, placement.genrm_gpu_sets, ahead)


def _least(comparison: SettingsComparison, tried: Sequence[Alternative]) -> Alternative:
    """Returns the alternative whose sampling takes least by the policy's prediction."""
    return min(tried, key=comparison.predicted_s)


def _families(results: Sequence[SimulatedResult]) -> list[Alternative]:
    """Returns the best of each placement and value of ahead."""
    best: dict[tuple[str, int], SimulatedResult] = {}
    for result in results:
        config = result.alternative.config
        family = config.placement.mode, config.rollout.ahead
        if family not in best or result.iteration_s < best[family].iteration_s:
            best[family] = result
    return [each.alternative for each in best.values()]
