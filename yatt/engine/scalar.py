"""Engines of scalar reward models: each text gets one number, the raw value of the model's head.

The number is that of the last token, whatever the model's padding token is: a padding token that is also the
end of a text would give all texts the value of the token before.
"""

from typing import Any

import msgspec
import torch

from yatt.engine.media import refuse_media
from yatt.engine.protocol import prompt_and_room
from yatt.engine.transformers import TransformersEngine
from yatt.engine.vllm import Running, VllmEngine, vllm_refusals
from yatt.records import message as m


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
        from vllm import PoolingParams

        if sample.request_id in self._running:
            return
        refuse_media(sample)
        prompt_ids, _ = prompt_and_room(sample, self._options)
        asked = PoolingParams(task="classify", use_activation=False)
        try:
            self._llm.add_request(sample.request_id, {"prompt_token_ids": prompt_ids}, asked)
        except vllm_refusals() as error:
            raise ValueError(str(error)) from error
        self._running[sample.request_id] = Running()

    def step(self) -> list[m.Completed]:
        """See Engine.step."""
        if not self._running:
            return []
        outputs = [each for each in self._llm.step() if each.finished and each.request_id in self._running]
        return [self._valued(output) for output in outputs]

    def _valued(self, output: Any) -> m.Completed:
        value = float(output.outputs.data.flatten()[self._options.label])
        return msgspec.structs.replace(self._complete(output.request_id, "stop"), score=value)
