"""Events of prompt groups, of their judging and recording, and alarms about them."""

from collections.abc import Sequence

from yatt.records.events.event import Count, Event, FrequentEvent


class GroupsOpened(FrequentEvent, tag="rollout.group.open", frozen=True, kw_only=True):
    """Prompt groups begin."""

    numbers: Sequence[Count]


class GroupsReused(FrequentEvent, tag="groups.reuse", frozen=True, kw_only=True):
    """Prompt groups that an earlier attempt kept."""

    iteration: Count
    numbers: Sequence[Count]


class GroupAccepted(FrequentEvent, tag="rollout.group.accept", frozen=True, kw_only=True):
    """A prompt group may be trained on."""

    number: Count


class GroupDropped(FrequentEvent, tag="rollout.group.drop", frozen=True, kw_only=True):
    """A prompt group is not trained on."""

    number: Count
    reason: str


class KeptGroupsPassedOver(Event, tag="groups.pass_over", frozen=True, kw_only=True):
    """A file of kept groups cannot be used."""

    name: str
    reason: str


class GroupsNotKept(Event, tag="groups.not_kept", frozen=True, kw_only=True):
    """Finished groups cannot be kept for a later attempt."""

    iteration: Count
    error: str


class VerdictUnreadable(FrequentEvent, tag="judge.unreadable", frozen=True, kw_only=True):
    """An example of a GenRM's answers without a verdict."""

    genrm: str
    number: Count
    why: str


class JudgeAwaited(Event, tag="judge.wait", frozen=True, kw_only=True):
    """A GenRM service is down and waited for; without `error`: not any more."""

    genrm: str
    error: str


class JudgeRefreshed(Event, tag="judge.refresh", frozen=True, kw_only=True):
    """A GenRM has other weights from this iteration on: those of its run's checkpoint `source`."""

    genrm: str
    iteration: Count
    source: Count


class JudgeNotRefreshed(Event, tag="judge.not_refreshed", frozen=True, kw_only=True):
    """A GenRM keeps its weights, because those of a newer checkpoint cannot be used."""

    genrm: str
    iteration: Count
    why: str


class PromptsEvaluated(FrequentEvent, tag="evaluation.progress", frozen=True, kw_only=True):
    """So many of a node's prompts of an evaluation are sampled, or scored by these GenRMs."""

    genrms: Sequence[str] = ()
    done: Count
    total: Count


class ValidationFailed(Event, tag="validation.failed", frozen=True, kw_only=True):
    """Some completions of held-out prompts have no score; the most frequent reason."""

    iteration: Count
    source: str
    reward: str
    failed: Count
    count: Count
    why: str


class AlarmBegan(Event, tag="alarm.begin", frozen=True, kw_only=True):
    """Metrics show that something is wrong, since an iteration."""

    alarm: str
    iteration: Count = 0
    since: Count
    message: str


class AlarmEnded(Event, tag="alarm.end", frozen=True, kw_only=True):
    """The alarm is over."""

    alarm: str
    iteration: Count


class DropsNoted(Event, tag="alarm.drops", frozen=True, kw_only=True):
    """Many prompt groups were dropped in an iteration."""

    iteration: Count = 0
    message: str


class SamplesLost(Event, tag="rollouts.lost", frozen=True, kw_only=True):
    """Recorded samples could not be written."""

    iteration: Count
    samples: Count
    error: str
