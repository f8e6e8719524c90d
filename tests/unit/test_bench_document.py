"""The benchmark page says what the results say, a missed target as loud as a met one."""

from tests.bench.document import document

RESULT = {
    "name": "example",
    "title": "An example",
    "how": "One run.",
    "head": ["case", "time"],
    "rows": [["a", "1 s"], ["b", "2 s"]],
    "targets": [
        {"what": "a / b", "target": "<= 0.6", "value": "0.5", "met": True},
        {"what": "b / a", "target": "<= 0.6", "value": "2.0", "met": False},
    ],
    "notes": ["Said aloud."],
    "machine": {
        "date": "2026-01-02", "cpu": "A CPU", "cores": 2, "memory_gib": 24, "versions": {"Python": "3.11"},
    },
}  # fmt: skip


def test_a_result_is_a_section_with_its_table_targets_and_machine():
    page = document([RESULT])
    assert "## An example\n\nOne run.\n\n| case | time |\n| --- | --- |\n| a | 1 s |\n| b | 2 s |\n" in page
    assert "| a / b | <= 0.6 | 0.5 | yes |\n| b / a | <= 0.6 | 2.0 | **no** |" in page
    assert "Said aloud." in page
    assert "`tests/bench/example.py`; 2026-01-02, A CPU, 2 cores, 24 GiB; Python 3.11." in page


def test_a_result_without_targets_has_no_table_of_them():
    assert "target" not in document([{**RESULT, "targets": []}])


def test_the_page_of_no_results_is_its_header():
    assert document([]).startswith("# Benchmarks")
