"""The part of a report about slabs: how long roles were idle, the split, and whether moves were worth it."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup

from yatt.core.gpus.placement import ROLLOUT
from yatt.obs.page.charts import Series, finite_points, line_chart
from yatt.obs.page.page_file import render_part
from yatt.obs.story.slab_history import FLOOR, SPLIT, TAIL, SlabHistory, SlabMove
from yatt.obs.story.slabs_now import split_in_words
from yatt.records.events.slabs import BatchMeasured

MOST_ROWS = 100
"""Rows of the table of moves, the newest."""

MOST_NAMES = 8
"""Slabs that are named in one cell."""

MOST_ROLES = 6
LAST = 10
"""Number of the newest batches in the sentences."""

LARGE, HALF = (1180, 250), (560, 210)
ROLLOUT_COLOUR, GENRM_COLOURS = "c2", ("c3", "c4", "c6", "c1", "c5")
WHY = {TAIL: "end of a batch", SPLIT: "another split", FLOOR: "floor of a role"}
Key = tuple[int, int]
Row = tuple[int | str, tuple[str, ...]]
"""Iteration of a batch, and cells of the table of moves."""


def slabs_part(history: SlabHistory) -> Markup:
    """Returns the part: sentences, three charts, the table of moves, and engines that could not be built."""
    keys = history.newest()
    if not keys and not history.moves and not history.unfit and not history.failures:
        return render_part("nothing", "No batch was measured yet.")
    batches = [history.batches[key] for key in keys]
    roles = roles_of(batches)
    moves, left_out = _moves(history)
    idle = line_chart(_role_lines(roles, batches, _idle), title="Idle share of each role", size=HALF)
    slabs = line_chart(_slab_lines(history, keys, roles), title="GPU sets of each role", size=HALF)
    said, seconds = batch_sentences(history, keys), _seconds_chart(history, keys)
    return render_part("slabs", _warnings(history), said, seconds, idle, slabs, moves, left_out)


def roles_of(batches: Iterable[BatchMeasured]) -> list[str]:
    """Returns rollout and the GenRMs that most batches have, at most `MOST_ROLES`."""
    found = Counter(role for batch in batches for role in batch.roles)
    most = sorted(found, key=lambda role: (role != ROLLOUT, -found[role], role))[:MOST_ROLES]
    return sorted(most, key=lambda role: (role != ROLLOUT, role))


def batch_sentences(history: SlabHistory, keys: Sequence[Key]) -> list[str]:
    """Returns what the newest batches took, what they would have taken without idle engines, how good the
    predictions were, and the number of moves."""
    batches = [history.batches[key] for key in keys[-LAST:]]
    known = [(batch.seconds, batch.bound_s) for batch in batches if batch.bound_s is not None]
    found = []
    if known and (took_s := statistics.mean(seconds for seconds, _ in known)) > 0:
        bound_s = statistics.mean(bound_s for _, bound_s in known)
        is_split = len(roles_of(batches)) > 1
        found.append(
            f"Sampling and judging a batch took {took_s:.1f} s on average, in the last {len(known)} measured "
            f"batches. Without idle engines the same work would have taken {bound_s:.1f} s "
            f"({bound_s / took_s:.0%})"
            f"{': no split of these sets can be faster with engines as full as these' if is_split else ''}."
        )
    if errors := [error for key in keys[-LAST:] if (error := _error(history, key)) is not None]:
        off = statistics.median(errors)
        found.append(
            f"These batches took {abs(off):.0%} {'longer' if off >= 0 else 'less'} than predicted (median of "
            f"{len(errors)})."
        )
    if history.choices or history.moves:
        found.append(_counts(history))
    return found


def _counts(history: SlabHistory) -> str:
    num_changes = sum(choice.is_change for choice in history.choices.values())
    words = (
        (TAIL, "near the end of a batch"),
        (SPLIT, "to another split while a batch was sampled"),
        (FLOOR, "for a role below its floor"),
    )
    moves = ", ".join(f"{history.num_moves.get(reason, 0):,} {text}" for reason, text in words)
    failed = f"; {history.num_not_moved:,} were not carried out" if history.num_not_moved else ""
    return f"Changes of the split: {num_changes:,}. Moves of a GPU set: {moves}{failed}."


def _error(history: SlabHistory, key: Key) -> float | None:
    """Returns measured by predicted seconds of a batch, minus 1."""
    choice = history.choices.get(key)
    if choice is None or not choice.chosen_s:
        return None
    return history.batches[key].seconds / choice.chosen_s - 1


# ---- charts -------------------------------------------------------------------------------------


def _seconds_chart(history: SlabHistory, keys: Sequence[Key]) -> Markup:
    batches = [history.batches[key] for key in keys]
    chosen = [(key[1], history.choices[key].chosen_s) for key in keys if key in history.choices]
    lines = [
        Series(name="measured", points=_points((b.iteration, b.seconds) for b in batches), colour="c1"),
        Series(name="predicted", points=_points(chosen), colour="c5", dashed=True),
        Series(
            name="without idle engines",
            points=_points((b.iteration, b.bound_s) for b in batches),
            colour="c6",
            dashed=True,
        ),
    ]
    return line_chart(lines, title="Seconds of sampling and judging a batch", size=LARGE)


def _role_lines(
    roles: Sequence[str],
    batches: Sequence[BatchMeasured],
    value: Callable[[BatchMeasured, str], float | None],
) -> list[Series]:
    return [
        Series(
            name=role,
            colour=_colour(role, roles),
            points=_points((batch.iteration, value(batch, role)) for batch in batches),
        )
        for role in roles
    ]


def _idle(batch: BatchMeasured, role: str) -> float | None:
    return batch.roles[role].idle if role in batch.roles else None


def _slabs(batch: BatchMeasured, role: str) -> float | None:
    return batch.roles[role].slabs if role in batch.roles else None


def _slab_lines(history: SlabHistory, keys: Sequence[Key], roles: Sequence[str]) -> list[Series]:
    """Returns each role's slabs at the begin of a batch; at its end too, dashed, if they differ."""
    batches = [history.batches[key] for key in keys]
    at_end = _role_lines(roles, batches, _slabs)
    begun = [
        Series(
            name=role,
            colour=_colour(role, roles),
            points=_points((key[1], history.split_of(key).get(role)) for key in keys),
        )
        for role in roles
    ]
    if not any(line.points for line in begun):
        return at_end
    dashed = [
        Series(name=f"{end.name}, end of the batch", points=end.points, colour=end.colour, dashed=True)
        for end, begin in zip(at_end, begun, strict=True)
        if end.points != begin.points
    ]
    return [*begun, *dashed]


def _colour(role: str, roles: Sequence[str]) -> str:
    if role == ROLLOUT:
        return ROLLOUT_COLOUR
    judges = [each for each in roles if each != ROLLOUT]
    return GENRM_COLOURS[judges.index(role) % len(GENRM_COLOURS)]


def _points(values: Iterable[tuple[int, float | None]]) -> tuple[tuple[float, float], ...]:
    return finite_points((float(x), float(y)) for x, y in values if y is not None)


# ---- tables -------------------------------------------------------------------------------------


def _moves(history: SlabHistory) -> tuple[list[Row], int]:
    """Returns changes of the split and moves, newest first, and the number of those that are left out."""
    found: list[tuple[Key, SlabMove | None]] = [
        (key, None) for key, each in history.choices.items() if each.is_change
    ]
    found += [(move.batch, move) for move in history.moves if not _is_in_split_row(history, move)]
    found.sort(key=lambda each: (each[0], each[1] is not None))
    rows = [
        _split_row(history, key) if move is None else _move_row(history, move)
        for key, move in reversed(found[-MOST_ROWS:])
    ]
    return rows, len(found) - MOST_ROWS


def _is_in_split_row(history: SlabHistory, move: SlabMove) -> bool:
    choice = history.choices.get(move.batch)
    return move.reason == SPLIT and choice is not None and choice.is_change and not move.is_unfit


def _split_row(history: SlabHistory, key: Key) -> Row:
    """A change of the split: how long the batch before it and the one after it took."""
    choice = history.choices[key]
    mine = [move for move in history.moves if move.batch == key and move.reason == SPLIT]
    before, after = history.batches.get((key[0], key[1] - 1)), history.batches.get(key)
    took = f"batch {key[1]} took {_in_s(after.seconds)}" if after else f"batch {key[1]} is not measured"
    predicted = f", predicted {_in_s(choice.chosen_s)}" if after and choice.chosen_s is not None else ""
    earlier = f"; batch {key[1] - 1} took {_in_s(before.seconds)}" if before else ""
    seconds = [move.seconds for move in mine if move.seconds is not None]
    lasted = f"; moved in {_in_s(max(seconds))}" if seconds else ""
    slabs = _named([move.slab for move in mine]) or "those at the next barriers"
    words = split_in_words(choice).partition(" (")[0]
    outcome = f"{took}{predicted}{earlier}{lasted}"
    gain = f"{_gain(choice.gain_s)} per batch" if choice.gain_s is not None else ""
    return key[1] or "", (slabs, words, WHY[SPLIT], gain, outcome)


def _move_row(history: SlabHistory, move: SlabMove) -> Row:
    gain_s = move.tail.gain_s if move.tail is not None else None
    why = WHY[move.reason]
    if move.tail is not None and move.tail.running is not None and move.tail.backlog_s is not None:
        why += f": it ran {move.tail.running} requests, backlog {_in_s(move.tail.backlog_s)}"
    where = f"{move.before or '?'} to {move.after}"
    return move.batch[1] or "", (move.slab, where, why, _gain(gain_s), _outcome(history, move))


def _outcome(history: SlabHistory, move: SlabMove) -> str:
    if move.is_unfit:
        return "the engine could not be built: the GPU set went back to its first role"
    if move.has_moved is None:
        return "no answer"
    if not move.has_moved:
        return "another order overtook it"
    moved = f"moved in {_in_s(move.seconds)}" if move.seconds is not None else "moved"
    if move.tail is not None and move.tail.switch_s is not None:
        moved += f", expected {_in_s(move.tail.switch_s)}"
    batch, choice = history.batches.get(move.batch), history.choices.get(move.batch)
    if batch is None:
        return moved
    predicted = f", predicted {_in_s(choice.chosen_s)}" if choice and choice.chosen_s is not None else ""
    return f"{moved}; the batch took {_in_s(batch.seconds)}{predicted}"


def _gain(seconds: float | None) -> str:
    return "" if seconds is None else _in_s(seconds)


def _named(slabs: Sequence[str]) -> str:
    more = f" and {len(slabs) - MOST_NAMES} more" if len(slabs) > MOST_NAMES else ""
    return ", ".join(slabs[:MOST_NAMES]) + more


def _warnings(history: SlabHistory) -> list[tuple[str, str, str]]:
    """Returns beginning, text and explanation of a warning for each role with engines that could not be
    built, and for errors of the policy."""
    warnings = []
    for role in sorted({each.role for each in history.unfit})[:MOST_ROLES]:
        found = [each for each in history.unfit if each.role == role]
        slabs = _named(list(dict.fromkeys(each.slab for each in found)))
        why = (
            "It stays with its first role. A second engine on a GPU set needs host memory for its process "
            "and its sleeping weights."
        )
        warnings.append((f"No engine of {role} could be built on {slabs}", found[-1].error, why))
    for error, num in history.failures.most_common(1):
        warnings.append(("", f"The policy of the split failed, {num:,} times: {error}", ""))
    return warnings


def _in_s(seconds: float) -> str:
    if abs(seconds) >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.1f} s" if abs(seconds) >= 1 else f"{seconds:.2g} s"
