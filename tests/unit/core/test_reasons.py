"""What is the same in many reasons for a missing score."""

import pytest

from yatt.core.samples.reasons import MOST_CAUSE, cause_of


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("all its rewards are equal", "all its rewards are equal"),
        ("reward 'x', prompt 7, sample 3: r.py:3: KeyError: 'k'", "reward 'x', r.py:3: KeyError: 'k'"),
        (
            "genrm 'judge', prompt 4, sample 0: no readable verdict in 'Y'; the question was '1 + 1'",
            "genrm 'judge', no readable verdict",
        ),
        (
            "genrm 'judge', prompt 4: no readable verdict about samples 0, 1 in 'ze', which was cut "
            "(genrms[judge].max_tokens is 4); the question was 'what, which was cut (x); the question was y'",
            "genrm 'judge', no readable verdict, which was cut (genrms[judge].max_tokens is 4)",
        ),
        (
            "genrm 'judge', prompt 4: no readable verdict in 'ze', which was cut "
            "(genrms[judge].max_tokens is 4), after the thought 'it\\'s \"so\"; the question was \\'y', "
            "which was cut (genrms[judge].think.budget is 9); the question was 'what'",
            "genrm 'judge', no readable verdict, which was cut (genrms[judge].max_tokens is 4), after the "
            "thought, which was cut (genrms[judge].think.budget is 9)",
        ),
        ("x" * 1000, "x" * MOST_CAUSE),
    ],
)
def test_the_cause_has_no_place_and_no_example(reason, cause):
    assert cause_of(reason) == cause
