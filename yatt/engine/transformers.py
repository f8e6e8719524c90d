"""The fallback engine without vLLM: a Hugging Face model that decodes one token per step.

Requests run in cohorts: up to `max_num_seqs` waiting requests are padded on the left to one batch and
decoded together; finished requests leave the batch, and the next cohort starts when it is empty. It does
not use `generate`, because a request has its own seed, can be aborted with its partial completion, and
must leave the process's loop free between tokens. It has about 0.9 of the speed of `generate`, and half of
vLLM's on CPU.

Supports models whose checkpoint names are the module's own names (Qwen2, Qwen3, Llama, Phi-3) or other ones,
as the family says (Mixtral), and experts that transformers has in one tensor (all families with experts).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.engine.media import refuse_media
from yatt.engine.protocol import (
    Comparison,
    EngineOptions,
    WatchedRows,
    begin_watching,
    prompt_and_room,
    refuse_structure,
    waits_for_weights,
)
from yatt.engine.weights.compare import check_published, compare_weights, published_checksums, with_progress
from yatt.engine.weights.published import read_publication
from yatt.errors import WorkerFailed
from yatt.models.families import FAMILIES
from yatt.models.model import read_config
from yatt.models.quantized import KEY
from yatt.records import message as m
from yatt.weights.published import PublishedWeights

TOKENS_PER_CHARACTER = 4
"""Tokens of a completion's end in which a stop text is looked for, by its characters."""


@dataclass(slots=True)
class _Request:
    """One request and its partial completion."""

    sample: m.SampleRequest
    prompt_ids: list[int]
    max_tokens: int
    chance: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    watched: WatchedRows | None = None


@dataclass(slots=True)
class _Cohort:
    """Requests decoded together; row b of every tensor is requests[b]. B rows, T positions so far."""

    requests: list[_Request]
    next_ids_BS: Tensor
    attention_BT: Tensor
    positions_BS: Tensor
    cache: Any = None


class TransformersEngine:
    """See yatt.engine.protocol.Engine."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._model: Any = None
        self._tokenizer: Tokenizer | None = None
        self._waiting: deque[_Request] = deque()
        self._cohort: _Cohort | None = None
        self._policy_version, self._has_weights = 0, True

    @property
    def is_busy(self) -> bool:
        """Whether requests are waiting or running."""
        return bool(self._waiting) or self._cohort is not None

    def start(self) -> None:
        """Loads the model."""
        from transformers import AutoModelForCausalLM

        settings = {"dtype": getattr(torch, self._options.dtype), "attn_implementation": "sdpa"}
        config = config_of_classes(self._options.model)
        if waits_for_weights(self._options):
            delattr(config, KEY)
            self._model, self._has_weights = AutoModelForCausalLM.from_config(config, **settings), False
        else:
            self._model = AutoModelForCausalLM.from_pretrained(self._options.model, config=config, **settings)
        self._model.to(self._options.device).eval().requires_grad_(False)

    def add(self, sample: m.SampleRequest) -> None:
        """See Engine.add."""
        if any(request.sample.request_id == sample.request_id for request in self._all_requests()):
            return
        if not self._has_weights:
            raise WorkerFailed("this engine has no whole weights: an update failed; send LoadWeights")
        refuse_media(sample)
        refuse_structure(sample)
        prompt_ids, max_tokens = prompt_and_room(sample, self._options)
        if max(prompt_ids) >= self._model.config.vocab_size:
            raise ValueError(
                f"token {max(prompt_ids)} of the prompt is not in the model's vocabulary "
                f"({self._model.config.vocab_size} entries): tokenizer and model do not fit"
            )
        size = self._model.config.get_text_config().vocab_size
        watched = begin_watching(sample, self._options, size) if sample.watched else None
        chance = torch.Generator().manual_seed(sample.seed)
        self._waiting.append(_Request(sample, prompt_ids, max_tokens, chance, watched=watched))

    def abort(self, request_ids: tuple[str, ...] | None = None) -> list[m.Completed]:
        """See Engine.abort."""
        ending = [
            request
            for request in self._all_requests()
            if request_ids is None or request.sample.request_id in request_ids
        ]
        self._waiting = deque(request for request in self._waiting if request not in ending)
        if self._cohort is not None:
            self._keep([request not in ending for request in self._cohort.requests])
        return [self._completed(request, "abort") for request in ending]

    def step(self) -> list[m.Completed]:
        """Samples one token for every request of the cohort."""
        if self._cohort is None and self._waiting:
            size = 1 if self._options.deterministic else self._options.max_num_seqs
            taken = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
            self._cohort = _assembled(taken, self._options.device)
        if self._cohort is None:
            return []
        for request, logits_V in zip(self._cohort.requests, self._next_logits_BV(self._cohort), strict=True):
            token, logprobs_V = sampled_token(logits_V, request.sample, request.chance)
            request.token_ids.append(token)
            request.logprobs.append(float(logprobs_V[token]))
            if request.watched is not None:
                request.watched.add(logprobs_V[list(request.watched.ids)].tolist())
        reasons = [self._finish_reason(request) for request in self._cohort.requests]
        finished = [
            self._completed(request, reason)
            for request, reason in zip(self._cohort.requests, reasons, strict=True)
            if reason
        ]
        self._advance(self._cohort)
        self._keep([not reason for reason in reasons])
        return finished

    def idle(self) -> None:
        """Does nothing."""

    def sleep(self) -> None:
        """Moves the weights to host memory on CUDA; frees nothing on CPU."""
        assert not self.is_busy, "requests are aborted before sleep"
        if self._options.device == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Moves the weights back to the device."""
        self._model.to(self._options.device)

    def load_weights(self, policy_version: int, folder: str) -> None:
        """See Engine.load_weights; copies in place, so that tied weights stay tied."""
        assert not self.is_busy, "requests are aborted before an update"
        publication = read_publication(folder, policy_version)
        is_for_gpu = self._options.device == "cuda"
        published = PublishedWeights(publication.stems, publication.stamp, is_for_gpu=is_for_gpu)
        weights = dict(saved_names(self._model))
        _refuse_other_weights(weights, published.shapes(), folder)
        self._has_weights = False  # until the update is complete
        with torch.no_grad():
            for name, tensor in with_progress(published):
                weights[name].copy_(tensor)
        check_published(published, publication.sums)
        self._policy_version, self._has_weights = policy_version, True

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See Engine.score."""
        scores = []
        for ids in sequences:
            scores.append(chosen_entries(self._logprobs_TV(ids), ids))
        return scores

    def _logprobs_TV(self, ids: list[int]) -> Tensor:
        """Log-probs of the whole vocabulary after each token but the last, float32, at temperature 1."""
        ids_1T = torch.tensor([ids], device=self._options.device)
        with torch.no_grad():
            logprobs_TV: Tensor = self._model(ids_1T).logits[0, :-1].float().log_softmax(-1)
        return logprobs_TV

    def compare_weights(self, policy_version: int, folder: str) -> Comparison:
        """See Engine.compare_weights."""
        checksums = published_checksums(read_publication(folder, policy_version))
        return compare_weights(saved_names(self._model), checksums)

    def close(self) -> None:
        """Releases the model."""
        self._model, self._cohort = None, None
        self._waiting.clear()

    def _all_requests(self) -> list[_Request]:
        return [*(self._cohort.requests if self._cohort else ()), *self._waiting]

    def _next_logits_BV(self, cohort: _Cohort) -> Tensor:
        with torch.no_grad():
            output = self._model(
                input_ids=cohort.next_ids_BS,
                attention_mask=cohort.attention_BT,
                position_ids=cohort.positions_BS,
                past_key_values=cohort.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        cohort.cache = output.past_key_values
        logits_BV: Tensor = output.logits[:, -1].float().cpu()
        return logits_BV

    def _advance(self, cohort: _Cohort) -> None:
        """Makes the sampled tokens the input of the next step."""
        newest = [[request.token_ids[-1]] for request in cohort.requests]
        cohort.next_ids_BS = torch.tensor(newest, device=self._options.device)
        cohort.attention_BT = torch.cat(
            [cohort.attention_BT, cohort.attention_BT.new_ones(len(newest), 1)], dim=1
        )
        cohort.positions_BS = cohort.positions_BS[:, -1:] + 1

    def _keep(self, stays: list[bool]) -> None:
        """Removes finished or aborted rows from the batch."""
        cohort = self._cohort
        if cohort is None or all(stays):
            return
        rows = torch.tensor(
            [row for row, stay in enumerate(stays) if stay], dtype=torch.long, device=self._options.device
        )
        if not len(rows):
            self._cohort = None
            return
        cohort.requests = [request for request, stay in zip(cohort.requests, stays, strict=True) if stay]
        cohort.next_ids_BS = cohort.next_ids_BS[rows]
        cohort.attention_BT = cohort.attention_BT[rows]
        cohort.positions_BS = cohort.positions_BS[rows]
        cohort.cache.batch_select_indices(rows)

    def _finish_reason(self, request: _Request) -> str:
        if request.token_ids[-1] in self._options.eos_ids and not request.sample.ignore_eos:
            return "stop"
        if request.token_ids[-1] in request.sample.stop_ids:
            return "stop"
        if request.sample.stop and self._has_stop_text(request):
            return "stop"
        return "length" if len(request.token_ids) >= request.max_tokens else ""

    def _has_stop_text(self, request: _Request) -> bool:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._options.model)
        # Looked for after each token, so its end is that of the text. Some tokens say nothing.
        most = TOKENS_PER_CHARACTER * max(map(len, request.sample.stop))
        text = self._tokenizer.decode(request.token_ids[-most:])
        return any(word in text for word in request.sample.stop)

    def _completed(self, request: _Request, reason: str) -> m.Completed:
        completed = m.Completed(
            request_id=request.sample.request_id,
            token_ids=m.pack_ids(request.token_ids),
            logprobs=m.pack_floats(request.logprobs),
            finish_reason=reason,
            policy_version=self._policy_version,
        )
        return completed if request.watched is None else request.watched.added_to(completed)


def chosen_entries(logprobs_TV: Tensor, ids: list[int]) -> list[float]:
    """Log-prob of each token but the first."""
    next_T1 = torch.tensor(ids[1:], device=logprobs_TV.device)[:, None]
    found: list[float] = logprobs_TV.gather(1, next_T1)[:, 0].tolist()
    return found


def sampled_token(logits_V: Tensor, sample: m.SampleRequest, chance: torch.Generator) -> tuple[int, Tensor]:
    """Samples one token; returns it and the log-probs of the sampled distribution (float32 [V], on CPU).

    Applies temperature, then top-k, then top-p to the remaining tokens, as vLLM does.
    """
    if sample.temperature == 0:
        token = int(logits_V.argmax())
        return token, logits_V.log_softmax(-1)
    logits_V = logits_V / sample.temperature
    if sample.top_k > 0:
        least = logits_V.topk(min(sample.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    if sample.top_p < 1:
        sorted_V, order_V = logits_V.sort(descending=True)
        mass_before_V = sorted_V.softmax(-1).cumsum(-1) - sorted_V.softmax(-1)
        logits_V = logits_V.index_fill(0, order_V[mass_before_V >= sample.top_p], -torch.inf)
    logprobs_V = logits_V.log_softmax(-1)
    token = int(torch.multinomial(logprobs_V.exp(), 1, generator=chance))
    return token, logprobs_V


def _refuse_other_weights(
    weights: dict[str, Tensor], published: dict[str, tuple[int, ...]], folder: str
) -> None:
    """Refuses wrong weights before any copy, so that no update is partial. A tied weight counts once."""
    wrong = [name for name, shape in published.items() if name not in weights or weights[name].shape != shape]
    given = {id(weights[name]) for name in published if name in weights}
    missing = [name for name, weight in weights.items() if id(weight) not in given]
    if wrong or missing:
        raise WorkerFailed(
            f"the weights in {folder} are not of this engine's model: wrong name or shape "
            f"{', '.join(wrong[:5]) or 'none'}; missing {', '.join(missing[:5]) or 'none'}"
        )


def _assembled(requests: list[_Request], device: str) -> _Cohort:
    """Pads prompts on the left to one batch."""
    longest = max(len(request.prompt_ids) for request in requests)
    padding = [longest - len(request.prompt_ids) for request in requests]
    ids = [[0] * pad + request.prompt_ids for pad, request in zip(padding, requests, strict=True)]
    attention = [[0] * pad + [1] * (longest - pad) for pad in padding]
    attention_BT = torch.tensor(attention, device=device)
    return _Cohort(
        requests=requests,
        next_ids_BS=torch.tensor(ids, device=device),
        attention_BT=attention_BT,
        positions_BS=(attention_BT.cumsum(-1) - 1).clamp(min=0),
    )


def config_of_classes(folder: str) -> Any:
    """transformers' config of a model folder. A model type that transformers does not have is that of the
    family's classes: a config that keeps its own type would leave experts at random values.

    Raises:
        ConfigError: the folder has no config.json.
    """
    from transformers import AutoConfig

    values = read_config(folder)
    family = FAMILIES.get(str(values.pop("model_type", "")))
    if family is None or not family.transformers_type:
        return AutoConfig.from_pretrained(folder)
    return AutoConfig.for_model(family.transformers_type, **values)


def saved_names(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's parameters, and buffers that are saved, under the names of its saved files."""
    family = FAMILIES.get(model.config.model_type)
    for name, tensor in _module_names(model):
        for own, released in family.file_names if family else ():
            name = name.replace(own, released)
        yield name, tensor


def _module_names(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The same, with the names of transformers' modules.

    transformers keeps all experts of a layer in one tensor, [experts, rows, columns], gate above up; each
    expert's part is a view of it.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))  # tied ones by both names
    kept = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    for name, parameter in (*parameters, *buffers):
        head, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj") or parameter.dim() != 3:
            yield name, parameter
            continue
        parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
        for number, expert in enumerate(parameter):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{head}.{number}.{part}.weight", rows
