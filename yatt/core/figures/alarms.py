"""Detects that a run does not learn, from the metrics of its iterations. Pure.

    state, changes = step(state, row, rules)

An alarm begins when its sign was seen in `rules.iterations` iterations in a row, some at the first one, and
ends with the first iteration without the sign. The state depends only on the rows: a resumed run that handles
the same rows is in the same state.

One cause gives one alarm: a flat reward also makes groups flat and the gradient zero, so a sign that follows
from another sign is not reported.

Running median: outliers shift a median much less than a mean (Hampel's identifier; Davies and Gather, The
identification of multiple outliers, JASA 88, 1993).
"""

import math
import statistics
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from yatt.core.figures.drop_counters import (
    DROPPED_GROUPS,
    FAILED_GROUPS,
    drops_message,
    is_drop_counter,
)
from yatt.core.figures.judge_signs import (
    JUDGE_WORDS,
    ScoreState,
    signs_by_alarm,
)

Row = Mapping[str, Any]

STEP = "training/global_step"
FLAT_GROUPS = "training/flat_groups"
"""Fraction of trained groups whose rewards are all equal."""

MEDIAN_ROWS, MIN_ROWS = 50, 5
"""Maximum and minimum number of losses in the running median; losses with a sign are left out."""

FACTOR = 10.0
"""A loss above this multiple of its running median raises the alarm."""

NO_GRADIENT = 1e-8
"""A gradient norm up to this counts as zero: Adam's usual epsilon, below which its steps vanish."""

FAR_KL = 1.0
"""Largest change of the policy within one iteration, in nats per token. PPO's stopping rules use 0.01 to 0.05
(target_kl of Spinning Up); a learning rate 100 times too large was measured to give 2 to 17."""

DROPS_EVERY = 20
"""Minimum number of iterations between reports of dropped groups."""

MOST_FAILED = 0.1
"""Share of held-out completions without a score above which their mean says little."""

VALIDATION_SHARES = "val-aux/", "/failed_share"
"""Beginning and end of the keys of such shares."""


class Alarm(Enum):
    """The kinds of alarms."""

    REWARD_FLAT = "reward.flat"
    GROUPS_FLAT = "groups.flat"
    NO_GRADIENT = "gradient.none"
    ALL_CUT = "completions.cut"
    LOSS_EXPLODED = "loss.exploded"
    POLICY_JUMPS = "policy.jumps"
    VALIDATION_FAILED = "validation.failed"
    JUDGE_UNREADABLE = "judge.unreadable"
    JUDGE_GAP = "judge.gap"
    JUDGE_PLACE = "judge.place"
    JUDGE_UNSURE = "judge.unsure"
    JUDGE_CRITERION = "judge.criterion"
    JUDGE_LENGTH = "judge.length"
    JUDGE_SAME = "judge.same"


AT_ONCE = frozenset({Alarm.VALIDATION_FAILED, Alarm.JUDGE_UNREADABLE})
"""Alarms that begin with the first sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings of a run's alarms.

    Attributes:
        iterations: number of iterations in a row with a sign after which its alarm begins; 0: no alarms.
        compares_groups: advantages are relative to the prompt group, so a flat group has no gradient.
        may_stop: completions can end before the maximum length.
        kl_coef: coefficient of the KL term in the loss; 0: no such term.
        sums_tokens: the loss is a sum over a completion's tokens, not a mean.
        judges: names of the GenRMs whose scores are part of the reward.
        checks: names of the scores that a judge is compared with: functions, and GenRMs of weight 0.
    """

    iterations: int
    compares_groups: bool = True
    may_stop: bool = True
    kl_coef: float = 0.0
    sums_tokens: bool = False
    judges: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begins:
    """An alarm begins at iteration `iteration`; its sign was first seen at `since`."""

    alarm: Alarm
    iteration: int
    since: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """An alarm ended."""

    alarm: Alarm
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Prompt groups were dropped since this was last reported."""

    iteration: int
    message: str


Change = Begins | Ends | Dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Streak:
    """A sign that was seen in `length` iterations in a row, each time with the same `value`."""

    since: int
    length: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmState:
    """State of the alarms after a row. `drops`: counters since drops were last reported."""

    iteration: int = -1
    streaks: Mapping[Alarm, Streak] = field(default_factory=dict)
    ringing: Mapping[Alarm, Begins] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    drops: Mapping[str, float] = field(default_factory=dict)
    drops_since: int = 0
    drops_told: int | None = None
    scores: ScoreState = field(default_factory=ScoreState)


def step(state: AlarmState, row: Row, rules: Rules) -> tuple[AlarmState, tuple[Change, ...]]:
    """Handles an iteration's row; a repeated iteration changes nothing."""
    iteration = row[STEP]
    if not rules.iterations or iteration <= state.iteration:
        return state, ()
    scores = state.scores.after(row, rules.judges, rules.checks)
    signs = _signs(row, state.losses, rules)
    explained = _explained(row, signs)
    if scores.gaps():  # it explains no other sign
        signs[Alarm.JUDGE_GAP] = 0.0
    if not scores.has_longer_texts:
        signs.pop(Alarm.JUDGE_LENGTH, None)
    streaks = {alarm: _longer(state.streaks.get(alarm), iteration, value) for alarm, value in signs.items()}
    # A sign that follows from another sign neither continues nor ends its own streak.
    streaks |= {alarm: s for alarm, s in state.streaks.items() if alarm in explained}
    due = {a for a, streak in streaks.items() if streak.length >= (1 if a in AT_ONCE else rules.iterations)}
    if Alarm.REWARD_FLAT in due:
        due.discard(Alarm.GROUPS_FLAT)
    # A streak that starts again in this iteration with another value is a new alarm of the same kind.
    ringing = {
        alarm: begin
        for alarm, begin in state.ringing.items()
        if alarm in due and begin.since == streaks[alarm].since
    }
    ended = [Ends(alarm=alarm, iteration=iteration) for alarm in state.ringing if alarm not in ringing]
    begun = [
        _begin(alarm, row, streaks[alarm], scores, rules) for alarm in Alarm if alarm in due - ringing.keys()
    ]
    losses = state.losses
    if Alarm.LOSS_EXPLODED not in signs and iteration:  # 0 is validation only
        losses = (*losses, _loss(row, rules))[-MEDIAN_ROWS:]
    state = replace(
        state,
        iteration=iteration,
        streaks=streaks,
        losses=losses,
        scores=scores,
        ringing=ringing | {begin.alarm: begin for begin in begun},
    )
    state, dropped = _drops(state, row)
    return state, (*ended, *begun, *dropped)


def _longer(streak: Streak | None, iteration: int, value: float) -> Streak:
    if streak is None or streak.value != value:
        return Streak(since=iteration, length=1, value=value)
    return replace(streak, length=streak.length + 1)


# ---- signs --------------------------------------------------------------------------------------


def _signs(row: Row, losses: tuple[float, ...], rules: Rules) -> dict[Alarm, float]:
    """Returns the signs in the row, each with its value."""
    found = _signs_of_scores(row, rules)
    highest, lowest = _number(row, "critic/rewards/max"), _number(row, "critic/rewards/min")
    if highest is not None and highest == lowest:
        found[Alarm.REWARD_FLAT] = highest
    if rules.compares_groups and _number(row, FLAT_GROUPS) == 1.0:
        found[Alarm.GROUPS_FLAT] = 0.0
    if rules.may_stop and (_number(row, "response_length/clip_ratio") or 0.0) >= 1.0:
        found[Alarm.ALL_CUT] = 0.0
    if _has_exploded(row, losses, rules):
        found[Alarm.LOSS_EXPLODED] = 0.0
    if _jumps(row):
        found[Alarm.POLICY_JUMPS] = 0.0
    if _has_no_gradient(row):
        found[Alarm.NO_GRADIENT] = 0.0
    return {alarm: value for alarm, value in found.items() if alarm not in _explained(row, found)}


def _signs_of_scores(row: Row, rules: Rules) -> dict[Alarm, float]:
    found = {}
    if any(share > MOST_FAILED for share in _validation_shares(row)):
        found[Alarm.VALIDATION_FAILED] = 0.0
    of_judges = signs_by_alarm(row, rules.judges)
    found |= {Alarm(name): 0.0 for name, says in of_judges.items() if says}
    if names := of_judges["judge.criterion"]:  # others in the next iteration are another alarm
        found[Alarm.JUDGE_CRITERION] = float(zlib.crc32("".join(names).encode()))
    return found


def _validation_shares(row: Row) -> list[float]:
    begin, end = VALIDATION_SHARES
    return [_number(row, key) or 0.0 for key in row if key.startswith(begin) and key.endswith(end)]


def _explained(row: Row, found: Mapping[Alarm, float]) -> set[Alarm]:
    """Returns the signs in the row that follow from another sign in it, or cannot be seen in it."""
    explained = set() if _validation_shares(row) else {Alarm.VALIDATION_FAILED}
    if Alarm.JUDGE_UNREADABLE in found:
        explained |= {Alarm.REWARD_FLAT, Alarm.GROUPS_FLAT}
    if found.keys() & {Alarm.JUDGE_UNREADABLE, Alarm.REWARD_FLAT, Alarm.GROUPS_FLAT}:
        explained.add(Alarm.JUDGE_SAME)
    if _jumps(row) and Alarm.LOSS_EXPLODED in found:
        explained.add(Alarm.POLICY_JUMPS)
    if _has_no_gradient(row) and _explains_gradient(row, found):
        explained.add(Alarm.NO_GRADIENT)
    return explained


def _jumps(row: Row) -> bool:
    return abs(_number(row, "actor/ppo_kl") or 0.0) > FAR_KL


def _has_no_gradient(row: Row) -> bool:
    norm = _number(row, "actor/grad_norm")
    return norm is not None and (norm <= NO_GRADIENT or not math.isfinite(norm))


def _explains_gradient(row: Row, found: Mapping[Alarm, float]) -> bool:
    if _number(row, "response_length/masked_ratio") == 1.0:
        return Alarm.ALL_CUT in found
    return bool(found.keys() - _WITH_GRADIENT)


def _loss(row: Row, rules: Rules) -> float:
    """Returns the magnitude of the loss per token, from the terms that the row has."""
    policy, kl = _number(row, "actor/pg_loss") or 0.0, _number(row, "actor/kl_loss") or 0.0
    if rules.sums_tokens:
        policy /= max(1.0, _number(row, "response_length/mean") or 1.0)
    return abs(policy) + rules.kl_coef * abs(kl)


def _has_exploded(row: Row, losses: tuple[float, ...], rules: Rules) -> bool:
    """Whether the loss is not finite, or far above its running median and above the largest advantage.

    The mean over tokens of ratio times advantage stays below the largest advantage while the ratios are about
    1. On policy it is about 0, so a comparison with the median alone would detect rounding errors.
    """
    loss = _loss(row, rules)
    if not math.isfinite(loss):
        return True
    ends = (_number(row, f"critic/advantages/{end}") or 0.0 for end in ("max", "min"))
    scale = max(abs(end) for end in ends)
    if not scale:
        return False
    usual = statistics.median(losses) if len(losses) >= MIN_ROWS else scale
    return loss > max(scale, FACTOR * usual)


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None


_WITH_GRADIENT = {
    *(Alarm.ALL_CUT, Alarm.NO_GRADIENT, Alarm.JUDGE_PLACE, Alarm.JUDGE_UNSURE, Alarm.JUDGE_CRITERION),
    *(Alarm.JUDGE_LENGTH, Alarm.JUDGE_SAME),
}
"""Signs that are no reason for a gradient of 0."""

# ---- sentences ----------------------------------------------------------------------------------


def _begin(alarm: Alarm, row: Row, streak: Streak, scores: ScoreState, rules: Rules) -> Begins:
    (seen, cure), iteration = JUDGE_WORDS.get(alarm.value) or _WORDS[alarm], row[STEP]
    when = f"in the last {streak.length} iterations, since iteration {streak.since}"
    if streak.length == 1:
        when = f"in iteration {iteration}"
    words = {
        "gaps": "; ".join(gap.in_words() for gap in scores.gaps()),
        "judges": ", ".join(signs_by_alarm(row, rules.judges).get(alarm.value, ())),
    }
    message = f"{seen.format(value=streak.value, **words)} {when}. {cure}"
    return Begins(alarm=alarm, iteration=iteration, since=streak.since, message=message)


_WORDS = {
    Alarm.VALIDATION_FAILED: (
        f"more than {MOST_FAILED:.0%} of the held-out completions had no score",
        "Their mean is that of the others, and chooses no checkpoint. events.jsonl (validation.failed) has "
        "the reason: a mistake in the function, or rows of data.val_files that it does not expect.",
    ),
    Alarm.REWARD_FLAT: (
        "the reward was {value:.3f} for every completion",
        "Nothing is learned from it. Look at completions and their scores in samples.jsonl or `yatt report`, "
        "at data.ground_truth_key, and at the reward function.",
    ),
    Alarm.GROUPS_FLAT: (
        "the rewards of every prompt group were all equal",
        "Without a difference in its group no completion has an advantage. Look at samples.jsonl: the "
        "prompts may be too easy or too hard, rollout.temperature too low, or the reward blind to the "
        "completion. algorithm.filter_groups leaves such groups out.",
    ),
    Alarm.NO_GRADIENT: (
        "the gradient norm was 0 or not finite",
        "The policy does not change any more. Look at actor/pg_loss, actor/pg_clipfrac, actor/entropy and "
        "critic/advantages in metrics.jsonl: the policy has collapsed (optimizer.lr was too high), or every "
        "token is beyond algorithm.clip_ratio_low and clip_ratio_high.",
    ),
    Alarm.ALL_CUT: (
        "every completion was cut at rollout.max_response_tokens",
        "Answers have no end. Raise rollout.max_response_tokens, or look in samples.jsonl for why the "
        "policy does not stop: rollout.stop, the chat template (data.apply_chat_template).",
    ),
    Alarm.LOSS_EXPLODED: (
        "the loss was not finite, or far over its running median and over the largest advantage",
        "The policy moves too far in one step. Lower optimizer.lr, set algorithm.clip_ratio_c (3.0 is "
        "usual), and go on from a checkpoint before it: run.from_checkpoint.",
    ),
    Alarm.POLICY_JUMPS: (
        f"the policy moved by more than {FAR_KL:g} nat a token within an iteration (actor/ppo_kl)",
        "It is no more the policy that sampled. Lower optimizer.lr or trainer.ppo_epochs, set "
        "optimizer.clip_grad, and go on from a checkpoint before it: run.from_checkpoint.",
    ),
}

# ---- dropped groups -----------------------------------------------------------------------------


def _drops(state: AlarmState, row: Row) -> tuple[AlarmState, tuple[Dropped, ...]]:
    """Adds the row's counters to those not reported yet, and reports the sums when a report is due."""
    drops = dict(state.drops)
    since = state.drops_since or state.iteration
    for key, value in row.items():
        if is_drop_counter(key):
            drops[key] = drops.get(key, 0.0) + (value or 0.0)
    is_time = state.drops_told is None or state.iteration >= state.drops_told + DROPS_EVERY
    if not drops.get(DROPPED_GROUPS) and not drops.get(FAILED_GROUPS):
        return replace(state, drops={}, drops_since=0), ()
    if not is_time:
        return replace(state, drops=drops, drops_since=since), ()
    told = Dropped(iteration=state.iteration, message=drops_message(drops, since, state.iteration))
    return replace(state, drops={}, drops_since=0, drops_told=state.iteration), (told,)
