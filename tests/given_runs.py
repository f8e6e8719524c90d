"""Whole runs with given completions, for tests."""

import json
from pathlib import Path
from typing import Any

from tests.runs import RunFile

NUM_ROWS = 64


def right_answer(number: int) -> str:
    """A letter of the first half of the alphabet, by the prompt's last digit."""
    return "abcdefghij"[number % 10] * 3


def given_row(number: int, kind: str) -> dict[str, Any]:
    """sft: a conversation of two turns every third row."""
    prompt, right = f"{number} is", right_answer(number)
    if kind != "sft":
        return {
            "prompt": prompt,
            "chosen": right,
            "rejected": "xyz" if number % 2 else right_answer(number + 5),
        }
    if number % 3:
        return {"prompt": prompt, "completion": right}
    said = [("user", prompt), ("assistant", right), ("user", "again"), ("assistant", right)]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


class GivenRunFile(RunFile):
    """A small run of a kind that samples nothing."""

    def __init__(self, folder: Path, kind: str, settings: dict[str, Any] | None = None) -> None:
        super().__init__(folder, settings or {})
        self.kind = kind

    def _config(self, policy: Path, data: Path, reward: Path) -> dict[str, Any]:
        rows = self.folder / f"{self.kind}.jsonl"
        if not rows.exists():
            lines = (json.dumps(given_row(number, self.kind)) + "\n" for number in range(NUM_ROWS))
            rows.write_text("".join(lines))
        config = super()._config(policy, rows, reward)
        for section in ("rewards", "sync"):
            del config[section]
        del config["data"]["ground_truth_key"]
        config["run"]["kind"] = self.kind
        config["rollout"] = {"max_response_tokens": 32}
        config["model"].pop("trainer", None)
        config["data"]["max_prompt_tokens"] = 48
        if "validation" in self.settings:
            config["data"]["val_files"] = [str(rows)]
        config["trainer"]["max_tokens_per_micro_batch"] = 256
        return config
