"""Engines that write nothing: scalar reward models, and teachers.

A scalar reward model gives each text the raw number of its head for the last token, whatever the model's
padding token is: a padding token that is also the end of a text would give all texts the value of the token
before. A teacher gives the tokens of a completion its log-probs, and may give the tokens that it finds
likeliest in their places.
"""

import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from yatt.engine.media import refuse_media
from yatt.engine.protocol import Engine, EngineKind, EngineOptions, begin_watching, prompt_and_room
from yatt.engine.transformers import TransformersEngine, chosen_entries
from yatt.engine.vllm import Running, VllmEngine, chosen_logprobs, vllm_refusals
from yatt.errors import WorkerFailed
from yatt.records import message as m
from yatt.records.episode import Likeliest


class ScalarTransformersEngine(TransformersEngine):
    """See yatt.engine.protocol.Engine. Computes one text per step."""

    def start(self) -> None:
        """Loads the model with its head."""
        from transformers import AutoModelForSequenceClassification

        settings = {"dtype": getattr(torch, self._options.dtype), "attn_implementation": "sdpa"}
        self._model = AutoModelForSequenceClassification.from_pretrained(self._options.model, **settings)
        self._model.config.get_text_config().pad_token_id = self._model.config.pad_token_id = None
        self._model.to(self._options.device).eval().requires_grad_(False)

    def step(self) -> list[m.Completed]:
        """Computes the number of one text."""
        if not self._waiting:
            return []
        request = self._waiting.popleft()
        ids_1T = torch.tensor([request.prompt_ids], device=self._options.device)
        with torch.no_grad():
            values_L = self._model(ids_1T, use_cache=False).logits[0]
        completed = self._completed(request, "stop")
        return [msgspec.structs.replace(completed, score=float(values_L[self._options.label]))]


class ScalarVllmEngine(VllmEngine):
    """See yatt.engine.protocol.Engine."""

    def _more_arguments(self) -> dict[str, Any]:
        """The head's raw values are wanted; vLLM's default is a sigmoid."""
        from vllm.config import PoolerConfig

        return {"runner": "pooling", "pooler_config": PoolerConfig(use_activation=False)}

    def add(self, sample: m.SampleRequest) -> None:
        """See Engine.add."""
        if sample.request_id in self._running:
            return
        refuse_media(sample)
        if sample.watched:
            begin_watching(sample, self._options, self._vocab_size())  # refuses it
        prompt_ids, _ = prompt_and_room(sample, self._options)
        try:
            self._llm.add_request(sample.request_id, {"prompt_token_ids": prompt_ids}, self._parameters())
        except vllm_refusals() as error:
            raise ValueError(str(error)) from error
        self._running[sample.request_id] = Running()

    def _parameters(self) -> Any:
        """vLLM's parameters of a request."""
        from vllm import PoolingParams

        return PoolingParams(task="classify", use_activation=False)

    def step(self) -> list[m.Completed]:
        """See Engine.step."""
        if not self._running:
            return []
        outputs = [each for each in self._llm.step() if each.finished and each.request_id in self._running]
        return [self._valued(output) for output in outputs]

    def _valued(self, output: Any) -> m.Completed:
        """Returns the answer to a request that is complete."""
        value = float(output.outputs.data.flatten()[self._options.label])
        return msgspec.structs.replace(self._complete(output.request_id, "stop"), score=value)


class TeacherTransformersEngine(TransformersEngine):
    """See yatt.engine.protocol.Engine. Computes one text per step."""

    def step(self) -> list[m.Completed]:
        """Computes the log-probs of one completion."""
        if not self._waiting:
            return []
        request = self._waiting.popleft()
        logprobs_TV = self._logprobs_TV(request.prompt_ids)
        completed, first = self._completed(request, "stop"), request.sample.scored_from - 1
        scored = m.pack_floats(chosen_entries(logprobs_TV, request.prompt_ids)[first:])
        count, likeliest = self._options.num_likeliest, None
        if count:
            top = logprobs_TV[first:].topk(count)
            ids, values = (each.cpu().numpy() for each in (top.indices.int(), top.values))
            likeliest = Likeliest(count, ids.tobytes(), values.tobytes())
        return [msgspec.structs.replace(completed, logprobs=scored, likeliest=likeliest)]


class TeacherVllmEngine(ScalarVllmEngine):
    """See yatt.engine.protocol.Engine."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._first: dict[str, int] = {}  # by request: the first token that is scored

    def _more_arguments(self) -> dict[str, Any]:
        count = self._options.num_likeliest
        return {"max_logprobs": count} if count else {}

    def add(self, sample: m.SampleRequest) -> None:
        """See Engine.add."""
        super().add(sample)
        self._first[sample.request_id] = sample.scored_from

    def _parameters(self) -> Any:
        from vllm import SamplingParams

        count = self._options.num_likeliest
        more = {"flat_logprobs": True} if count else {}  # two lists in place of an object for each log-prob
        return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=count, detokenize=False, **more)

    def _valued(self, output: Any) -> m.Completed:
        first = self._first[output.request_id]
        scored, token_ids = output.prompt_logprobs[first:], output.prompt_token_ids[first:]
        completed = self._complete(output.request_id, "stop")
        if not self._options.num_likeliest:
            logprobs = chosen_logprobs(scored, token_ids)
            return msgspec.structs.replace(completed, logprobs=m.pack_floats(logprobs))
        own, likeliest = flat_rows(scored, token_ids, self._options.num_likeliest)
        return msgspec.structs.replace(completed, logprobs=own, likeliest=likeliest)

    def _complete(self, request_id: str, reason: str) -> m.Completed:
        self._first.pop(request_id, None)
        return super()._complete(request_id, reason)


def flat_rows(scored: Any, token_ids: Sequence[int], count: int) -> tuple[bytes, Likeliest]:
    """Returns the packed log-probs of tokens, and the likeliest tokens in their places.

    Args:
        scored: vLLM's FlatLogprobs: a row for each token, the token itself and then the `count` likeliest,
            among which it may be again.

    Raises:
        WorkerFailed: this vLLM has other rows.
    """
    ids, logprobs, width = array.array("i", scored.token_ids), array.array("f", scored.logprobs), count + 1
    if len(ids) != width * len(token_ids) or ids[::width].tolist() != list(token_ids):
        raise WorkerFailed(
            "vLLM's rows of log-probs are not a token and the likeliest ones; report its version"
        )
    own = logprobs[::width].tobytes()
    del ids[::width], logprobs[::width]
    return own, Likeliest(count, ids.tobytes(), logprobs.tobytes())


SCORING_ENGINES: dict[tuple[EngineKind, bool], Callable[[EngineOptions], Engine]] = {
    ("vllm", False): ScalarVllmEngine,
    ("vllm", True): TeacherVllmEngine,
    ("transformers", False): ScalarTransformersEngine,
    ("transformers", True): TeacherTransformersEngine,
}
"""By library, and whether it is a teacher."""
