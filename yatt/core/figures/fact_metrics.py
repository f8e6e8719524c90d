"""Metrics of a rollout batch, with verl's names, from its table of facts. Pure, no torch."""

from collections.abc import Sequence

from yatt.records.message import SampleFact


def fact_metrics(facts: Sequence[SampleFact]) -> dict[str, float]:
    """Returns what the facts of a batch say about rewards, lengths and turns.

    `response_length/clip_ratio` counts completions that were cut. verl's counts completions of the maximum
    length: it includes those that end with their last allowed token, and misses those that were cut earlier
    because of a long prompt. `critic/score` and `critic/rewards` are both the reward before a KL penalty,
    which verl subtracts in the second (`algorithm.kl_in: reward`; here it is `actor/reward_kl_penalty`).
    """
    lengths = [float(fact.num_completion_tokens) for fact in facts]
    rewards = [fact.reward for fact in facts]
    turns = [float(fact.num_turns) for fact in facts]
    return {
        **_spread("critic/score", rewards),
        **_spread("critic/rewards", rewards),
        **_spread("response_length", lengths),
        "response_length/masked_ratio": sum(fact.is_masked for fact in facts) / len(facts),
        "response_length/clip_ratio": sum(fact.is_cut for fact in facts) / len(facts),
        **(_spread("num_turns", turns) if max(turns) > 1 else {}),
        **_spread("prompt_length", [float(fact.num_prompt_tokens) for fact in facts]),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": sum(values) / len(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }
