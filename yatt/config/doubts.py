"""Notes about settings that are allowed but rarely intended. Pure; shown once when a run is started."""

from collections.abc import Iterator

from yatt.config.learning import learning_doubts
from yatt.config.schema import RunConfig
from yatt.config.sizes import engine_gpus_key, engine_node_gpus, engine_sizes
from yatt.errors import Finding, doubt_about

LEAST_AUDITED = 4
"""Prompt groups of an iteration whose mean score says something."""


def doubtful_settings(config: RunConfig) -> list[Finding]:
    """Returns every setting that may be unintended, with its consequence."""
    return [
        *_spanning(config),
        *_sampling(config),
        *learning_doubts(config),
        *_rewards(config),
        *_best(config),
        *_self_judged(config),
        *_audits(config),
    ]


def _spanning(config: RunConfig) -> Iterator[Finding]:
    gpus = engine_node_gpus(config)
    for key, size in engine_sizes(config):
        if size > gpus:
            yield doubt_about(
                key,
                f"is {size}, and a node has {gpus} GPU(s): each engine spans {size // gpus} nodes. If a node "
                f"has more, write {engine_gpus_key(config)}.",
            )


def _sampling(config: RunConfig) -> Iterator[Finding]:
    rollout = config.rollout
    for key, value, cuts in (
        ("top_p", rollout.top_p, rollout.top_p < 1),
        ("top_k", rollout.top_k, rollout.top_k > 0),
    ):
        if cuts:
            yield doubt_about(
                f"rollout.{key}",
                f"is {value:g} and truncates the distribution: the sampler's log-probs are of the remaining "
                "tokens, the trainer's of all tokens, so importance weights and KL are biased.",
            )
    if rollout.temperature != 1 and config.algorithm.kl_in != "none":
        yield doubt_about(
            "rollout.temperature",
            f"is {rollout.temperature:g} with algorithm.kl_in: {config.algorithm.kl_in}: the KL is of the "
            "policy at this temperature, not of the saved policy.",
        )
    if rollout.temperature != 1 and config.top_k:
        yield doubt_about(
            "rollout.temperature",
            f"is {rollout.temperature:g} with genrms[].top_k: the policy at this temperature is brought to "
            "the teacher at 1, not the saved policy.",
        )


def _rewards(config: RunConfig) -> Iterator[Finding]:
    weighed = [(f"rewards[{i}]", r.weight) for i, r in enumerate(config.rewards)]
    weighed += [(f"genrms[{i}]", g.weight) for i, g in enumerate(config.genrms)]
    limits = [(f"rewards[{i}]", r.timeout_s) for i, r in enumerate(config.rewards)]
    limits += [(f"genrms[{i}]", g.timeout_s) for i, g in enumerate(config.genrms) if g.path]
    yield from _services(config)
    for index, genrm in enumerate(config.genrms):
        if genrm.template and genrm.judging.by == "pointwise" and "{completion}" not in genrm.template:
            yield doubt_about(
                f"genrms[{index}].template", "has no {completion}: the GenRM does not see what it judges."
            )
    again = ", up to four times that when a call is repeated" if config.run.deterministic else ""
    for key, timeout_s in limits:
        longest_s = 4 * timeout_s if again else timeout_s
        if longest_s >= config.launch.phase_timeout_s:
            yield doubt_about(
                f"{key}.timeout_s",
                f"is {timeout_s:g}{again}; launch.phase_timeout_s is {config.launch.phase_timeout_s:g}: if "
                "nothing else makes progress, the attempt ends before the call reaches its own limit.",
            )
    for key, weight in weighed:
        if weight < 0:
            yield doubt_about(
                f"{key}.weight", f"is {weight:g}: completions with high scores are made less likely."
            )
    if config.rollout.n == 1 and config.algorithm.filter_groups:
        yield doubt_about(
            "algorithm.filter_groups",
            "with rollout.n: 1, all rewards of a group are equal, so every group is replaced.",
        )


def _best(config: RunConfig) -> Iterator[Finding]:
    if config.checkpoint.keep_best and not config.rewards and all(g.weight > 0 for g in config.genrms):
        yield doubt_about(
            "checkpoint.best_metric",
            "chooses by a judge alone, which a policy can learn to please. A function, or a second GenRM, "
            "with weight: 0 would show it (alarm judge.gap).",
        )


def _self_judged(config: RunConfig) -> Iterator[Finding]:
    for index, genrm in enumerate(config.genrms):
        if genrm.is_policy and not config.rewards and all(g.weight > 0 for g in config.genrms):
            yield doubt_about(
                f"genrms[{index}].model",
                "policy: a model prefers what it would write itself, and this judge changes with the policy. "
                "A function, or a second GenRM, with weight: 0 would show the drift (alarm judge.gap).",
            )


def _audits(config: RunConfig) -> Iterator[Finding]:
    batch = config.trainer.train_batch_size
    for index, genrm in enumerate(config.genrms):
        if genrm.share < 1 and genrm.share * batch < LEAST_AUDITED:
            yield doubt_about(
                f"genrms[{index}].share",
                f"is {genrm.share:g} of {batch} prompt groups an iteration: the mean of so few is mostly "
                "chance, for the alarm judge.gap too.",
            )


def _services(config: RunConfig) -> Iterator[Finding]:
    for index, genrm in enumerate(config.genrms):
        longest_s = genrm.api.timeout_s * (genrm.api.retries + 1) + genrm.api.outage_s
        if genrm.api.url and longest_s >= config.launch.phase_timeout_s:
            yield doubt_about(
                f"genrms[{index}].api",
                f"timeout_s, retries and outage_s allow {longest_s:g} s for a verdict; "
                f"launch.phase_timeout_s is {config.launch.phase_timeout_s:g}: while the service is down, "
                "the attempt ends before its groups are dropped.",
            )
