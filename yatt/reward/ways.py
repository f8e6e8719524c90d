"""Loads the user's ways of judging, and tries them before a run starts."""

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

from yatt.adapters.inputs.data_rows import prompt_text, truth_text
from yatt.adapters.inputs.dataset import read_data_rows
from yatt.adapters.inputs.user_module import where_raised
from yatt.adapters.processes.trial import answer_trial, run_trial
from yatt.config.load import parse_resolved, resolved_text, without_secrets
from yatt.config.schema import GenRMSection, RunConfig
from yatt.errors import ConfigError, words_of
from yatt.judging.outside import (
    ask_way,
    checked_questions,
    packed_group,
    refuse_fields,
    unpacked_scores,
    way_name,
)
from yatt.judging.protocol import Answer, JudgedGroup, Judging, Question, UnusableRow
from yatt.judging.template import shown_fields_of
from yatt.reward.functions import RewardFunction, load_function

TRIED_COMPLETIONS = ("", "a")


def load_ways(config: RunConfig) -> dict[str, RewardFunction]:
    """Loads every way of judging that is the user's, by `way_name`.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    own = [genrm for genrm in config.genrms if genrm.judging.by == "own"]
    return {way_name(genrm.name): load_way(genrm) for genrm in own}


def load_way(genrm: GenRMSection) -> RewardFunction:
    """Loads one way of judging, as a function of a group and of answers.

    Raises:
        ConfigError: as in `load_function`; or what the function gives is no way of judging.
    """
    path, key = Path(genrm.path).absolute(), f"genrms[{genrm.name}]"
    make = load_function(path, genrm.function, key)
    place = f"{genrm.path}:{genrm.function}"
    try:
        way = make(genrm)
    except Exception as error:
        where = where_raised(error, path)
        raise ConfigError(f"{place} failed at {where}: {words_of(error)}.", key=f"{key}.function") from error
    if not all(callable(getattr(way, name, None)) for name in ("questions", "read")):
        says = f"{place} gives {type(way).__name__}, which has no methods questions and read."
        raise ConfigError(says, key=f"{key}.function")
    return RewardFunction(
        name=way_name(genrm.name),
        call=partial(ask_way, way),
        place=place,
        path=path,
        style="way",
        kwargs={},
        timeout_s=genrm.timeout_s,
    )


def try_way(config: RunConfig, genrm: GenRMSection) -> None:
    """Loads a user's way of judging in a child process, and asks it about the first data row.

    Raises:
        ConfigError: it cannot be loaded, or its questions or scores cannot be used.
    """
    arguments = [resolved_text(without_secrets(config)), genrm.name]
    path, key = Path(genrm.path).absolute(), f"genrms[{genrm.name}].path"
    run_trial("yatt.reward.ways", arguments, path=path, key=key, limit_s=config.launch.start_timeout_s)


def _try(text: str, name: str) -> None:
    config = parse_resolved(text)
    genrm = next(each for each in config.genrms if each.name == name)
    function = load_way(genrm)
    way: Judging = function.call.args[0]  # type: ignore[attr-defined]  # a partial, see load_way
    group = _first_group(config)
    try:
        questions = checked_questions(way.questions(group), group)
        for question in questions:
            refuse_fields(shown_fields_of(genrm.template), question)
        for answers in (
            {each.key: _middle(each) for each in questions},
            {each.key: None for each in questions},
        ):
            unpacked_scores(ask_way(way, packed_group(group, answers), group.row))
    except UnusableRow as error:
        raise ConfigError(
            f"{function.place} about the first data row: {error}.", key=f"genrms[{name}].path"
        ) from error
    except Exception as error:
        says = f"{function.place} failed at {where_raised(error, function.path)}: {words_of(error)}."
        raise ConfigError(says, key=f"genrms[{name}].path") from error


def _first_group(config: RunConfig) -> JudgedGroup:
    """Returns completions of the first data row: the ground truth if it is text, and short ones."""
    group = JudgedGroup(
        prompt="", ground_truth="", data_source="", completions=TRIED_COMPLETIONS, indexes=(0, 1)
    )
    with contextlib.suppress(ConfigError, OSError):  # told by another check
        row, _ = next(iter(read_data_rows(config.data.train_files, config.data)))
        group = replace(
            group, prompt=prompt_text(row.prompt), ground_truth=truth_text(row.ground_truth),
            data_source=row.data_source, row=row.raw,
        )  # fmt: skip
    count = config.rollout.n
    texts = (group.ground_truth, *TRIED_COMPLETIONS * count)[:count]
    return replace(group, completions=texts, indexes=tuple(range(count)))


def _middle(question: Question) -> Answer:
    if question.num_ranked:
        return Answer(rankings=(tuple(range(question.num_ranked)),))
    if question.criteria:
        return Answer(values=(dict.fromkeys(question.criteria, 0.5),))
    return Answer(votes=(0.5,))


if __name__ == "__main__":
    answer_trial(_try)
