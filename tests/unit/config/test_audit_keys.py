"""`genrms[].share`: which GenRM may look at a part of the prompt groups."""

from pathlib import Path

import pytest

from tests.unit.config.test_load import GOOD, mistakes, write
from yatt.config.doubts import doubtful_settings
from yatt.config.load import load_run_config
from yatt.core.samples.prompts import is_in_share

AUDIT = "genrms=[{name: gold, model: big, template: '{completion}', verdict: {pattern: '(a)'}, share: %s%s}]"


@pytest.mark.parametrize("more", ["", ", weight: 0.5"])
def test_a_score_that_counts_is_needed_of_every_group(tmp_path: Path, more: str) -> None:
    assert "share: a score that counts is needed of every prompt group; write weight: 0" in mistakes(
        tmp_path, GOOD, AUDIT % ("0.5", more)
    )
    load_run_config([write(tmp_path, GOOD)], [AUDIT % ("1", more)])


def test_too_few_groups_an_iteration_are_told(tmp_path: Path) -> None:
    def keys(share: str) -> list[str]:
        config = load_run_config([write(tmp_path, GOOD)], [AUDIT % (share, ", weight: 0")])
        return [each.key for each in doubtful_settings(config)]

    assert (keys("0.25"), keys("0.5"), keys("1")) == (["genrms[0].share"], [], []), "of 8 groups"


def test_the_share_is_drawn_by_the_prompt_and_the_larger_one_has_the_smaller() -> None:
    found = {share: {n for n in range(4000) if is_in_share(3, n, share)} for share in (0.1, 0.5, 1.0)}
    assert found[0.1] < found[0.5] < found[1.0] == set(range(4000))
    assert abs(len(found[0.1]) - 400) < 80 and abs(len(found[0.5]) - 2000) < 130
    assert found[0.5] != {n for n in range(4000) if is_in_share(4, n, 0.5)}
