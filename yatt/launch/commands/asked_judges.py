"""`yatt check --ask`: one question to each judge behind a URL, as the run would put it.

Only an answer shows that the key, the name of the model and the fields of the body are what the service
takes, and that a verdict can be read in what it writes.
"""

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice

from yatt import clock
from yatt.adapters.inputs.dataset import read_data_rows
from yatt.adapters.net.judge_api import Content, JudgeApi
from yatt.adapters.processes.watched_trial import TEMPLATE_S, Stages, answer_watched, run_watched
from yatt.config.load import parse_resolved, resolved_text, without_secrets
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.rollouts.groups.groups import TRUNCATED
from yatt.errors import ConfigError, Finding, WorkerFailed, doubt_about, mistake_in
from yatt.judging.protocol import Question, UnusableRow
from yatt.judging.reading import parse_ranking, parse_values, parse_verdict, structure_of, verdict_word
from yatt.judging.template import Shown, render_with_pictures
from yatt.launch.checks.shown_samples import shown_with_truth
from yatt.records import message as m
from yatt.records.episode import MediaRef
from yatt.records.judged import REFUSED, Said

SPARE_S = 20.0
"""Longer than a request's own limit, so that it is this one that ends a request."""

SHOWN_CHARACTERS = 300
GREETING = "Are you there? Answer yes or no."
"""To a judge without a template, whose questions a function of the user makes."""

SMALL_PICTURE = base64.b64decode("""
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19i
Z2hnPk1xeXBkeFxlZ2P/wAALCABAAEABAREA/8QAFQABAQAAAAAAAAAAAAAAAAAAAAX/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/9oA
CAEBAAA/AKAAAAAAAAAAAAAAAAAAAAAD/9k=
""")
"""A grey JPEG file of 64 x 64 pixels, in place of each picture of the prompt."""


def asked_judges(config: RunConfig) -> list[Finding]:
    """Asks each judge behind a URL about the first prompt, with its ground truth as the completion (and an
    empty text as the second one). There is one request to each, and no retry.

    Returns:
        What each has answered: `call`; `note`: no verdict can be read in it; `fail`: the service cannot be
        reached, or refuses the request.
    """
    text = resolved_text(without_secrets(config))
    services = [index for index, genrm in enumerate(config.genrms) if genrm.api.url]
    return [told for index in services for told in _told(config, text, index)]


def _told(config: RunConfig, text: str, index: int) -> Iterator[Finding]:
    """Asks one judge, in a process of its own: templates and patterns of verdicts are programs."""
    module, limit_s, cure = (
        "yatt.launch.commands.asked_judges",
        config.launch.start_timeout_s,
        "Change this key.",
    )
    try:
        answered = run_watched(module, [text, index], limit_s, cure)
    except ConfigError as error:
        yield from error.findings
        return
    yield from (Finding(**json.loads(line)) for line in answered)


def _ask(stages: Stages, text: str, index: int) -> tuple[list[ConfigError], list[str]]:
    config = parse_resolved(text)
    found: list[str] = []
    for row, place in islice(read_data_rows(config.data.train_files, config.data), 1):
        genrm, num_pictures = config.genrms[index], max(1, len(row.media))
        try:
            asked, shown = shown_with_truth(genrm, row)
        except UnusableRow as error:
            return [ConfigError(f"{place}: {error}.", key=f"genrms[{index}].judging.criteria_key")], []
        about = f"{place} with {'its ground truth' if shown['ground_truth'] else 'an empty completion'}"
        content = _content(genrm, shown, num_pictures)
        told = _asked(stages, genrm, f"genrms[{index}]", asked, content, about)
        found.append(json.dumps(asdict(told)))
    return [], found


def _content(genrm: GenRMSection, shown: Shown, num_pictures: int) -> Content:
    if not (genrm.template and genrm.has_known_questions):
        return GREETING
    is_seeing = genrm.sees != "none"
    pictures = [MediaRef("", "", 64, 64)] * num_pictures if is_seeing else []
    parts = render_with_pictures(genrm.template, shown, pictures)
    found = [None if isinstance(part, MediaRef) else part[0] for part in parts]
    return found if is_seeing else "".join(text for text in found if text)


def _asked(
    stages: Stages, genrm: GenRMSection, key: str, question: Question, content: Content, about: str
) -> Finding:
    structure = structure_of(genrm.verdict, question.criteria) if genrm.template else ""
    with stages.doing(f"{key}.api: asking {genrm.api.url}", genrm.api.timeout_s + SPARE_S):
        began_s = clock.monotonic_s()
        try:
            said = asyncio.run(_answer(genrm, content, structure))
        except WorkerFailed as error:
            return mistake_in(f"{key}.api", f"{genrm.api.url}: {error}.")
        took_s = clock.monotonic_s() - began_s
    if said.lacks_logprobs:
        says = f"soft: {genrm.api.url} {said.lacks_logprobs}; write word, or ask another service."
        return mistake_in(f"{key}.verdict.read", says)
    if said.finish_reason == REFUSED:
        return mistake_in(f"{key}.api", f"{genrm.api.url}: {' '.join(said.error.split())}.")
    words = f"answered in {took_s:.1f} s"
    answered = Finding(level="call", key=key, says=f"{words}: {_quoted(said.text)}", has_colon=False)
    if not (genrm.template and genrm.has_known_questions):
        return answered
    is_cut = said.finish_reason == TRUNCATED
    with stages.doing(f"{key}.verdict: reading {_quoted(said.text)} by it", TEMPLATE_S):
        verdict = "" if is_cut else _verdict(genrm, question, said.text)  # a run reads no text that was cut
    if verdict:
        return replace(answered, says=f"{words} about {about}: {verdict}, read in {_quoted(said.text)}")
    cut = f" It was cut at {key}.max_tokens ({genrm.max_tokens})." if is_cut else ""
    reasons = " It has only reasoning." if said.has_reasoning and not said.text.strip() else ""
    return doubt_about(
        key,
        f"{words} about {about}, but a run would read no verdict in {_quoted(said.text)}.{cut}{reasons} "
        f"Change {key}.template, {key}.verdict or {key}.max_tokens.",
    )


async def _answer(genrm: GenRMSection, content: Content, structure: str) -> Said:
    async def pictures() -> list[memoryview]:
        return [memoryview(SMALL_PICTURE) for part in content if part is None]

    once = replace(genrm, api=replace(genrm.api, retries=0, outage_s=0.0))
    ask = m.Ask(genrm=genrm.name, text="", seed=0, max_tokens=genrm.max_tokens, temperature=genrm.temperature)
    service = JudgeApi(once, 1)
    is_soft = genrm.verdict.read == "soft"
    return await service.complete(content, ask, structure, pictures, wants_logprobs=is_soft)


def _verdict(genrm: GenRMSection, question: Question, text: str) -> str:
    """Returns what was read, in words; empty if nothing can be."""
    if question.criteria:
        values = parse_values(text, genrm.verdict, question.criteria) or {}
        return ", ".join(f"{name} {value:g}" for name, value in values.items())
    if question.num_ranked:
        ranking = parse_ranking(text, genrm.verdict, question.num_ranked)
        return f"ranking {[number + 1 for number in ranking]}" if ranking else ""
    score = parse_verdict(text, genrm.verdict)
    return "" if score is None else f"score {score:g} ('{verdict_word(text, genrm.verdict)}')"


def _quoted(text: str) -> str:
    shown = " ".join(text.split())
    return repr(shown if len(shown) <= SHOWN_CHARACTERS else f"... {shown[-SHOWN_CHARACTERS:]}")


if __name__ == "__main__":
    answer_watched(_ask)
