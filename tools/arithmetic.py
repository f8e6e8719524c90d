"""Writes the quickstart's data: two-digit addition; the answer is three reversed digits (12+34= gives 640).

    python tools/arithmetic.py FOLDER

writes prompts for training and validation, and examples with which `yatt sft` trains the policy and the
judge (the GenRM). The judge's prompt is ``12+34=640?``; it completes its own sum and the verdict: ``640Y``.
A judge may also learn from the verdicts alone (`judge_rl.jsonl`, `configs/quickstart-agreement.yaml`).
"""

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

NUM_HELD_OUT = 512
NUM_JUDGE_EXAMPLES, NUM_JUDGED = 60_000, 20_000
END = "."
CHARACTERS = "0123456789+=?YN"
Problem = tuple[int, int]


def main() -> None:
    """Writes all files into the folder named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random("arithmetic")
    problems = [(a, b) for a in range(100) for b in range(100)]
    draw.shuffle(problems)
    held_out, rest = problems[:NUM_HELD_OUT], problems[NUM_HELD_OUT:]
    _write(folder / "train.jsonl", (_row(p) for p in rest))
    _write(folder / "val.jsonl", (_row(p) for p in held_out))
    _write(folder / "policy_sft.jsonl", (_example(prompt(p), answer(p) + END) for p in rest))
    _write(folder / "policy_sft_val.jsonl", (_example(prompt(p), answer(p) + END) for p in held_out))
    judged = [_judge_example(draw.choice(problems), draw) for _ in range(NUM_JUDGE_EXAMPLES)]
    judged_held_out = [_judge_example(p, draw) for p in held_out]
    _write(folder / "judge_sft.jsonl", judged)
    _write(folder / "judge_sft_val.jsonl", judged_held_out)
    _write(folder / "judge_rl.jsonl", map(_labelled, judged[:NUM_JUDGED]))
    _write(folder / "judge_rl_val.jsonl", map(_labelled, judged_held_out))


def prompt(problem: Problem) -> str:
    """The policy's prompt."""
    return f"{problem[0]:02d}+{problem[1]:02d}="


def answer(problem: Problem) -> str:
    """The correct completion."""
    return f"{problem[0] + problem[1]:03d}"[::-1]


def _row(problem: Problem) -> dict[str, object]:
    return {
        "data_source": "arithmetic",
        "prompt": prompt(problem),
        "reward_model": {"style": "rule", "ground_truth": answer(problem)},
    }


def _example(text: str, completion: str) -> dict[str, str]:
    return {"prompt": text, "completion": completion}


def _labelled(example: dict[str, str]) -> dict[str, object]:
    """A question to the judge with the right verdict, and the answer that is judged."""
    text = example["prompt"]
    return {
        "data_source": "judge",
        "prompt": text,
        "reward_model": {"style": "rule", "ground_truth": example["completion"].removesuffix(END)[-1]},
        "extra_info": {"shown": text.partition("=")[2].removesuffix("?")},
    }


def _judge_example(problem: Problem, draw: random.Random) -> dict[str, str]:
    right = answer(problem)
    shown = right if draw.random() < 0.5 else _wrong(right, draw)
    verdict = "Y" if shown == right else "N"
    return _example(f"{prompt(problem)}{shown}?", f"{right}{verdict}{END}")


def _wrong(right: str, draw: random.Random) -> str:
    """A wrong answer: random characters, one changed digit, another problem's answer, or digits off by one.

    Without the first kind the policy would exploit that the judge, which has never seen `=?Y` as an answer,
    may accept it.
    """
    kind = draw.random()
    if kind < 0.25:
        return "".join(draw.choice(CHARACTERS) for _ in range(draw.randrange(5)))
    if kind < 0.6:
        place = draw.randrange(3)
        return right[:place] + str(draw.randrange(10)) + right[place + 1 :]
    if kind < 0.7:
        return answer((draw.randrange(100), draw.randrange(100)))
    return "".join(str((int(digit) + draw.choice((0, 0, 1, 9))) % 10) for digit in right)


def _write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
