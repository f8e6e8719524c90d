"""Rule rewards of the recipes: 1 if the final answer equals the ground truth, else 0.

GSM8K's answer is after ``####``, MATH's in ``\\boxed{}``, DAPO-Math's after ``Answer:`` or in ``\\boxed{}``, as their prompts ask.
"""

import re

from yatt.reward.functions import gsm8k


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Returns 1.0 or 0.0."""
    if "gsm8k" in data_source:
        return gsm8k(data_source, solution_str, ground_truth)
    answer = boxed(solution_str)
    if answer is None and (found := re.findall(r"Answer:\s*([^\n]+)", solution_str)):
        answer = found[-1]
    return float(answer is not None and plain(answer) == plain(str(ground_truth)))


def boxed(text):
    """The content of the last \\boxed{...}, with balanced braces; None if there is none."""
    at = text.rfind("\\boxed{")
    if at < 0:
        return None
    begin, depth = at + len("\\boxed{"), 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None


def plain(answer):
    """The answer without what does not change its value."""
    text = answer.strip().strip("$").rstrip(".")
    for form, same in (
        ("\\left", ""),
        ("\\right", ""),
        ("\\!", ""),
        ("\\,", ""),
        ("\\%", ""),
        ("%", ""),
        ("dfrac", "frac"),
        ("tfrac", "frac"),
    ):
        text = text.replace(form, same)
    text = re.sub(r"\\text\{([^}]*)\}", r"\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text).replace(" ", "")
    try:
        return float(text)
    except ValueError:
        return text
