"""Selects the metrics that a report draws, and describes the trend of reward and validation."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from yatt.obs.metrics import CHANGED_INPUTS, STEP, is_validation
from yatt.obs.page.charts import Series, finite_points, line_chart

Row = dict[str, Any]

REWARD = "critic/rewards/mean"
LOSS, HELD_OUT = "train/loss", "val/loss"
"""Of runs with given completions, which have no reward."""
VALIDATION = "val-core/"
MIN_JUDGED_ROWS = 4
MIN_MOVE = 0.1
"""Smallest change, as a fraction of the curve's range; less is called flat."""

SMALL = (
    (
        "Pairs in which the preferred completion has the higher reward",
        (("training", "train/accuracy"), ("held-out", "val/accuracy")),
    ),
    ("Rewards of pairs", (("preferred", "train/chosen_reward"), ("other", "train/rejected_reward"))),
    ("Response length (tokens)", (("mean", "response_length/mean"), ("max", "response_length/max"))),
    ("KL", (("to the sampling policy", "actor/ppo_kl"), ("to the reference", "actor/kl_loss"))),
    ("Gradient norm", (("gradient norm", "actor/grad_norm"),)),
    ("Entropy", (("entropy", "actor/entropy"),)),
    ("Sampler against trainer (probability)", (("mean difference", "training/rollout_probs_diff_mean"),)),
    ("Policy loss", (("policy loss", "actor/pg_loss"),)),
    ("Variance of returns that the critic explains", (("explained", "critic/vf_explained_var"),)),
    ("Seconds per iteration", (("seconds", "timing_s/step"),)),
    ("Tokens per second and GPU", (("tokens/s", "perf/throughput"),)),
    ("Utilization of GPUs that train (MFU)", (("MFU", "perf/mfu/actor"),)),
    (
        "Device memory of trainer ranks (GB)",
        (("allocated", "perf/max_memory_allocated_gb"), ("reserved", "perf/max_memory_reserved_gb")),
    ),
    ("Host memory of the fullest node (GB)", (("used", "perf/cpu_memory_used_gb"),)),
    ("Completions truncated at the maximum length (fraction)", (("cut", "response_length/clip_ratio"),)),
)
COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6")


def values_of(rows: Sequence[Row], key: str) -> tuple[tuple[float, float], ...]:
    """Returns a metric's points over iterations, without missing and non-numeric values."""
    return finite_points(
        (float(row[STEP]), float(row[key])) for row in rows if isinstance(row.get(key), int | float)
    )


def reward_chart(rows: Sequence[Row], size: tuple[int, int] = (1180, 340)) -> Markup:
    """Draws reward and validation in one chart; validation gets its own axis if its scale differs. Where
    completions are given, draws their loss and that of held-out ones.

    Args:
        size: width and height in pixels; text keeps its proportion to them.
    """
    if loss := values_of(rows, LOSS):
        lines = [Series(name="training", points=loss, colour="c1", changes=input_change_lines(rows))]
        held_out = values_of(rows, HELD_OUT)
        lines += [Series(name="held-out", points=held_out, dashed=True, colour="c2")] if held_out else []
        return line_chart(lines, title="Loss", size=size)
    reward = values_of([row for row in rows if row[STEP]], REWARD)
    keys = sorted({key for row in rows for key in row if is_validation(key)})
    curves = {key: values_of(rows, key) for key in keys}
    apart = _differ_in_size(reward, [point for points in curves.values() for point in points])
    series = [Series(name="reward (training)", points=reward, colour="c1", changes=input_change_lines(rows))]
    series += [
        Series(
            name=f"validation {key.removeprefix(VALIDATION)}",
            points=points,
            dashed=True,
            on_right=apart,
            colour=COLOURS[1 + index % (len(COLOURS) - 1)],
        )
        for index, (key, points) in enumerate(curves.items())
    ]
    return line_chart(series, title="Reward and validation", size=size)


def input_change_lines(rows: Sequence[Row]) -> dict[float, str]:
    """Returns where the curves were made with other inputs than before, and what is said there."""
    places = values_of(rows, CHANGED_INPUTS)
    return {
        step - 0.5: f"from iteration {step:.0f} on: {number:.0f} inputs are others (see Timeline)"
        for step, number in places
        if number
    }


def small_charts(rows: Sequence[Row]) -> list[tuple[str, Markup]]:
    """Returns title and SVG of the other curves that have values."""
    trained = [row for row in rows if row[STEP]]
    charts = []
    for title, names in SMALL:
        series = [
            Series(name=name, points=values_of(trained, key), colour=COLOURS[index])
            for index, (name, key) in enumerate(names)
        ]
        series = [line for line in series if any(y for _, y in line.points)]
        if series:
            alone = f": {series[0].name}" if len(series) == 1 < len(names) else ""
            charts.append((title + alone, line_chart(series, title=title + alone, size=(380, 202))))
    return charts


def verdict_on_curves(rows: Sequence[Row]) -> tuple[str, bool]:
    """Returns one sentence that compares reward and validation, or the losses of training and held-out
    completions, and whether it is a warning."""
    if loss := values_of(rows, LOSS):
        return _verdict_on_losses(trend_of(loss), values_of(rows, HELD_OUT))
    reward = trend_of(values_of([row for row in rows if row[STEP]], REWARD))
    keys = sorted({key for row in rows for key in row if is_validation(key)})
    moved = {key: trend_of(values_of(rows, key)) for key in keys}
    falling = [key.removeprefix(VALIDATION) for key, way in moved.items() if way < 0]
    if reward > 0 and falling:
        return (
            f"Reward rises while validation falls ({', '.join(falling)}): the policy may exploit the reward "
            "(reward hacking). Read the completions below.",
            True,
        )
    words = _WORDS
    told = [f"{key.removeprefix(VALIDATION)} {words[way]}" for key, way in moved.items()]
    validation = f"; validation: {', '.join(told)}" if told else "; there is no validation"
    return f"Reward {words[reward]}{validation}.", False


_WORDS = {1: "rises", 0: "is flat, or has too few points", -1: "falls"}


def _verdict_on_losses(trend: int, held_out: Sequence[tuple[float, float]]) -> tuple[str, bool]:
    if not held_out:
        return f"Loss {_WORDS[trend]}; no rows are held out (data.val_files).", False
    other = trend_of(held_out)
    if trend < 0 < other:
        return "Loss falls while that of held-out rows rises: the model learns its rows by heart.", True
    return f"Loss {_WORDS[trend]}; held-out loss {_WORDS[other]}.", False


def trend_of(points: Sequence[tuple[float, float]]) -> int:
    """Returns 1, 0 or -1: whether the last third of a curve is above, near or below its first third.

    A change counts if it is more than `MIN_MOVE` of the curve's range and more than half the spread inside
    either third; noise is called flat.
    """
    if len(points) < MIN_JUDGED_ROWS:
        return 0
    values = [y for _, y in points]
    third = max(2, len(values) // 3)
    first, last = values[:third], values[-third:]
    move = sum(last) / third - sum(first) / third
    spread = max(max(first) - min(first), max(last) - min(last))
    counts = abs(move) > MIN_MOVE * (max(values) - min(values)) and abs(move) > spread / 2
    return (move > 0) - (move < 0) if counts else 0


def _differ_in_size(left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]) -> bool:
    """Whether one curve would look flat on the other's axis."""
    if not left or not right:
        return False
    spans = [max(y for _, y in points) - min(y for _, y in points) for points in (left, right)]
    together = [y for _, y in (*left, *right)]
    whole = max(together) - min(together)
    return whole > 0 and any(0 < span < 0.12 * whole for span in spans)
