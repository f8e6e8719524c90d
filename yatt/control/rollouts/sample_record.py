"""One sample, or one answer of a GenRM, as a record for people: everything that the run knows about it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from yatt.adapters.dataset import Row
from yatt.adapters.lines import Record
from yatt.adapters.tokenizer import Tokenizer
from yatt.control.rollouts.groups import TRUNCATED, PromptGroup, SampleState
from yatt.control.rollouts.scoring import Scorer
from yatt.control.rollouts.subject import Judged
from yatt.core.verdict import render
from yatt.obs.rollouts import JUDGED, SAMPLE
from yatt.records.message import unpack_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedGroup:
    """A prompt group that was trained on or dropped. `dropped`: the reason, empty if it was trained on."""

    group: PromptGroup
    row: Row | None
    dropped: str = ""
    judged: tuple[Judged, ...] = ()
    advantages: Mapping[int, float] = field(default_factory=dict)


def sample_records(
    ended: EndedGroup, scorer: Scorer, tokenizer: Tokenizer, policy_version: int, indexes: Sequence[int]
) -> Iterator[Record]:
    """Yields the records of some samples of a group, with their texts as decoded.

    Args:
        policy_version: the one that sampled the batch; older tokens were carried over.
        indexes: of the samples in the group.
    """
    group, row = ended.group, ended.row
    is_whole = group.failure() is None
    rewards = group.rewards(scorer.weights, scorer.shaping) if is_whole else [None] * len(group.samples)
    for index in indexes:
        sample = group.samples[index]
        number, is_cut = group.sample_id(sample), sample.finish_reason == TRUNCATED
        yield {
            "kind": SAMPLE, "sample": number, "group": group.number, "index": index, "row": group.row,
            "data_source": row.data_source if row else None,
            "prompt": group.prompt_text, "num_prompt_tokens": group.num_prompt_tokens,
            "media": [each.path for each in group.media],
            "completion": tokenizer.decode(sample.token_ids), **_turns(sample, tokenizer),
            "num_tokens": sample.num_tokens, "num_response_tokens": sample.num_response_tokens,
            "finish_reason": sample.finish_reason, "is_truncated": is_cut,
            "is_masked": is_cut and scorer.shaping.masks_truncated,
            "policy_versions": _versions(sample), "dropped": ended.dropped, "failed": sample.failed,
            "is_carried": sample.oldest_version(policy_version) < policy_version,
            "verdicts": sample.verdicts, "scores": sample.scores, "extras": sample.extras,
            "unmeasured": sample.unmeasured, "reward": rewards[index],
            "advantage": ended.advantages.get(number),
            "ground_truth": row.ground_truth if row else None,
        }  # fmt: skip


def judged_record(ended: EndedGroup, judged: Judged, template: str) -> Record:
    """Returns the record of one answer: the GenRM's prompt, its text, and what was read in it."""
    group, verdict = ended.group, judged.verdict
    return {
        "kind": JUDGED, "group": group.number, "genrm": judged.genrm,
        "samples": [group.sample_id(group.samples[index]) for index in judged.about],
        "tries": judged.tries, "prompt": "".join(text for text, _ in render(template, judged.shown)),
        "answer": judged.answer, "finish_reason": judged.finish_reason,
        "is_readable": verdict is not None,
        "score": verdict.score if verdict and not verdict.ranking else None,
        "ranking": list(verdict.ranking) if verdict and verdict.ranking else None,
    }  # fmt: skip


def _turns(sample: SampleState, tokenizer: Tokenizer) -> Record:
    """Returns the turns after the prompt, if the sample has turns of an environment."""
    if not sample.observations:
        return {}
    observations = iter(sample.observations)
    return {
        "turns": [
            ["policy", tokenizer.decode(unpack_ids(turn.token_ids))]
            if turn.is_sampled
            else ["environment", next(observations)]
            for turn in sample.turns
        ]
    }


def _versions(sample: SampleState) -> list[list[int]]:
    """Returns [policy version, number of tokens] of consecutive sampled tokens."""
    found: list[list[int]] = []
    for turn in sample.turns:
        for version, begin, end in turn.policy_versions:
            if found and found[-1][0] == version:
                found[-1][1] += end - begin
            else:
                found.append([version, end - begin])
    return found
