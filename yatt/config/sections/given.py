"""The run file's keys of runs with given completions: nothing is sampled, rows have what is trained on."""

from dataclasses import dataclass
from typing import Annotated, Literal

from yatt.config.sections.ranges import at_least, range_above, range_between

RunKind = Literal["rl", "sft", "dpo", "reward_model", "evaluation"]
RowForm = Literal["prompts", "completions", "pairs", "groups"]

FORMS: dict[RunKind, tuple[RowForm, ...]] = {
    "rl": ("prompts",),
    "sft": ("completions",),
    "dpo": ("pairs",),
    "reward_model": ("pairs",),
    "evaluation": ("prompts", "groups"),
}
"""What the rows of a run's data have, if the file does not say it, and what they may have. groups: whole
prompt groups, which a GenRM judges while nothing is sampled (`yatt judge`)."""

GROUP_SIZES: dict[RowForm, int] = {"completions": 1, "pairs": 2}
"""Completions of a row, where they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSection:
    """The loss of pairs, a preferred completion and another one: `run.kind: dpo`, `reward_model`."""

    beta: Annotated[float, range_above(0, most=100)] = 0.1
    """dpo: how strongly the policy is kept to the reference model, which is `model.path`."""

    label_smoothing: Annotated[float, range_between(0, 0.5)] = 0.0
    """dpo: share of pairs whose preference is taken to be the wrong way round (conservative DPO)."""

    sft_coef: Annotated[float, at_least(0)] = 0.0
    """dpo: coefficient of the preferred completion's negative log-likelihood per token, added to the loss
    (TRL's rpo_alpha); 0 is off."""

    center_coef: Annotated[float, at_least(0)] = 0.0
    """reward_model: coefficient of the squared sum of a pair's two scores, which keeps scores near 0 (TRL's
    center_rewards_coefficient); 0 is off, 0.01 is common."""
