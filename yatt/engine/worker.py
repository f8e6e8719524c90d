"""The process of one engine (rollout or GenRM): receives orders and sends completions in one thread.

The loop executes an order if there is one, otherwise a step of the engine. The engine is built on the first
Wake, so that a worker without a grant uses no GPU memory. Orders pass the fence of
`yatt.adapters.net.worker_link`. Before weights change or the engine sleeps, running requests are returned as
aborted with their partial tokens.

A failed order is answered with Failed and the loop continues; the controller decides whether to keep the
worker. The worker ends with its controller (parent-death signal).
"""

import logging
import math
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from yatt import clock
from yatt.adapters.files.patience import is_passing
from yatt.adapters.machine.collector import without_final_collections
from yatt.adapters.net.worker_link import Received, WorkerLink
from yatt.adapters.node_local.media_file import release_prepared
from yatt.engine.protocol import Comparison, Engine, EngineKind, EngineOptions, RanksLost
from yatt.engine.weights.published import tensors_taken
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, ConfigError, WorkerFailed, error_line
from yatt.models.pictures.tokens import unlimited_tokens
from yatt.records import message as m
from yatt.records.load import StepSums

IDLE_WAIT_S = 0.05
_LOG = logging.getLogger(__name__)
MOST_FAILED_TURNS = 3

NUM_DECODED, DECODED_TOKENS = 4, 32
"""Completions, and tokens of each, by which an engine's log-probs of sampled tokens are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The engine that this worker runs, chosen from the run file before heavy imports."""

    kind: EngineKind
    options: EngineOptions
    build: Callable[[EngineKind, EngineOptions], Engine]
    start_limit_s: float
    join: Callable[[Callable[[], None]], Callable[[Engine], Engine]] | None = None
    """For an engine of several processes: meets the other ranks (with a function to show progress), and
    returns what connects this one's engine to theirs."""


@dataclass(slots=True)
class _BuildTime:
    """The build of an engine reports no work: until its limit it counts as working."""

    until_s: float = 0.0
    vouched: int = 0

    def counted(self) -> int:
        """Returns a counter that rises with each call while an engine is built."""
        self.vouched += clock.monotonic_s() < self.until_s
        return self.vouched


class EngineWorker:
    """Executes a controller's orders on one engine."""

    def __init__(self, link: WorkerLink, plan: EnginePlan) -> None:
        self._link, self._plan = link, plan
        self._engine: Engine | None = None
        self._is_awake = False
        self._may_stay = True
        self._failed_turns = 0
        self._build = _BuildTime()
        self._has_decoded = False
        self._requests: set[str] = set()  # in the engine
        self._steps = StepSums()

    def beat(self) -> m.Renew:
        """The content of a heartbeat. Work includes tensors of new weights."""
        work = self._link.work + self._build.counted() + tensors_taken()
        return m.Renew(token=self._link.lease.held, turns=self._link.turns, work=work, steps=self._steps)

    def serve(self, controller: int) -> None:
        """Executes orders until Stop, or until the parent process with this pid has ended.

        Raises:
            RanksLost: the ranks of this engine cannot go on together.
        """
        while self._may_stay and os.getppid() == controller:
            is_busy = self._engine is not None and self._engine.is_busy
            order = self._link.receive(0 if is_busy else IDLE_WAIT_S)
            if order is not None:
                self._carry_out(order)
            elif is_busy:
                self._link.work += 1
                self._turn()
                if self._engine is not None and not self._engine.is_busy:
                    self._link.send(self.beat())  # a batch may be over: its steps are counted now
            elif self._engine is not None and self._is_awake:
                self._engine.idle()
        self._end_engine()

    def _end_engine(self) -> None:
        """Ends the engine's own processes and groups, before this process ends."""
        if self._engine is not None:
            with without_final_collections():
                self._engine.close()

    def _carry_out(self, order: Received) -> None:
        """Executes one order and always answers it.

        Raises:
            RanksLost: the order failed by that, so the ranks may differ.
        """
        lost: list[RanksLost] = []

        def failed(body: m.Message, error: Exception) -> m.Message:
            lost.extend([error] if isinstance(error, RanksLost) else [])
            return failed_order(body, error)

        answer = self._link.carry_out(order, self._answer, failed)
        if isinstance(answer, m.Completed):
            self._tell([answer])
        elif answer is not None:
            self._link.send(answer, reply_to=order.seq)
        if lost:
            raise lost[0]

    def _answer(self, body: m.Message) -> m.Message | None:
        if isinstance(body, m.Stop):
            self._may_stay = False
            return m.Done()
        match body:
            case m.Wake():
                return self._wake()
            case m.Sleep():
                return self._sleep()
            case m.SampleRequest():
                try:
                    self._woken().add(body)
                finally:  # pictures are mapped, or the request is refused: their files may be evicted
                    folder = Path(self._plan.options.media_folder)
                    release_prepared(folder, len(body.media), body.request_id)
                self._requests.add(body.request_id)
                return None
            case m.Abort():
                self._tell(self._woken().abort(body.request_ids))
                return m.Done()
            case m.LoadWeights():
                return self._load_weights(body)
        raise WorkerFailed(f"{type(body).__name__} is no order for an engine")

    def _woken(self) -> Engine:
        assert self._engine is not None, "the fence admits work only after Wake, which builds the engine"
        return self._engine

    def _wake(self) -> m.Message:
        """Wakes or builds the engine. Idempotent: an engine that is awake stays awake."""
        if self._engine is None:
            self._engine = self._built()
        elif not self._is_awake:
            self._engine.wake()
        self._is_awake = True
        return m.Done()

    def _built(self) -> Engine:
        connected = self._plan.join(self._tick) if self._plan.join is not None else _alone
        self._build.until_s = clock.monotonic_s() + self._plan.start_limit_s
        try:
            engine = connected(self._plan.build(self._plan.kind, self._plan.options))
            engine.start()
        finally:
            self._build.until_s = 0.0
        return engine

    def _tick(self) -> None:
        self._link.work += 1

    def _sleep(self) -> m.Message:
        """Aborts requests and frees the device. Idempotent: no effect if it sleeps or is not built."""
        if self._engine is not None and self._is_awake:
            self._tell(self._engine.abort())
            self._engine.sleep()
        self._is_awake = False
        return m.Done()

    def _load_weights(self, order: m.LoadWeights) -> m.WeightsLoaded:
        engine = self._woken()
        self._tell(engine.abort())
        engine.load_weights(order.policy_version, order.folder)
        comparison = engine.compare_weights(order.policy_version, order.folder)
        probe = [m.unpack_ids(row) for row in order.probe]
        scores = engine.score(probe)
        answer = loaded_answer(order, comparison, scores)
        if self._has_decoded or not probe or self._plan.kind == "scripted":
            return answer
        self._has_decoded = True  # once a process
        difference = decoded_difference(engine, self._plan.options, probe[0], self._tick)
        return msgspec.structs.replace(answer, decoded_difference=difference)

    def _turn(self) -> None:
        """Runs one step of the engine. After an error its requests are returned, for another engine.

        Raises:
            Exception: the last error of `MOST_FAILED_TURNS` failed steps in a row; the engine is unusable.
            RanksLost: at once.
        """
        assert self._engine is not None, "a busy engine has been built"
        most = 1 if self._plan.options.deterministic else self._plan.options.max_num_seqs
        running, began_s = min(len(self._requests), most), clock.monotonic_s()
        try:
            completed = self._engine.step()
            self._tell(completed)
            self._failed_turns = 0
            self._steps = self._steps.plus(running, clock.monotonic_s() - began_s, len(completed))
        except Exception as error:
            _LOG.exception("a turn of the engine failed")
            self._failed_turns += 1
            failed = self._engine.abort()
            self._tell([_errored(each.request_id, f"the engine failed: {error}", m.LOST) for each in failed])
            if self._failed_turns >= MOST_FAILED_TURNS or isinstance(error, RanksLost):
                raise

    def _tell(self, completed: list[m.Completed]) -> None:
        for each in completed:
            self._requests.discard(each.request_id)
            self._link.send(each)


def failed_order(order: m.Message, error: Exception) -> m.Message:
    """The answer to a failed order. An invalid request ends; other errors send it elsewhere."""
    if isinstance(order, m.SampleRequest):
        return _errored(order.request_id, str(error), "error" if isinstance(error, ValueError) else m.LOST)
    is_users = isinstance(error, ConfigError) and not is_passing(error)
    return m.Failed(
        error=error_line(error) if not isinstance(error, ConfigError) else str(error),
        trace=traceback.format_exc(),
        exit_code=EXIT_USER_MISTAKE if is_users else EXIT_FAILED,
    )


def loaded_answer(order: m.LoadWeights, comparison: Comparison, scores: list[list[float]]) -> m.WeightsLoaded:
    """The answer to an order that was carried out."""
    return m.WeightsLoaded(
        policy_version=order.policy_version,
        probe_logprobs=tuple(m.pack_floats(row) for row in scores),
        differing=comparison.differing,
        num_compared=comparison.num_compared,
        num_readable=comparison.num_readable,
    )


def decoded_difference(
    engine: Engine, options: EngineOptions, ids: list[int], tick: Callable[[], None] = lambda: None
) -> float:
    """Samples a few completions, and compares their log-probs with the engine's own scores of these tokens.

    Sampled tokens are computed one by one, and those of a score all at once: only this comparison shows
    whether the log-probs that a run learns from are those of the model's distribution. Prompts repeat
    themselves, as texts do in which speculation by n-grams finds its drafts.

    Args:
        ids: of two or more tokens, none of them of a picture.
        tick: called after each step, which is progress.

    Returns:
        The mean difference of the worst completion; infinite if it is not a number. 0 if the engine takes
        texts that are too short for this.
    """
    room = options.max_model_tokens - 1  # a score samples a token, too
    most = max(1, min(2 * len(ids), room - DECODED_TOKENS))
    if room <= most:
        return 0.0
    turns = [index * len(ids) // NUM_DECODED for index in range(NUM_DECODED)]
    prompts = [((ids[turn:] + ids[:turn]) * 2)[:most] for turn in turns]
    for index, prompt in enumerate(prompts):
        engine.add(
            m.SampleRequest(
                request_id=f"decoded-{index}",
                prompt_ids=m.pack_ids(prompt),
                seed=index,
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                max_tokens=min(DECODED_TOKENS, room - most),
                ignore_eos=True,
            )
        )
    done: dict[str, m.Completed] = {}
    while engine.is_busy:
        done |= {each.request_id: each for each in engine.step()}
        tick()
    completions = [done[f"decoded-{index}"] for index in range(NUM_DECODED)]
    said, sampled = [m.unpack_floats(each.logprobs) for each in completions], []
    for each in completions:
        tokens = m.unpack_ids(each.token_ids)
        sampled.append(tokens[: picture_begin(options, tokens)])
    scores = engine.score([[*prompt, *tokens] for prompt, tokens in zip(prompts, sampled, strict=True)])
    worst = 0.0
    for prompt, tokens, own, score in zip(prompts, sampled, said, scores, strict=True):
        pairs = zip(own[: len(tokens)], score[len(prompt) - 1 :], strict=True)
        mean = sum(abs(a - b) for a, b in pairs) / max(1, len(tokens))
        worst = max(worst, mean if math.isfinite(mean) else math.inf)
    return worst


def picture_begin(options: EngineOptions, ids: list[int]) -> int:
    """Returns the index of the first placeholder of a picture; the number of tokens if there is none."""
    if not options.most_pictures:
        return len(ids)
    placeholder = unlimited_tokens(options.model).image_token_id
    return ids.index(placeholder) if placeholder in ids else len(ids)


def _alone(engine: Engine) -> Engine:
    return engine


def _errored(request_id: str, error: str, reason: str = "error") -> m.Completed:
    return m.Completed(
        request_id=request_id,
        token_ids=b"",
        logprobs=b"",
        finish_reason=reason,
        policy_version=0,
        error=error,
    )
