"""What a person reads while a run goes on."""

from yatt.obs.console import row_line
from yatt.obs.metrics import STEP


def test_a_data_source_with_a_slash_is_shown_whole():
    row = {STEP: 0, "val-core/openai/gsm8k/correct/mean@1": 0.25}
    assert row_line(row, 3) == "iteration 0/3  openai/gsm8k 0.250"


def test_the_line_of_a_validation_has_the_mean_only():
    row = {STEP: 0, "val-core/a/b/correct/mean@4": 0.25, "val-core/a/b/correct/best@4": 0.75}
    assert row_line(row, 10) == "iteration 0/10  a/b 0.250"
