"""`yatt check --ask`: one question to each judge behind a URL, as the run would put it.

Only an answer shows that the key, the name of the model and the fields of the body are what the service
takes, and that a verdict can be read in what it writes.
"""

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Literal

from yatt import clock
from yatt.adapters.inputs.dataset import read_data_rows
from yatt.adapters.net.judge_api import Content, JudgeApi
from yatt.adapters.processes.watched_trial import TEMPLATE_S, Stages, answer_watched, run_watched
from yatt.config.load import parse_resolved, resolved_text, without_secrets
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.rollouts.groups.groups import TRUNCATED
from yatt.core.samples.verdict import (
    Shown,
    parse_ranking,
    parse_verdict,
    render_with_pictures,
    structure_of,
    verdict_word,
)
from yatt.errors import ConfigError, WorkerFailed
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

Told = tuple[Literal["call", "note", "fail"], str]


def asked_judges(config: RunConfig) -> list[Told]:
    """Asks each judge behind a URL about the first prompt, with its ground truth as the completion (and an
    empty text as the second one). There is one request to each, and no retry.

    Returns:
        What each has answered: `call`; `note`: no verdict can be read in it; `fail`: the service cannot be
        reached, or refuses the request.
    """
    text = resolved_text(without_secrets(config))
    services = [index for index, genrm in enumerate(config.genrms) if not genrm.has_engine]
    return [told for index in services for told in _told(config, text, index)]


def _told(config: RunConfig, text: str, index: int) -> Iterator[Told]:
    """Asks one judge, in a process of its own: templates and patterns of verdicts are programs."""
    module, limit_s, cure = (
        "yatt.launch.commands.asked_judges",
        config.launch.start_timeout_s,
        "Change this key.",
    )
    try:
        answered = run_watched(module, [text, index], limit_s, cure)
    except ConfigError as error:
        yield "fail", " ".join(str(error).split())
        return
    for line in answered:
        level, says = json.loads(line)
        yield level, says


def _ask(stages: Stages, text: str, index: int) -> tuple[list[ConfigError], list[str]]:
    config = parse_resolved(text)
    found: list[str] = []
    for row, place in islice(read_data_rows(config.data.train_files, config.data), 1):
        shown, num_pictures = shown_with_truth(row), max(1, len(row.media))
        about = f"{place} with {'its ground truth' if shown.completion else 'an empty completion'}"
        question = _question(config.genrms[index], shown, num_pictures)
        told = _asked(stages, config.genrms[index], f"genrms[{index}]", question, about)
        found.append(json.dumps(told))
    return [], found


def _question(genrm: GenRMSection, shown: Shown, num_pictures: int) -> Content:
    if not genrm.template:
        return GREETING
    is_seeing = genrm.sees != "none"
    pictures = [MediaRef("", "", 64, 64)] * num_pictures if is_seeing else []
    parts = render_with_pictures(genrm.template, shown, pictures)
    found = [None if isinstance(part, MediaRef) else part[0] for part in parts]
    return found if is_seeing else "".join(text for text in found if text)


def _asked(stages: Stages, genrm: GenRMSection, key: str, question: Content, about: str) -> Told:
    with stages.doing(f"{key}.api: asking {genrm.api.url}", genrm.api.timeout_s + SPARE_S):
        began_s = clock.monotonic_s()
        try:
            said = asyncio.run(_answer(genrm, question))
        except WorkerFailed as error:
            return "fail", f"{key}.api: {genrm.api.url}: {error}."
        took_s = clock.monotonic_s() - began_s
    if said.finish_reason == REFUSED:
        return "fail", f"{key}.api: {genrm.api.url}: {' '.join(said.error.split())}."
    words = f"{key} answered in {took_s:.1f} s"
    if not genrm.template:
        return "call", f"{words}: {_quoted(said.text)}"
    is_cut = said.finish_reason == TRUNCATED
    with stages.doing(f"{key}.verdict: reading {_quoted(said.text)} by it", TEMPLATE_S):
        verdict = "" if is_cut else _verdict(genrm, said.text)  # a run reads no text that was cut
    if verdict:
        return "call", f"{words} about {about}: {verdict}, read in {_quoted(said.text)}"
    cut = f" It was cut at {key}.max_tokens ({genrm.max_tokens})." if is_cut else ""
    reasons = " It has only reasoning." if said.has_reasoning and not said.text.strip() else ""
    return "note", (
        f"{words} about {about}, but a run would read no verdict in {_quoted(said.text)}.{cut}{reasons} "
        f"Change {key}.template, {key}.verdict or {key}.max_tokens."
    )


async def _answer(genrm: GenRMSection, question: Content) -> Said:
    async def pictures() -> list[memoryview]:
        return [memoryview(SMALL_PICTURE) for part in question if part is None]

    once = replace(genrm, api=replace(genrm.api, retries=0, outage_s=0.0))
    ask = m.Ask(genrm=genrm.name, text="", seed=0, max_tokens=genrm.max_tokens, temperature=genrm.temperature)
    service = JudgeApi(once, 1)
    structure = structure_of(genrm.verdict) if genrm.template else ""
    return await service.complete(question, ask, structure, pictures)


def _verdict(genrm: GenRMSection, text: str) -> str:
    """Returns what was read, in words; empty if nothing can be."""
    if genrm.judging == "listwise":
        ranking = parse_ranking(text, genrm.verdict, 2)
        return f"ranking {[number + 1 for number in ranking]}" if ranking else ""
    score = parse_verdict(text, genrm.verdict)
    return "" if score is None else f"score {score:g} ('{verdict_word(text, genrm.verdict)}')"


def _quoted(text: str) -> str:
    shown = " ".join(text.split())
    return repr(shown if len(shown) <= SHOWN_CHARACTERS else f"... {shown[-SHOWN_CHARACTERS:]}")


if __name__ == "__main__":
    answer_watched(_ask)
