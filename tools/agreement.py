"""The reward of a judge that learns from labels: its verdict is the label, and follows from what it wrote."""

from typing import Any


def compute_score(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
) -> dict[str, float]:
    """Returns 1 where the verdict is the label, and is Y exactly if the sum before it is the judged answer.

    A verdict of two words is right by chance half of the time. With the label alone, whatever was written
    before such a verdict is rewarded too: sums become worse while verdicts become a little better.
    """
    said = solution_str.removesuffix(".")
    own, verdict = said[:-1], said[-1:]
    agrees, follows = verdict == ground_truth, (verdict == "Y") == (own == extra_info["shown"])
    return {"score": float(agrees and follows), "agrees": float(agrees), "follows": float(follows)}
