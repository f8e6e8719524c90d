"""`yatt check --ask`: one question to each judge behind a URL, as the run would put it.

Only an answer shows that the key, the name of the model and the fields of the body are what the service
takes, and that a verdict can be read in what it writes.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from yatt import clock
from yatt.adapters.data_rows import Row
from yatt.adapters.dataset import read_rows
from yatt.adapters.judge_api import JudgeApi
from yatt.adapters.tokenizer import Tokenizer
from yatt.adapters.watched_trial import TEMPLATE_BYTES, TEMPLATE_S, Stages, answer_watched, run_watched, told
from yatt.config.load import parse_resolved, resolved_text, without_secrets
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.rollouts.data_shard import encode_prompt
from yatt.core.verdict import Shown, parse, parse_ranking, render, structure_of, verdict_word
from yatt.errors import ConfigError, WorkerFailed
from yatt.launch.shown_samples import shown_with_truth
from yatt.records import message as m
from yatt.records.judged import REFUSED, Said

SPARE_S = 20.0
"""Longer than a request's own limit, so that it is this one that ends a request."""

SHOWN_CHARACTERS = 300
GREETING = "Are you there? Answer yes or no."
"""To a judge without a template, whose questions a function of the user makes."""

Told = tuple[Literal["call", "note"], str]


def asked_judges(config: RunConfig) -> list[Told]:
    """Asks each judge behind a URL about the first prompt, with its ground truth as the completion (and an
    empty text as the second one). There is one request to each, and no retry.

    Returns:
        What each has answered: `call`; `note`: no verdict can be read in it.

    Raises:
        ConfigError: a service cannot be reached or refuses the request; one line each.
    """
    arguments = [resolved_text(without_secrets(config))]
    found = run_watched("yatt.launch.asked_judges", arguments, config.launch.start_timeout_s)
    return [tuple(json.loads(line)) for line in found]


def _ask_all(stages: Stages, text: str) -> tuple[list[ConfigError], list[str]]:
    config = parse_resolved(text)
    faults, found = [], list[str]()
    services = [(f"genrms[{i}]", genrm) for i, genrm in enumerate(config.genrms) if not genrm.has_engine]
    for row, place in _first_row(config) if services else ():
        tokenizer = Tokenizer(config.model.path, config.data.template_time)
        what = f"encoding {place} with the tokenizer and chat template of {config.model.path}"
        with stages.doing(what, TEMPLATE_S, TEMPLATE_BYTES):
            prompt, _ = told(what, partial(encode_prompt, row, tokenizer, config))
        for key, genrm in services:
            try:
                found.append(json.dumps(_asked(stages, genrm, key, shown_with_truth(row, prompt), place)))
            except WorkerFailed as error:
                faults.append(ConfigError(f"{key}.api: {genrm.api.url}: {error}."))
    return faults, found


def _first_row(config: RunConfig) -> Iterator[tuple[Row, str]]:
    for row, place in read_rows(config.data.train_files, config.data):
        yield row, place
        return


def _asked(stages: Stages, genrm: GenRMSection, key: str, shown: Shown, place: str) -> Told:
    text = "".join(part for part, _ in render(genrm.template, shown)) if genrm.template else GREETING
    with stages.doing(f"asking {genrm.api.url} ({key}.api)", genrm.api.timeout_s + SPARE_S):
        began_s = clock.monotonic_s()
        said = asyncio.run(_answer(genrm, text))
        took_s = clock.monotonic_s() - began_s
    if said.finish_reason == REFUSED:
        raise WorkerFailed(said.error)
    words = f"{key} answered in {took_s:.1f} s"
    if not genrm.template:
        return "call", f"{words}: {_quoted(said.text)}"
    about = f"{words} about {place} with its ground truth"
    with stages.doing(f"reading the answer of {genrm.api.url} by {key}.verdict", TEMPLATE_S):
        verdict = _verdict(genrm, said.text)
    if verdict:
        return "call", f"{about}: {verdict}, read in {_quoted(said.text)}"
    cut = f" It was cut at {key}.max_tokens ({genrm.max_tokens})." if said.finish_reason == "length" else ""
    reasons = " It has only reasoning." if said.has_reasoning and not said.text.strip() else ""
    return "note", (
        f"{about}, but no verdict can be read in {_quoted(said.text)}.{cut}{reasons} Change {key}.template, "
        f"{key}.verdict or {key}.max_tokens."
    )


async def _answer(genrm: GenRMSection, text: str) -> Said:
    once = replace(genrm, api=replace(genrm.api, retries=0, outage_s=0.0))
    ask = m.Ask(genrm=genrm.name, text="", seed=0, max_tokens=genrm.max_tokens, temperature=genrm.temperature)
    service = JudgeApi(once, 1)
    return await service.complete(text, ask, structure_of(genrm.verdict) if genrm.template else "")


def _verdict(genrm: GenRMSection, text: str) -> str:
    """Returns what was read, in words; empty if nothing can be."""
    if genrm.judging == "listwise":
        ranking = parse_ranking(text, genrm.verdict, 2)
        return f"ranking {[number + 1 for number in ranking]}" if ranking else ""
    score = parse(text, genrm.verdict)
    return "" if score is None else f"score {score:g} ('{verdict_word(text, genrm.verdict)}')"


def _quoted(text: str) -> str:
    shown = " ".join(text.split())
    return repr(shown if len(shown) <= SHOWN_CHARACTERS else f"... {shown[-SHOWN_CHARACTERS:]}")


if __name__ == "__main__":
    answer_watched(_ask_all)
