"""Simulates alternatives of a config and compares them: iteration time, idle shares, moves.

Large systems are simulated by a share of their slabs with the same share of the batch, because all slabs of a
role do the same work; what is scaled is in `SimulatedSetup.share`.

Batches are sampled and trained by the sampling track of real runs (`yatt.core.phases.sampling_track`),
against a clock that jumps. Loading and publishing weights take no time of their own here: a run counts them
in its seconds of training.
"""

import heapq
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from yatt.config.check import engine_roles, engines_per_slab, max_num_seqs, may_take_turns, slab_limits
from yatt.config.schema import RunConfig
from yatt.core.gpus.batch_loop import BatchSample
from yatt.core.gpus.placement import ROLLOUT, TRAINER
from yatt.core.gpus.prediction import NEVER_S, BatchDemand, modelled_questions, predicted_seconds
from yatt.core.gpus.tail import RoleSpeed
from yatt.core.phases.sampling_track import (
    Action,
    Event,
    Grant,
    Loaded,
    LoadVersion,
    SampleBatch,
    Sampled,
    Track,
    TrackResumed,
    TrackRules,
    VersionPublished,
    WantBatch,
    WantPublishing,
    step,
)
from yatt.forecast.time.alternatives import Alternative, num_gpus
from yatt.forecast.time.figures import RunFigures, drawn_length, even_lengths
from yatt.forecast.time.groups import SimulatedGroups, Workload
from yatt.forecast.time.iterations import SimulatedIteration, colocated_iterations, partial_iterations
from yatt.forecast.time.sampling import SimulatedBatch, SimulatedSetting

NUM_ITERATIONS, NUM_OF_LARGE, LARGE = 6, 4, 2048
"""Numbers of iterations that are simulated, the second for more samples in each than `LARGE`: they average
out sooner."""

WARM_UP = 2
"""Number of iterations that do not count: the policy has seen nothing, and no group was carried over."""

SHARES = ((2048, 64), (4096, 32), (16384, 8))
"""(samples, slabs): a batch of more samples is simulated by a share, if that has at least so many slabs."""

LEAST_SLABS = 32
"""The share of an alternative with fewer slabs is larger, so that it has about so many: with few slabs,
rounding would change the split."""

NUM_LENGTHS = 512
"""Number of lengths that the policy's prediction gets."""

FEW_CHECKED, MOST_CHECKED = 16_384, 80_000
"""To check the share, so many samples are simulated in full, in one or more batches, but no larger batch than
the second number."""


@dataclass(frozen=True, slots=True)
class TrackTimes:
    """When one batch was sampled and trained, in seconds; `age` in policy versions when it was begun."""

    begin_s: float
    sampled_s: float
    trained_s: float
    age: int


class _Agenda:
    """Events to come, in order, and a clock that jumps to the next one."""

    def __init__(self) -> None:
        self.now_s, self._order = 0.0, itertools.count()
        self.events: list[tuple[float, int, Event]] = []

    def add(self, after_s: float, event: Event) -> None:
        heapq.heappush(self.events, (self.now_s + after_s, next(self._order), event))

    def next_event(self) -> Event:
        self.now_s, _, event = heapq.heappop(self.events)
        return event


class _Tracks:
    def __init__(self, sampling_s: Sequence[float], train_s: float, rules: TrackRules) -> None:
        self._sampling_s, self._train_s, self._rules = sampling_s, train_s, rules
        self._track, self._agenda, self._training = Track(), _Agenda(), self._wants()
        self.begins: dict[int, tuple[float, int]] = {}
        self.sampled, self.trained = dict[int, float](), dict[int, float]()

    def run(self) -> list[TrackTimes]:
        self._handle(TrackResumed(0))
        self._handle(next(self._training))
        while self._agenda.events and len(self.trained) < len(self._sampling_s):
            event = self._agenda.next_event()
            if isinstance(event, Sampled):
                self.sampled[event.batch] = self._agenda.now_s
            elif isinstance(event, WantPublishing):
                self.trained[len(self.trained) + 1] = self._agenda.now_s
            self._handle(event)
        return [
            TrackTimes(begin_s, self.sampled[batch], self.trained[batch], age)
            for batch, (begin_s, age) in sorted(self.begins.items())
            if batch in self.trained
        ]

    def _wants(self) -> Iterator[Event]:
        """The training track's events, each after the one before was granted."""
        for batch in itertools.count():
            yield from (VersionPublished(batch), WantBatch(batch + 1), WantPublishing())

    def _handle(self, event: Event) -> None:
        self._track, actions = step(self._track, event, self._rules)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case SampleBatch(batch, version):
                self.begins[batch] = self._agenda.now_s, batch - 1 - version
                self._agenda.add(self._sampling_s[batch - 1], Sampled(batch, is_whole=True))
            case LoadVersion(version):
                self._agenda.add(0.0, Loaded(version))
            case Grant():
                event = next(self._training)
                self._agenda.add(self._train_s if isinstance(event, WantPublishing) else 0.0, event)


def track_times(sampling_s: Sequence[float], train_s: float, *, ahead: int, max_age: int) -> list[TrackTimes]:
    """Returns the times of all batches, in order.

    Args:
        sampling_s: seconds that the sampling of each batch takes.
        train_s: seconds from a batch that is complete to the publication of the policy trained on it.
        ahead: see `rollout.ahead`.
        max_age: see `rollout.max_policy_age`.
    """
    rules = TrackRules(total_iterations=len(sampling_s), ahead=ahead, max_age=max_age)
    return _Tracks(sampling_s, train_s, rules).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedResult:
    """One alternative, in the mean of the iterations after the warm-up.

    Attributes:
        iteration_s: seconds of an iteration.
        sampling_s: seconds from a batch's first request to its last verdict.
        train_s: seconds of training, with saves, publication and loading.
        switch_s: seconds in which all slabs switch.
        tokens_per_s: tokens of completions that are trained on, per second of iterations.
        idle: by role, the share of the engine seconds that it held in which no sequence ran; of the trainer,
            the share of the time in which its own nodes do not train.
        moves: number of moves of slabs per iteration while completions are sampled.
        most_age: maximum number of policy versions between a token and its training.
        split: slabs of each role in the last iteration, at first.
    """

    alternative: Alternative
    iteration_s: float
    sampling_s: float
    train_s: float
    switch_s: float
    tokens_per_s: float
    idle: Mapping[str, float]
    moves: float
    most_age: int
    split: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSetup:
    """What all alternatives have in common.

    Attributes:
        most_slabs: slabs of the largest alternative; with the batch it decides the share.
    """

    config: RunConfig
    figures: RunFigures
    num_iterations: int
    seed: int
    most_slabs: int

    @property
    def num_samples(self) -> int:
        """Number of completions that an iteration trains on."""
        return self.config.trainer.train_batch_size * self.config.rollout.n

    @property
    def share(self) -> int:
        """One of this many slabs, and of this many groups, is simulated."""
        share = 1
        while self._is_long(share) and self.config.trainer.train_batch_size >= 8 * share:
            share *= 2
        return share

    def share_of(self, alternative: Alternative) -> int:
        """Returns the same for one alternative, whose engines may have fewer slabs."""
        share, slabs = self.share, sum(alternative.split.values())
        while share > 1 and slabs / share < LEAST_SLABS:
            share //= 2
        return share

    def _is_long(self, share: int) -> bool:
        samples, slabs = self.num_samples / share, self.most_slabs / share
        return any(samples > most and slabs >= 2 * least for most, least in SHARES)

    @property
    def kept(self) -> float:
        """Share of the groups that are not dropped."""
        return 1.0 if self.figures.kept is None else self.figures.kept

    def roles(self, alternative: Alternative | None = None, share: int = 1) -> dict[str, RoleSpeed]:
        """Returns the speeds of the engine roles; with an alternative, the limits of its split in one of
        `share` slabs."""
        config = self.config if alternative is None else alternative.config
        found = {}
        for role in engine_roles(config):
            least, most = slab_limits(config, role)
            found[role] = RoleSpeed(
                speed=self.figures.speeds[role],
                room=max_num_seqs(config, role),
                engines=engines_per_slab(config, role),
                least=max(least // share, 1),
                most=max(-(-most // share), 1),
                questions=modelled_questions(self.figures.questions.get(role, 1.0)),
            )
        return found

    def workload(self, alternative: Alternative, share: int) -> Workload:
        """Returns what an iteration of an alternative samples, or a share of it."""
        split, rollout = alternative.split, alternative.config.rollout
        scale = sum(part_of(split, share).values()) / sum(split.values())
        verdicts = {role: self.figures.verdicts[role] for role in self.roles() if role != ROLLOUT}
        carries = rollout.oversample > 1 or self.kept < 1
        return Workload(
            draw=lambda numbers, _: BatchSample(drawn_length(self.figures.lengths, numbers), verdicts),
            num_groups=max(round(self.config.trainer.train_batch_size * scale), 1),
            group_size=rollout.n,
            pass_rate=self.kept,
            oversample=rollout.oversample,
            max_cuts=alternative.max_cuts if carries else 0,
        )

    def train_s(self, alternative: Alternative) -> float:
        """Returns seconds of training: in proportion to completions, in inverse proportion to GPUs."""
        placement, launch = alternative.config.placement, alternative.config.launch
        gpus = num_gpus(alternative.config)
        if not alternative.is_shared:
            gpus = placement.trainer_nodes * launch.gpus_per_node
        return (self.figures.train_gpu_s or 0.0) * self.num_samples / gpus

    def setting(self, alternative: Alternative) -> SimulatedSetting:
        """Returns the setting of an alternative's engines; on nodes of their own, only slabs that move
        switch."""
        return SimulatedSetting(
            roles=self.roles(alternative, self.share_of(alternative)),
            switch_s=self.figures.switch_s or 0.0,
            is_dynamic=alternative.is_dynamic,
            is_shared=alternative.is_shared,
            may_turn=may_take_turns(alternative.config),
        )


def part_of(split: Mapping[str, int], share: int) -> dict[str, int]:
    """Returns a split of one of `share` slabs; each role has at least one."""
    return {role: max(round(num / share), 1) for role, num in split.items()}


@dataclass(slots=True)
class SettingsComparison:
    """Simulates alternatives. What two of them have in common is simulated once."""

    setup: SimulatedSetup
    _known: dict[tuple[object, ...], list[SimulatedIteration]] = field(default_factory=dict)

    def result(self, alternative: Alternative) -> SimulatedResult:
        """Simulates one alternative."""
        iterations = self.iterations(alternative)
        warm = min(WARM_UP, len(iterations) - 1)
        counted, train_s, share = (
            iterations[warm:],
            self.setup.train_s(alternative),
            self.setup.share_of(alternative),
        )
        iteration_s, age = self._iteration_s(alternative, iterations, warm)
        carries = alternative.config.rollout.oversample > 1 or self.setup.kept < 1
        return SimulatedResult(
            alternative=alternative,
            iteration_s=iteration_s,
            sampling_s=statistics.mean(each.seconds - each.switch_s for each in counted),
            train_s=train_s,
            switch_s=statistics.mean(each.switch_s for each in counted),
            tokens_per_s=self._scale(alternative) * _mean_tokens(counted) / iteration_s,
            idle=self._idle(alternative, counted, iteration_s),
            moves=share * statistics.mean(each.moves for each in counted),
            most_age=age + (alternative.max_cuts if carries else 0),
            split={role: share * num for role, num in iterations[-1].split.items()}
            if alternative.is_dynamic
            else alternative.split,
        )

    def iterations(self, alternative: Alternative, *, traced: int = -1) -> list[SimulatedIteration]:
        """Simulates the sampling of an alternative; with `traced`, again, and records one iteration."""
        setup, share = self.setup, self.setup.share_of(alternative)
        work, setting = setup.workload(alternative, share), setup.setting(alternative)
        split = part_of(alternative.split, share)
        limits = tuple((each.least, each.most) for each in setting.roles.values())
        key = (
            alternative.takes_turns,
            setting.is_dynamic,
            setting.may_turn,
            setting.is_shared,
            limits,
            tuple(split.items()),
            work.num_groups,
            work.oversample,
            work.max_cuts,
        )
        if key not in self._known or traced >= 0:
            num, seed = setup.num_iterations, setup.seed
            self._known[key] = (
                colocated_iterations(setting, split[ROLLOUT], work, num, seed, traced=traced)
                if alternative.takes_turns
                else partial_iterations(setting, split, work, num, seed, traced=traced)
            )
        return self._known[key]

    def predicted_s(self, alternative: Alternative) -> float:
        """Returns the policy's own prediction for a fixed split, which takes less time than a simulation."""
        setup, roles = self.setup, self.setup.roles()
        demand = BatchDemand(
            completions=even_lengths(setup.figures.lengths, NUM_LENGTHS),
            verdicts={role: [setup.figures.verdicts[role]] for role in roles if role != ROLLOUT},
            num_samples=round(setup.num_samples / setup.kept),
            group_size=setup.config.rollout.n,
            kept=setup.kept,
        )
        return predicted_seconds(alternative.split, demand, roles, ROLLOUT, NEVER_S)

    def check_of_share(self, alternative: Alternative) -> tuple[float, float] | None:
        """Returns the mean seconds of a batch of the whole system and of its share; None if it takes too
        long, or if everything is simulated in full."""
        setup, seconds = self.setup, []
        if setup.share_of(alternative) == 1 or setup.num_samples > MOST_CHECKED or alternative.takes_turns:
            return None
        setting = replace(setup.setting(alternative), is_dynamic=False)
        for share in (1, setup.share_of(alternative)):
            work, split = setup.workload(alternative, share), part_of(alternative.split, share)
            found = []
            for number in range(max(FEW_CHECKED // setup.num_samples, 1)):
                groups = SimulatedGroups(work, 0, setup.seed + number)
                found.append(SimulatedBatch(setting, split, groups.judged).run(groups.first()).seconds)
            seconds.append(statistics.mean(found))
        return seconds[0], seconds[1]

    def _iteration_s(
        self, alternative: Alternative, iterations: list[SimulatedIteration], warm: int
    ) -> tuple[float, int]:
        """Seconds of an iteration, and the greatest age at which a batch is begun."""
        train_s, rollout = self.setup.train_s(alternative), alternative.config.rollout
        if alternative.is_shared:
            return statistics.mean(each.seconds for each in iterations[warm:]) + train_s, 0
        seconds = [each.seconds for each in iterations]
        times = track_times(seconds, train_s, ahead=rollout.ahead, max_age=rollout.max_policy_age)
        begin_s = times[warm - 1].trained_s if warm else 0.0
        return (times[-1].trained_s - begin_s) / (len(times) - warm), max(each.age for each in times)

    def _idle(
        self, alternative: Alternative, counted: list[SimulatedIteration], iteration_s: float
    ) -> dict[str, float]:
        busy_s = {role: statistics.mean(each.busy_s[role] for each in counted) for role in counted[0].busy_s}
        held_s = {role: statistics.mean(each.held_s[role] for each in counted) for role in counted[0].held_s}
        if alternative.is_shared:
            return {role: 1 - busy_s[role] / held_s[role] if held_s[role] else 0.0 for role in busy_s}
        roles, split = self.setup.roles(), part_of(alternative.split, self.setup.share_of(alternative))
        engines = {role: num * roles[role].engines for role, num in split.items()}
        idle = {role: max(1 - busy_s[role] / (engines[role] * iteration_s), 0.0) for role in busy_s}
        return {**idle, TRAINER: max(1 - self.setup.train_s(alternative) / iteration_s, 0.0)}

    def _scale(self, alternative: Alternative) -> float:
        """Groups of the batch for each one that is simulated."""
        simulated = self.setup.workload(alternative, self.setup.share_of(alternative)).num_groups
        return self.setup.config.trainer.train_batch_size / simulated


def _mean_tokens(iterations: list[SimulatedIteration]) -> float:
    return statistics.mean(each.tokens for each in iterations)
