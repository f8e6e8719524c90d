"""The completions of each iteration that the report shows."""

import json
from collections.abc import Mapping, Sequence

from yatt.adapters.dataset import Row
from yatt.adapters.tokenizer import Tokenizer
from yatt.control.rollouts.groups import PromptGroup
from yatt.control.rollouts.scoring import Scorer
from yatt.obs.metrics import STEP


def shown_samples(
    iteration: int, groups: Sequence[PromptGroup], rows: Mapping[int, Row], scorer: Scorer,
    tokenizer: Tokenizer, limit: int,
) -> list[str]:  # fmt: skip
    """Returns JSON lines of at most `limit` samples, spread over the groups, with their verdicts and scores.

    Args:
        rows: data rows by the number of the group; without a row, no ground truth is shown.
    """
    rewards = [(g, g.rewards(scorer.weights, scorer.shaping)) for g in groups]
    shown = [(g, s, r) for g, values in rewards for s, r in zip(g.samples, values, strict=True)]
    lines = []
    for group, sample, reward in shown[:: max(1, len(shown) // limit)][:limit] if limit else ():
        row = rows.get(group.number)
        line = {
            STEP: iteration, "prompt": group.prompt_text,
            "completion": tokenizer.decode(sample.token_ids),
            "verdicts": sample.verdicts, "scores": sample.scores, "reward": reward,
            "ground_truth": row.ground_truth if row else None,
        }  # fmt: skip
        lines.append(json.dumps(line, default=str))
    return lines
