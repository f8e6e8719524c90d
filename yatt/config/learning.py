"""Rules and notes about how a run learns: algorithm, optimizers, critic, given completions. Pure."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from yatt.config.schema import LoggingSection, RunConfig
from yatt.config.sections.algorithm import GAE, SEQUENCE_LOSSES, AlgorithmSection
from yatt.config.sections.critic import CriticSection
from yatt.errors import Finding, doubt_about, mistake_in


def learning_faults(config: RunConfig) -> Iterator[Finding]:
    """Yields broken rules between keys of the algorithm, the optimizers and the critic."""
    a = config.algorithm
    if a.clip_ratio_c and (a.path or a.policy_loss != "ppo"):
        which = a.path or f"policy_loss: {a.policy_loss}"
        yield mistake_in(
            "algorithm.clip_ratio_c", f"only ppo has a dual clip, not {which}; leave the key out."
        )
    if a.kl_in != "none" and a.kl_coef == 0:
        yield mistake_in(
            "algorithm.kl_coef", "kl_in is set but kl_coef is 0; write a coefficient, or kl_in: none."
        )
    yield from _adaptive_kl(config)
    if a.kl_in == "loss" and a.kl_type == "k1":
        yield mistake_in(
            "algorithm.kl_type",
            "the expected gradient of k1 in the loss is 0, so it has no effect; write k2 or k3, or "
            "kl_in: reward.",
        )
    for key, each in (("optimizer", config.optimizer), ("critic.optimizer", config.critic.optimizer)):
        if each.min_lr > each.lr:
            yield mistake_in(
                f"{key}.min_lr",
                f"{each.min_lr:g} is above lr {each.lr:g}, so the learning rate would increase during the "
                f"decay; write {each.lr:g} or less.",
            )
    yield from _critic(config)
    yield from _given(config)
    yield from _teachers(config)


def _teachers(config: RunConfig) -> Iterator[Finding]:
    """Each completion has the loss of one teacher; a critic needs a reward beside it."""
    losses = [(index, genrm) for index, genrm in enumerate(config.genrms) if genrm.top_k]
    for place, (index, genrm) in enumerate(losses):
        for _, other in losses[:place]:
            common = sorted({*genrm.data_sources} & {*other.data_sources})
            if common or not (genrm.data_sources and other.data_sources):
                which = f"data source {common[0]}" if common else "some data source"
                yield mistake_in(
                    f"genrms[{index}].data_sources",
                    f"'{other.name}' and '{genrm.name}' have top_k, and completions of {which} would have "
                    "the loss of both; write data_sources that differ, or one of them without top_k.",
                )
    weights = [each.weight for each in config.rewards]
    weights += [each.weight for each in config.genrms if not each.top_k]
    if losses and config.has_critic and not any(weights):
        yield mistake_in(
            "algorithm.adv_estimator",
            f"{GAE} without any reward: all returns are 0, so advantages are the noise of the critic's "
            "values; write another estimator (reinforce_plus_plus takes one completion per prompt), or add a "
            "reward.",
        )


def _adaptive_kl(config: RunConfig) -> Iterator[Finding]:
    a, samples = config.algorithm, config.trainer.train_batch_size * config.rollout.n
    if not a.kl_target:
        return
    if a.kl_in == "none":
        yield mistake_in("algorithm.kl_target", "is set but kl_in is none; write kl_in: reward, or loss.")
    if a.kl_horizon <= samples / 5:
        yield mistake_in(
            "algorithm.kl_horizon",
            f"{a.kl_horizon:g} with {samples} completions per iteration: the coefficient could become 0 or "
            f"negative; write more than {samples / 5:g}.",
        )


def _critic(config: RunConfig) -> Iterator[Finding]:
    """The critic's keys are of runs that have one; what such a run cannot have yet is named here."""
    a, critic, whole = config.algorithm, config.critic, config.trainer.total_iterations
    if not config.has_critic:
        has = f"algorithm.path: {a.path}" if a.path else f"algorithm.adv_estimator: {a.adv_estimator}"
        cure = f"remove it, or write algorithm.adv_estimator: {GAE}{' without a path' if a.path else ''}."
        for key in _changed_keys(config):
            yield mistake_in(key, f"has no effect with {has}, because only {GAE} has a critic; {cure}")
        return
    if config.model.trainer == "scripted":
        yield mistake_in(
            "algorithm.adv_estimator",
            f"{GAE} needs a critic, and a scripted trainer has none; write grpo for the rehearsal.",
        )
    if critic.warmup_iterations >= whole:
        yield mistake_in(
            "critic.warmup_iterations",
            f"is {critic.warmup_iterations} of {whole} iterations (trainer.total_iterations), so the policy "
            f"would never be trained; write less.",
        )


def _changed_keys(config: RunConfig) -> Iterator[str]:
    """Keys that only a critic uses and that have not their defaults."""
    critic, plain = CriticSection(), AlgorithmSection()
    for each in fields(critic):
        if getattr(config.critic, each.name) != getattr(critic, each.name):
            yield f"critic.{each.name}"
    for name in ("lam", "whiten") if not config.algorithm.path else ():
        if getattr(config.algorithm, name) != getattr(plain, name):
            yield f"algorithm.{name}"


_USED = {
    "rollout": {"n", "max_response_tokens"},
    "algorithm": {"loss_agg_mode", "loss_scale_factor"},
    "placement": set(),
    "validation": {"every", "max_prompts"},
    "environment": set(),
    "sync": set(),
}
"""Keys with an effect, of sections that are about sampling and scoring."""


def _given(config: RunConfig) -> Iterator[Finding]:
    """Yields keys that such a run does not have, and sizes that do not fit; `preference` of other runs."""
    kind = config.run.kind
    has_no_effect = f"has no effect with run.kind: {kind}; remove it."
    for name, used in _unused(config).items():
        for key in _changed(getattr(config, name)):
            if key not in used:
                yield mistake_in(f"{name}.{key}", has_no_effect)
    if config.is_given:
        yield from _values(config, has_no_effect)
        yield from _pairs(config)


def _values(config: RunConfig, has_no_effect: str) -> Iterator[Finding]:
    """Yields values that such a run cannot have."""
    kind, data, trainer = config.run.kind, config.data, config.trainer
    renders = data.apply_chat_template or kind != "reward_model"
    for is_right, key, says in (
        (not config.rewards, "rewards", has_no_effect),
        (not config.genrms, "genrms", has_no_effect),
        (renders, "data.apply_chat_template", "engines show a reward model conversations; remove it."),
        (config.logging.rollouts == LoggingSection().rollouts, "logging.rollouts", has_no_effect),
        (not data.media_root, "data.media_root", f"run.kind: {kind} has no pictures yet; remove it."),
        (config.model.trainer == "megatron", "model.trainer", f"no run.kind: {kind} without megatron."),
        (trainer.ppo_epochs == 1, "trainer.ppo_epochs", "each iteration has its own rows; write 1."),
        (not trainer.router_replay, "trainer.router_replay", "no engine has chosen experts; write false."),
    ):
        if not is_right:
            yield mistake_in(key, says)


def _unused(config: RunConfig) -> dict[str, set[str]]:
    """The sections of which only these keys have an effect."""
    of_dpo, of_model = {"beta", "label_smoothing", "sft_coef"}, {"center_coef"}
    own = {"dpo": of_dpo, "reward_model": of_model}.get(config.run.kind, set())
    if not config.is_given:
        return {"preference": own}
    used = _USED | {"preference": own}
    if config.has_pairs:  # means over pairs
        used |= {"algorithm": set()}
    return used


def _changed(section: Any) -> Iterator[str]:
    plain = type(section)()
    for each in fields(section):
        if getattr(section, each.name) != getattr(plain, each.name):
            yield each.name


def _pairs(config: RunConfig) -> Iterator[Finding]:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    cap = config.trainer.max_tokens_per_micro_batch
    if config.has_pairs and longest <= cap < 2 * longest:
        yield mistake_in(
            "trainer.max_tokens_per_micro_batch",
            f"{cap} cannot hold the longest pair of {2 * longest} tokens (twice data.max_prompt_tokens + "
            f"rollout.max_response_tokens); write {2 * longest} or more.",
        )


def _reference_doubts(config: RunConfig) -> Iterator[Finding]:
    if config.run.kind == "dpo" and config.run.from_checkpoint.url:
        yield doubt_about(
            "run.from_checkpoint",
            "begins with these weights, and the reference of dpo is model.path: usually they are one model, "
            "the `model` folder of the run before.",
        )


def learning_doubts(config: RunConfig) -> Iterator[Finding]:
    """Yields settings of the algorithm and the optimizer that may be unintended."""
    a, o = config.algorithm, config.optimizer
    yield from _reference_doubts(config)
    if o.lr == 0:
        yield doubt_about("optimizer.lr", "is 0: nothing is learned.")
    for key, value in (("clip_ratio_low", a.clip_ratio_low), ("clip_ratio_high", a.clip_ratio_high)):
        if value == 0:
            yield doubt_about(
                f"algorithm.{key}",
                "is 0: after the first optimizer step of an iteration every token is clipped.",
            )
    if a.policy_loss in SEQUENCE_LOSSES and a.loss_agg_mode != "seq-mean-token-mean" and not a.path:
        yield doubt_about(
            "algorithm.loss_agg_mode",
            f"is {a.loss_agg_mode}: the paper of {a.policy_loss} has the mean over sequences, "
            "seq-mean-token-mean.",
        )
    if a.entropy_coeff < 0:
        yield doubt_about("algorithm.entropy_coeff", f"is {a.entropy_coeff:g}: the loss reduces the entropy.")
    if a.correction.rule == "truncate" and a.correction.high < 1:
        yield doubt_about(
            "algorithm.correction.high",
            f"is {a.correction.high:g}: below 1 it scales down every update.",
        )
    warmed = config.trainer.total_iterations * config.trainer.ppo_epochs
    warmed *= config.trainer.train_batch_size // config.trainer.mini_batch_size
    if o.lr_warmup_steps >= warmed:
        yield doubt_about(
            "optimizer.lr_warmup_steps",
            f"is {o.lr_warmup_steps} of {warmed} optimizer steps: lr is reached only at the end, or never.",
        )
