"""Counters of groups: each is in one row of a trained iteration, or in the checkpoint."""

import copy
import random
from collections import Counter

import pytest

from yatt.control.rollouts.counters import GroupCounters


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("ahead", [0, 1])
def test_no_count_is_lost_or_reported_twice_whenever_a_run_falls_back(seed: int, ahead: int) -> None:
    """Rows count as written once their iteration is trained on; what is newer is lost with its attempt."""
    draw = random.Random(seed)
    counters, made, rows = GroupCounters(), Counter[str](), dict[int, Counter[str]]()
    trained = sampled = 0
    saved = copy.deepcopy((counters.every(), made, rows, trained))
    for _ in range(300):
        match draw.choice(["add", "add", "add", "report", "train", "save", "fall back"]):
            case "add":
                name, number, count = draw.choice("ab"), draw.randrange(20), draw.randrange(4)
                counters.of(number)[name] += count
                made[name] += count
            case "report":  # of the same batch twice, at times
                sampled = max(trained + 1, min(sampled + draw.randrange(2), trained + ahead))
                unfinished = set(draw.sample(range(20), 5))
                row = counters.take(sampled, unfinished, None)
                rows.setdefault(sampled, Counter()).update({name: int(count) for name, count in row.items()})
            case "train" if sampled > trained:
                trained += 1
                counters.trained(trained)
            case "save":
                written = {i: row for i, row in rows.items() if i <= trained}
                saved = copy.deepcopy((counters.every(), made, written, trained))
            case "fall back":
                every, made, rows, trained = copy.deepcopy(saved)
                counters, sampled = GroupCounters(every), trained
    written = sum((row for i, row in rows.items() if i <= trained), Counter[str]())
    left = sum((Counter(each) for each in counters.every().values()), Counter[str]())
    assert written + left == made


def test_a_group_that_is_used_again_reports_only_what_is_not_reported() -> None:
    counters = GroupCounters({3: {"tokens": 5}})
    assert counters.take(1, set(), None) == {"tokens": 5.0}
    counters.put(3, {"tokens": 12, "asked": 1})
    assert counters.whole(3) == {"tokens": 12, "asked": 1}
    assert counters.take(2, set(), None) == {"tokens": 7.0, "asked": 1.0}
    counters.trained(1)
    assert counters.every() == {3: {"tokens": 7, "asked": 1}}


def test_groups_without_counts_take_no_room_in_a_checkpoint() -> None:
    counters = GroupCounters()
    counters.of(1)
    counters.of(2)["flat"] += 0
    assert counters.every() == {} and counters.take(1, set(), None) == {}
