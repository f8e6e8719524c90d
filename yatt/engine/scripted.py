"""An engine without a model, for tests of the protocol; yatt.engine.script computes its completions.

A token takes one call of `step` (or `steps_per_token` calls) and, by default, no time. The engine passes the
contract suite of the real engines, imports neither torch nor vLLM, and starts in milliseconds.
"""

import hashlib
import time
from dataclasses import dataclass, field

from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.engine.protocol import (
    Comparison,
    EngineOptions,
    begin_watching,
    prompt_and_room,
    refuse_structure,
)
from yatt.engine.script import (
    Draw,
    Script,
    read_script,
    scripted_completion,
    scripted_likeliest,
    scripted_logprobs,
    scripted_score,
    scripted_watched,
)
from yatt.engine.weights.published import read_publication
from yatt.records import message as m
from yatt.records.episode import Likeliest


@dataclass(slots=True)
class _Scripted:
    """One request: its whole completion, and the number of steps so far."""

    token_ids: list[int]
    logprobs: list[float]
    reason: str
    turns: int = 0
    score: float = 0.0
    likeliest: Likeliest | None = None
    watched: list[list[float]] = field(default_factory=list)


class ScriptedEngine:
    """See yatt.engine.protocol.Engine."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._script: Script | None = None
        self._tokenizer: Tokenizer | None = None
        self._running: dict[str, _Scripted] = {}
        self._policy_version = 0

    @property
    def is_busy(self) -> bool:
        """Whether requests are running."""
        return bool(self._running)

    def start(self) -> None:
        """Reads the script."""
        self._script = read_script(self._options.model, self._options.eos_ids)

    def add(self, sample: m.SampleRequest) -> None:
        """See Engine.add."""
        assert self._script is not None, "start() comes first"
        if sample.request_id in self._running:
            return
        refuse_structure(sample)
        prompt_ids, max_tokens = prompt_and_room(sample, self._options)
        if sample.watched:
            begin_watching(sample, self._options, self._script.vocab_size)  # refuses it
        draw = Draw(
            policy_version=self._policy_version,
            prompt_ids=prompt_ids + (_picture_numbers(sample, self._options) if sample.media else []),
            seed=sample.seed if sample.temperature else 0,
            temperature=sample.temperature,
        )
        token_ids, logprobs, reason = scripted_completion(
            self._script, draw, max_tokens=max_tokens, ignore_eos=sample.ignore_eos
        )
        if self._options.label >= 0:
            value = scripted_score(prompt_ids, self._options.label)
            self._running[sample.request_id] = _Scripted([], [], "stop", score=value)
            return
        if self._options.is_teacher:
            first, count = sample.scored_from - 1, self._options.num_likeliest
            known = scripted_logprobs(self._policy_version, prompt_ids)[first:]
            scripted = _Scripted([], known, "stop")
            if count:
                found = scripted_likeliest(self._script, prompt_ids[first:-1], count)
                scripted.likeliest = Likeliest(count, *found)
            self._running[sample.request_id] = scripted
            return
        scripted = _Scripted(token_ids, logprobs, reason)
        self._cut_at_stop(scripted, sample)
        if sample.watched:
            scripted.watched = scripted_watched(self._script, draw, scripted.token_ids, sample.watched)
        self._running[sample.request_id] = scripted

    def abort(self, request_ids: tuple[str, ...] | None = None) -> list[m.Completed]:
        """See Engine.abort."""
        wanted = tuple(self._running) if request_ids is None else request_ids
        return [self._complete(name, "abort") for name in wanted if name in self._running]

    def step(self) -> list[m.Completed]:
        """See Engine.step."""
        assert self._script is not None, "start() comes first"
        if self._script.seconds_per_step:
            time.sleep(self._script.seconds_per_step)
        finished = []
        for request_id, scripted in list(self._running.items())[: self._num_seqs()]:
            scripted.turns += 1
            if self._num_tokens(scripted) >= len(scripted.token_ids):
                finished.append(self._complete(request_id, scripted.reason))
        return finished

    def idle(self) -> None:
        """Does nothing."""

    def sleep(self) -> None:
        """Does nothing, because no memory is held."""
        assert not self._running, "requests are aborted before sleep"

    def wake(self) -> None:
        """Does nothing."""

    def load_weights(self, policy_version: int, folder: str) -> None:
        """See Engine.load_weights; only the index is read."""
        assert not self._running, "requests are aborted before an update"
        self._policy_version = read_publication(folder, policy_version).stamp.version

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See Engine.score."""
        return [scripted_logprobs(self._policy_version, ids) for ids in sequences]

    def compare_weights(self, policy_version: int, folder: str) -> Comparison:
        """See Engine.compare_weights; only the policy version is checked."""
        read_publication(folder, policy_version)
        return Comparison()

    def close(self) -> None:
        """Removes all requests."""
        self._running.clear()

    def _num_seqs(self) -> int:
        return 1 if self._options.deterministic else self._options.max_num_seqs

    def _num_tokens(self, scripted: _Scripted) -> int:
        assert self._script is not None, "start() comes first"
        return min(scripted.turns // self._script.steps_per_token, len(scripted.token_ids))

    def _complete(self, request_id: str, reason: str) -> m.Completed:
        scripted = self._running.pop(request_id)
        said = self._num_tokens(scripted)
        return m.Completed(
            request_id=request_id,
            score=scripted.score,
            likeliest=scripted.likeliest,
            token_ids=m.pack_ids(scripted.token_ids[:said]),
            logprobs=m.pack_floats(scripted.logprobs[:said] if scripted.token_ids else scripted.logprobs),
            finish_reason=reason,
            policy_version=self._policy_version,
            watched=m.pack_floats([each for row in scripted.watched[:said] for each in row]),
        )

    def _cut_at_stop(self, scripted: _Scripted, sample: m.SampleRequest) -> None:
        """Ends the completion after the token that is a stop token or completes a stop text, as the real
        engines do."""
        if not (sample.stop or sample.stop_ids):
            return
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._options.model)
        for end in range(1, len(scripted.token_ids) + 1):
            text = self._tokenizer.decode(scripted.token_ids[:end]) if sample.stop else ""
            if scripted.token_ids[end - 1] in sample.stop_ids or any(word in text for word in sample.stop):
                del scripted.token_ids[end:], scripted.logprobs[end:]
                scripted.reason = "stop"
                return


def _picture_numbers(sample: m.SampleRequest, options: EngineOptions) -> list[int]:
    """A number for each picture that depends on every patch: so the completion does too."""
    from yatt.engine.media import prepared_pictures  # numpy: not for text

    digests = (hashlib.sha256(each.patches.data).digest() for each in prepared_pictures(sample, options))
    return [int.from_bytes(digest[:8], "little") for digest in digests]
