"""Requests completions of a prompt group from the engines."""

from collections import Counter

from yatt.control.gpus.engines import ABORTED
from yatt.control.node import Node
from yatt.control.rollouts.groups import PromptGroup, SampleState
from yatt.control.rollouts.router import Router
from yatt.core.placement import ROLLOUT
from yatt.core.prompts import sample_seed
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import message as m


class Completions:
    """Extends samples by completions from the engines."""

    def __init__(self, node: Node, router: Router) -> None:
        self._run, self._section, self._router = node.config.run, node.config.rollout, router

    async def extend(self, group: PromptGroup, sample: SampleState, counts: "Counter[str]") -> None:
        """Requests the rest of one sample's completion. A failure is noted in the sample.

        Args:
            counts: counters of the group.
        """
        try:
            completed = await self._router.complete(ROLLOUT, self._request(group, sample))
        except (WorkerFailed, DeadlineExceeded) as error:
            why = f"prompt {group.number}, sample {sample.index}: {error}"
            sample.fail_by_machines(why, deterministic=self._run.deterministic)
            return
        if completed.finish_reason == "error":  # refused: the engine cannot run it
            sample.fail(f"prompt {group.number}, sample {sample.index}: {completed.error}", is_users=True)
            return
        sample.extend(completed.token_ids, completed.logprobs, completed.policy_version)
        counts["rollout/tokens"] += len(completed.token_ids) // 4
        if completed.finish_reason != ABORTED:
            sample.finish_reason = completed.finish_reason

    def _request(self, group: PromptGroup, sample: SampleState) -> m.Sample:
        section, num_tokens = self._section, sample.num_tokens
        return m.Sample(
            request_id=f"{group.number}/{sample.index}/{num_tokens}",
            prompt_ids=group.prompt + sample.completion,
            seed=sample_seed(self._run.seed, group.number, sample.index, num_tokens),
            temperature=section.temperature, top_p=section.top_p, top_k=section.top_k,
            max_tokens=section.max_response_tokens - num_tokens,
            stop=section.stop, ignore_eos=section.ignore_eos, group=f"{group.number}",
        )  # fmt: skip
