"""A judge that cannot score the whole, but answers single questions: by number, by rubric, behind a rule.

The policy says three digits. Quality is the weighted share of three criteria: the first digit is even, the
second is above 4, the third is the prompt's digit. The judge is trained on verdicts of people who call most
answers an 8, and on single criteria of answers that are three digits; of other texts it has seen none. The
truth is only measured.
"""

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.bench.group_judging import ENGINE, PROMPTS, SHARE, USUAL, N, call, write_lines
from tests.runs import rows

CHARACTERS = "0123456789=?YNabc."
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
ITERATIONS, SEEDS = 40, (0, 1, 2)
FORM = {"name": "form", "rule": "form", "required": True, "weight": 0.0}
CRITERIA = [{"name": name, "text": name, "weight": weight} for name, weight in WEIGHTS.items()]
RUBRIC: dict[str, Any] = {
    "template": "{prompt}{completion}{criterion}?",
    "verdict": {"pattern": "^([YN])", "scores": {"Y": 1.0, "N": 0.0}},
    "on_unparsable": "score", "unparsable_score": 0.5,
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "one number": {
        "template": "{prompt}{completion}?", "verdict": {"pattern": "([0-9])"}, "on_unparsable": "score",
        "unparsable_score": 8.0,
    },
    "rubric behind a required rule": {**RUBRIC, "judging": {"by": "rubric", "criteria": [FORM, *CRITERIA]}},
    "rubric alone": {**RUBRIC, "judging": {"by": "rubric", "criteria": CRITERIA}},
}  # fmt: skip
FUNCTIONS = f'''
def digits(text):
    return len(text) == 3 and text.isascii() and text.isdecimal()


def form(data_source, solution_str, ground_truth, extra_info=None):
    """Whether it is three digits."""
    return float(digits(solution_str))


def value(data_source, solution_str, ground_truth, extra_info=None):
    """The true quality; anything but three digits is 0."""
    if not digits(solution_str):
        return 0.0
    x, y, z = map(int, solution_str)
    met = x % 2 == 0, y > 4, z == int(ground_truth)
    return sum(weight * one for weight, one in zip({list(WEIGHTS.values())!r}, met))
'''


def judged(chance: random.Random) -> dict[str, str]:
    """A verdict of a person: a number for the whole, or an answer about one criterion."""
    prompt, said = f"{chance.randrange(10)}", f"{chance.randrange(1000):03}"
    if chance.random() < 0.25:
        word = USUAL if chance.random() < SHARE else chance.choice("0123456789")
        return {"prompt": f"{prompt}={said}?", "completion": f"{word}."}
    x, y, z = map(int, said)
    name = chance.choice("abc")
    met = {"a": x % 2 == 0, "b": y > 4, "c": z == int(prompt)}[name]
    return {"prompt": f"{prompt}={said}{name}?", "completion": f"{'NY'[met]}."}


def make_models(folder: Path) -> None:
    """A judge, and a policy that says any three digits, both by `yatt sft`."""
    chance = random.Random(0)
    numbers = [
        {"prompt": f"{chance.randrange(10)}=", "completion": f"{chance.randrange(1000):03}."}
        for _ in range(20_000)
    ]
    held = [line for line in (judged(chance) for _ in range(900)) if line["completion"][0] in "YN"]
    common = {"characters": CHARACTERS, "tie_word_embeddings": False, "initializer_range": 0.08}
    validation = {"every": 25, "stop_at": 0.97, "temperature": 0.0}
    files = {
        "judge": {
            "train_file": write_lines(folder / "judge.jsonl", [judged(chance) for _ in range(60_000)]),
            "validation": {"file": write_lines(folder / "judge_val.jsonl", held[:512]), **validation},
            "max_steps": 800,
        },
        "policy": {"train_file": write_lines(folder / "policy.jsonl", numbers), "max_steps": 120},
    }
    for name, file in files.items():
        path = folder / f"{name}.yaml"
        whole = {"output": str(folder / name), "new": common, "batch_size": 256, "lr": 2.0e-3, **file}
        path.write_text(yaml.safe_dump(whole))
        call("sft", str(path))


def train(folder: Path, arm: str, seed: int, iterations: int) -> dict[str, Any]:
    """Runs one arm; returns its rows, and the iteration in which the alarm of a gap began (0: in none)."""
    place = folder / f"{arm.replace(' ', '-')}-{seed}"
    place.mkdir()
    (place / "functions.py").write_text(FUNCTIONS)
    data = [{"prompt": f"{i % 10}=", "answer": str(i % 10)} for i in range(64)]
    functions = [
        {"name": name, "path": str(place / "functions.py"), "function": name, "weight": 0, "trial": False}
        for name in ("form", "value")
    ]
    config = {
        "run": {"dir": str(place / "run"), "seed": seed},
        "launch": {"nodes": 2, "gpus_per_node": 1, "device": "cpu"},
        "data": {
            "train_files": [write_lines(place / "train.jsonl", data)], "max_prompt_tokens": 4,
            "ground_truth_key": "answer",
        },
        "model": {"path": str(folder / "policy"), "dtype": "float32"},
        "rollout": {"n": N, "max_response_tokens": 4, **{k: v for k, v in ENGINE.items() if k != "dtype"}},
        "genrms": [{"name": "judge", "model": str(folder / "judge"), "max_tokens": 2, **ENGINE, **ARMS[arm]}],
        "rewards": functions,
        "placement": {"mode": "partial", "genrm_gpu_sets": 1},
        "algorithm": {"filter_groups": False},
        "optimizer": {"lr": 1.0e-3},
        "trainer": {
            "total_iterations": iterations, "train_batch_size": PROMPTS, "mini_batch_size": PROMPTS,
            "max_tokens_per_micro_batch": 2048,
        },
        "checkpoint": {"export_final": False},
        "logging": {"alarm_iterations": 3},
    }  # fmt: skip
    (place / "run.yaml").write_text(yaml.safe_dump(config))
    call("run", str(place / "run.yaml"))
    events = [json.loads(line) for line in (place / "run" / "events.jsonl").read_text().splitlines()]
    gaps = [event["iteration"] for event in events if event.get("alarm") == "judge.gap"]
    return {"rows": rows(place / "run" / "metrics.jsonl"), "alarm": min(gaps, default=0)}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """What one run says: true values of the first and last five iterations, the best median of five, and the
    value where the alarm began."""
    values = [row["critic/score/value/mean"] for row in found["rows"]]
    medians = [statistics.median(values[i : i + 5]) for i in range(len(values) - 4)]
    scores = [row["critic/score/judge/mean"] for row in found["rows"]]
    groups, flat = PROMPTS * len(values), sum(row.get("rollout/flat_groups", 0.0) for row in found["rows"])
    asked = sum(row.get("genrm/judge/asked", 0.0) for row in found["rows"])
    return {
        "first": statistics.fmean(values[:5]), "last": statistics.fmean(values[-5:]), "best": max(medians),
        "judge": statistics.fmean(scores[-5:]), "alarm": found["alarm"],
        "at_alarm": values[found["alarm"] - 1] if found["alarm"] else 0.0,
        "asked": asked / (groups * N), "flat": flat / groups,
    }  # fmt: skip


def measure(
    folder: Path,
    arms: tuple[str, ...] = tuple(ARMS),
    seeds: tuple[int, ...] = SEEDS,
    iterations: int = ITERATIONS,
) -> dict[str, list[dict[str, float]]]:
    """The summaries of each arm, by seed."""
    make_models(folder)
    return {arm: [summary(train(folder, arm, seed, iterations)) for seed in seeds] for arm in arms}


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
        found = measure(Path(folder))
    gained = {arm: [one["last"] - one["first"] for one in runs] for arm, runs in found.items()}
    number, ruled, alone = (gained[arm] for arm in ARMS)
    hacked = [one for one in found["rubric alone"] if one["last"] < one["best"] - 0.2]
    warned = [one for one in hacked if one["alarm"] and one["at_alarm"] > one["best"] - 0.2]
    return {
        "title": "Judging by criteria, and the rule before them",
        "how": "The policy says three digits; quality is the weighted share of three criteria (0.5, 0.3, "
        f"0.2). A judge of 0.5 M parameters was trained on single criteria, and on verdicts of people who "
        f"call {SHARE:.0%} of whole answers {USUAL}. GRPO, {ITERATIONS} iterations of {PROMPTS} prompts x "
        f"{N}, {len(SEEDS)} seeds, vLLM on CPU. The true value, by a function of weight 0, in the first "
        "and last five iterations, with the seeds' range.",
        "head": [
            "judging", "value, first", "value, last", "judge, last", "flat groups", "questions a sample",
        ],
        "rows": [
            [arm, *(_spread([one[key] for one in runs]) for key in ("first", "last", "judge")),
             f"{statistics.fmean(one['flat'] for one in runs):.0%}",
             f"{statistics.fmean(one['asked'] for one in runs):.2f}"]
            for arm, runs in found.items()
        ],
        "targets": [
            {"what": "value gained with one number, largest", "target": "<= 0.1",
             "value": f"{max(number):.3f}", "met": max(number) <= 0.1},
            {"what": "value gained behind the rule, smallest", "target": ">= 0.25",
             "value": f"{min(ruled):.3f}", "met": min(ruled) >= 0.25},
            {"what": "of runs of the rubric alone that lost 0.2 of their best: told before", "target": "all",
             "value": f"{len(warned)} of {len(hacked)}", "met": len(warned) == len(hacked)},
        ],
        "notes": [f"The rubric alone gained {_spread(alone)}."],
    }  # fmt: skip


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
