"""Mistakes that trainers have made about pictures, critics, teachers, norms and given completions, to be
planted in a rank."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.integration.trainer.pictured import PAD


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Context manager: the mistake of this name is made; empty: none."""
    with contextlib.ExitStack() as stack:
        of_subject = {
            "critic": _critic_mistakes, "distill": _distill_mistakes, "given": _given_mistakes,
            "norm": _norm_mistakes
        }  # fmt: skip
        mistakes = of_subject.get(name.split("-")[0], _mistakes)
        for target, wrong in mistakes(name) if name else ():
            stack.enter_context(mock.patch(target, wrong))
        yield


def _norm_mistakes(name: str) -> list[tuple[str, Any]]:
    from megatron.core.transformer.moe import router

    from yatt.trainer.mcore import mcore_config, spec

    right_config, begin = mcore_config.transformer_config, spec.YarnAttention.__init__

    def each_head(norm: Any, heads: torch.Tensor) -> torch.Tensor:
        squares = heads.square().mean(-1, keepdim=True)
        return heads * torch.rsqrt(squares + norm.eps) * norm.heads_weight.view(heads.shape[-2:])

    def added_up(*given: Any) -> Any:
        config = right_config(*given)
        config.qk_layernorm = True
        return config

    def yarn_everywhere(attention: Any, *given: Any, **named: Any) -> None:
        begin(attention, *given, **named)
        if attention.is_narrow:
            attention.core_attention.scale *= named["yarn"].position_scale ** 2
        attention.is_narrow = False

    def same(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    choose = router.topk_routing_with_score_function

    def without_bias(*given: Any, **named: Any) -> Any:
        return choose(*given, **{**named, "expert_bias": None})

    return {
        "norm-and-no-bias": [
            ("megatron.core.transformer.moe.router.topk_routing_with_score_function", without_bias)
        ],
        "norm-of-one-rank": [("yatt.trainer.mcore.spec.reduce_from_tensor_model_parallel_region", same)],
        "norm-gradient-of-one-rank": [("yatt.trainer.mcore.spec.copy_to_tensor_model_parallel_region", same)],
        "norm-added-up": [("yatt.trainer.mcore.model.transformer_config", added_up)],
        "norm-unmarked": [
            ("yatt.trainer.mcore.spec.set_tensor_model_parallel_attributes", lambda *_, **__: None)
        ],
        "norm-of-each-head": [("yatt.trainer.mcore.spec.HeadsNorm.forward", each_head)],
        "norm-yarn-everywhere": [("yatt.trainer.mcore.spec.YarnAttention.__init__", yarn_everywhere)],
    }[name]


def _mistakes(name: str) -> list[tuple[str, Any]]:
    from yatt.trainer.attention import media_batch
    from yatt.trainer.mcore import rotary_axes, seeing, tower

    right_pixels, right_embedded = tower.normalised_pixels, seeing.SeeingModel._embedded
    right_features = tower.PictureFeatures.features_of
    right_positions, right_merged = media_batch.positions_of, tower._merged_patches

    def by_token_id(model: Any, tokens: torch.Tensor, media: Any, packed: Any) -> torch.Tensor:
        """The first tokens that look like a picture's have the features."""
        (places_M,) = torch.nonzero(tokens[0] == PAD, as_tuple=True)
        num = min(len(places_M), len(media.places_M))
        fields = {key: getattr(media, key) for key in ("positions_3S", "pictures")}
        wrong = media_batch.MediaBatch(places_M=places_M[:num], order_M=media.order_M[:num], **fields)
        return right_embedded(model, tokens, wrong, packed)

    def twice(patches: torch.Tensor, scale: Any) -> torch.Tensor:
        return right_pixels(right_pixels(patches, scale).view_as(patches), scale)

    class NoGate:
        @staticmethod
        def apply(embedded: torch.Tensor, packed: Any, _copies: Any, *levels: torch.Tensor) -> torch.Tensor:
            packed.added = packed.added._replace(levels=list(levels))
            return embedded

    return {
        "features-by-token-id": [("yatt.trainer.mcore.seeing.SeeingModel._embedded", by_token_id)],
        "one-axis": [
            (
                "yatt.trainer.attention.media_batch.positions_of",
                lambda num_tokens, *_: np.tile(np.arange(num_tokens), (3, 1)),
            )
        ],
        "sections-side-by-side": [("yatt.trainer.mcore.rotary_axes._interleaved", rotary_axes._side_by_side)],
        "normalised-twice": [("yatt.trainer.mcore.tower.normalised_pixels", twice)],
        "without-levels": [
            (
                "yatt.trainer.mcore.tower.PictureFeatures.features_of",
                lambda features, pictures: right_features(features, pictures)[:1],
            )
        ],
        "pictures-in-another-order": [
            (
                "yatt.trainer.mcore.tower.PictureFeatures.features_of",
                lambda features, pictures: right_features(features, pictures[::-1]),
            )
        ],
        "levels-of-one-rank": [
            ("yatt.trainer.mcore.seeing.copy_to_tensor_model_parallel_region", lambda level: level)
        ],
        "without-the-gate": [("yatt.trainer.mcore.seeing._Gate", NoGate)],
        "axes-of-pictures": [
            (
                "yatt.trainer.attention.media_batch.positions_of",
                lambda num_tokens, media, _: right_positions(num_tokens, media, 2),
            )
        ],
        "squares-turned": [
            (
                "yatt.trainer.mcore.tower._merged_patches",
                lambda found, merge: right_merged(found.transpose(1, 2), merge),
            )
        ],
        "frozen-in-vain": [
            (
                "yatt.trainer.mcore.model.train_part",
                lambda module, _: module.requires_grad_(True),
            )
        ],
    }[name]


def _critic_mistakes(name: str) -> list[tuple[str, Any]]:
    from megatron.core import parallel_state as mpu

    from yatt.algo import advantage

    right_whitened = advantage._whitened

    class NoHead:
        pass

    def of_one_rank(values_T: torch.Tensor, table: Any) -> torch.Tensor:
        """Scaled by the mean and variance of this rank's half of the tokens."""
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        mine_T = values_T.chunk(size)[rank]
        whole_T = right_whitened(values_T, table)
        return whole_T * 0 + (values_T - mine_T.mean()) / mine_T.std()

    def before_the_last(table: Any) -> torch.Tensor:
        """The reward is paid a token too early, as with a mask that is shifted by one."""
        paid_T = right_paid(table)
        ends_N = table.lengths_N.cumsum(0) - 1
        early_N = torch.maximum(ends_N - 1, ends_N - table.lengths_N + 1)
        reward_N = paid_T[ends_N].clone()
        paid_T[ends_N] = 0.0
        paid_T[early_N] += reward_N
        return paid_T

    right_paid = advantage._paid
    return {
        "critic-head-summed-over-ranks": [("yatt.trainer.forward.passes.ValueHead", NoHead)],
        "critic-whitened-by-one-rank": [("yatt.algo.advantage._whitened", of_one_rank)],
        "critic-reward-at-another-token": [("yatt.algo.advantage._paid", before_the_last)],
    }[name]


def _given_mistakes(name: str) -> list[tuple[str, Any]]:
    from yatt.algo import given as algo, loss
    from yatt.core.samples import balance
    from yatt.trainer.forward import passes
    from yatt.trainer.update import critic

    right_dpo, right_plan = algo.dpo_losses, balance.plan_iteration

    def apart(*given: Any, **named: Any) -> Any:
        return right_plan(*given, **{**named, "keeps_groups": False})

    def of_itself(view: Any, section: Any) -> Any:
        return right_dpo(replace(view, reference_T=view.old_T), section)

    def before(micro: Any, given: Any) -> Any:
        """Of the hidden state one token earlier."""
        return critic.row_values(micro, passes.HeadInput(given.hidden_RH.roll(1, 0), given.weight_VH))

    def of_tokens(_: str, *rest: Any) -> Any:
        return loss.token_weights("token-mean", *rest)

    return {
        "given-mean-over-tokens": [("yatt.trainer.update.update.token_weights", of_tokens)],
        "given-reference-is-the-policy": [("yatt.trainer.update.given.dpo_losses", of_itself)],
        "given-score-of-another-text": [("yatt.trainer.update.given.row_values", before)],
        "given-sums-of-one-rank": [("yatt.trainer.update.given.sum_over_context_parallel", lambda x: x)],
        "given-pairs-apart": [("tests.integration.trainer.given.plan_iteration", apart)],
    }[name]


def _distill_mistakes(name: str) -> list[tuple[str, Any]]:
    from yatt.trainer.forward import logprobs, passes
    from yatt.trainer.update import objective

    right, right_kl, right_loss = logprobs.wanted_logprobs, passes.likeliest_kl, objective._distill_loss
    right_rest = logprobs._Wanted.logprobs

    def without_rest(teacher_TK: torch.Tensor, student_TK: torch.Tensor, rest_T: torch.Tensor) -> Any:
        return right_kl(teacher_TK, student_TK, rest_T * 0)

    def at_one(*given: Any) -> Any:
        """At temperature 1, where the policy samples at another one."""
        return right(*given[:4], 1.0, given[5])

    def shifted(hidden_RH: torch.Tensor, weight_VH: torch.Tensor, *given: Any) -> Any:
        """Ids counted from the next rank's part of the vocabulary."""
        entries_RK = (given[3] + weight_VH.size(0)) % 62
        return right(hidden_RH, weight_VH, *given[:3], torch.where(given[3] < 0, -1, entries_RK))

    def of_one_rank(wanted: Any, top_R: torch.Tensor, log_sum_R: torch.Tensor, group: Any) -> Any:
        """The others of this rank's part of the vocabulary are all others."""
        rest_R = wanted._rest_sum_R.log() + wanted._rest_top_R + top_R
        return right_rest(wanted, top_R, log_sum_R, group)[0], rest_R - log_sum_R

    def twice(coefs_T: torch.Tensor, *given: Any) -> Any:
        return right_loss(coefs_T.square(), *given)

    return {
        "distill-without-the-rest": [("yatt.trainer.forward.passes.likeliest_kl", without_rest)],
        "distill-at-temperature-one": [("yatt.trainer.forward.passes.wanted_logprobs", at_one)],
        "distill-ids-of-another-rank": [("yatt.trainer.forward.passes.wanted_logprobs", shifted)],
        "distill-rest-of-one-rank": [("yatt.trainer.forward.logprobs._Wanted.logprobs", of_one_rank)],
        "distill-coefficient-twice": [("yatt.trainer.update.objective._distill_loss", twice)],
    }[name]
