"""Asks GenRMs for what is no verdict: text for a reward function, a number, log-probs of tokens."""

import asyncio
import math
from collections.abc import Sequence

from yatt.adapters.inputs.text_parts import TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.gpus.engines import ABORTED
from yatt.control.rollouts.scoring.asked import AskedQuestion, Refused, Rendered, note_answer
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.subject import Subject
from yatt.core.samples.teaching import distilled_turns, likeliest_fault, rewarded_turns
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, YattError
from yatt.judging.protocol import Question
from yatt.judging.reading import transformed_values
from yatt.judging.template import render_template
from yatt.records import message as m
from yatt.records.judged import REFUSED, Said
from yatt.records.message import pack_ids, unpack_floats


async def answered_by(judge: Judge, config: RunConfig, ask: m.Ask) -> m.Message:
    """Returns Answered, or Failed with the reason."""
    genrm = next((g for g in config.genrms if g.name == ask.genrm), None)
    if genrm is None:
        return m.Failed(error=f"there is no GenRM '{ask.genrm}' in this run", exit_code=EXIT_USER_MISTAKE)
    try:
        # The function's text contains a completion, so it must not become control tokens.
        said = await judge.ask(genrm, ask, Rendered(parts=[TextPart(ask.text, False)]))
    except YattError as error:
        return m.Failed(error=str(error))
    if said.finish_reason in (REFUSED, ABORTED):
        is_refused = said.finish_reason == REFUSED
        return m.Failed(
            error=said.error or "the GenRM was interrupted",
            exit_code=EXIT_USER_MISTAKE if is_refused else EXIT_FAILED,
        )
    return m.Answered(text=said.text, finish_reason=said.finish_reason)


async def scalar_scores(judge: Judge, genrm: GenRMSection, subjects: Sequence[Subject]) -> list[float]:
    """Returns the scores of completions from the numbers of a scalar reward model.

    Raises:
        Interrupted, Refused, WorkerFailed, DeadlineExceeded: see `Judge.answer`.
    """
    found = await asyncio.gather(*(_number(judge, genrm, each) for each in subjects), return_exceptions=True)
    failed = [each for each in found if isinstance(each, BaseException)]
    if failed:
        raise next((each for each in failed if not isinstance(each, Refused)), failed[0])
    return transformed_values(genrm.transform, [each for each in found if isinstance(each, float)])


async def _number(judge: Judge, genrm: GenRMSection, subject: Subject) -> float:
    subject.counters[f"genrm/{genrm.name}/asked"] += 1
    shown = subject.shown(completion=subject.sample.text)

    def ids(tokenizer: Tokenizer) -> bytes:
        if genrm.chat:
            return pack_ids(tokenizer.encode_chat(subject.conversation(), add_generation_prompt=False))
        parts = [TextPart(*part) for part in render_template(genrm.template, shown)]
        return pack_ids(tokenizer.encode_parts(parts, adds_special=True))

    length = len(shown["prompt"]) + len(subject.sample.text)
    completed = await judge.scored(genrm, ids, length)
    if not math.isfinite(completed.score):
        raise Refused(f"GenRM '{genrm.name}' gave {completed.score}, which is no score")
    said = Said(text=f"{completed.score:.7g}", finish_reason=completed.finish_reason)
    subject.sample.verdicts = {**subject.sample.verdicts, genrm.name: said.text}
    question = Question(key=str(subject.sample.index), fields={}, about=(0,))
    asked = AskedQuestion(subjects=(subject,), question=question, number=0, shown=shown)
    note_answer(genrm.name, asked, said, 1, m.Scored(score=completed.score))
    return completed.score


async def taught_score(judge: Judge, genrm: GenRMSection, subject: Subject) -> float:
    """Adds a teacher's rewards, or its likeliest tokens (`top_k`), to the policy's tokens of a completion;
    returns the mean of its log-probs less the sampler's.

    Raises:
        Interrupted, Refused, WorkerFailed, DeadlineExceeded: see `Judge.answer`.
    """
    subject.counters[f"genrm/{genrm.name}/asked"] += 1
    prompt, sample = subject.group.prompt, subject.sample
    response = sample.response
    completed = await judge.scored(genrm, lambda _: prompt + response, 0, scored_from=len(prompt) // 4)
    logprobs = unpack_floats(completed.logprobs)
    if len(logprobs) != len(response) // 4 or not all(map(math.isfinite, logprobs)):
        raise Refused(f"GenRM '{genrm.name}' gave no log-prob of some tokens")
    turns, mean = rewarded_turns(sample.turns, logprobs, genrm.coef)
    if genrm.top_k:
        likeliest, count = completed.likeliest, len(logprobs)
        if why := await call_in_thread(lambda: likeliest_fault(likeliest, genrm.top_k, count)):
            raise Refused(f"GenRM '{genrm.name}' gave {why}")
        assert likeliest is not None, "else it is a fault"
        turns = distilled_turns(sample.turns, likeliest, genrm.coef)
    sample.turns = turns
    return mean
