"""Reads the run's prompts, tokenizers and chat templates before anything starts, in a process with limits of
time and memory.

So a template that loops, a tokenizer that crashes its library and a damaged parquet file
end only this process.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.inputs.data_rows import config_columns
from yatt.adapters.inputs.dataset import Row, RowCounts, check_rows, conversation_of, read_data_rows
from yatt.adapters.inputs.text_parts import TextPart
from yatt.adapters.inputs.tokenizer import TEMPLATE_FILE, Tokenizer
from yatt.adapters.processes.watched_trial import (
    TEMPLATE_BYTES,
    TEMPLATE_S,
    Stages,
    answer_watched,
    result_of_stage,
    run_watched,
)
from yatt.config.load import parse_resolved, resolved_text, without_secrets
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.rollouts.groups.given import limits_in_words, row_lengths
from yatt.control.rollouts.scoring.asked import thought_ending, word_tokens
from yatt.errors import ConfigError
from yatt.judging.judging import check_asked, shortest_shown
from yatt.judging.protocol import UnusableRow
from yatt.judging.template import Shown, render_template
from yatt.judging.ways.rubric import refuse_row
from yatt.launch.checks.judge_check import check_writable, context_notes
from yatt.launch.checks.seeing_check import PictureHeads, check_answer, refuse_blind, seeing_notes
from yatt.models.folder import decoder_config
from yatt.models.model import read_config

FIRST_ROWS, ROWS_PER_OCTAVE = 512, 256
MOST_ROWS = 20_000
"""Most rows whose length is looked at to find one that is short enough."""

MANY_TOO_LONG = 0.2


def check_inputs(config: RunConfig) -> None:
    """Checks data files, tokenizers and chat templates; writes notes about what is rarely intended.

    Raises:
        ConfigError: one of them cannot be used; all mistakes, one per line.
    """
    arguments = [resolved_text(without_secrets(config))]
    for note in run_watched("yatt.launch.checks.input_trial", arguments, config.launch.start_timeout_s):
        sys.stderr.write(f"yatt: note: {note}\n")


def is_looked_at(number: int) -> bool:
    """Whether a row's length is counted: the first rows, then fewer, the further on."""
    return number < FIRST_ROWS or number % (1 << number.bit_length() - ROWS_PER_OCTAVE.bit_length()) == 0


class _Prompts:
    """Encodes some rows of data files, as a run does.

    Args:
        most: rows that a run opens; those after them are not looked at.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer | None, stages: Stages, most: int) -> None:
        self._config, self._tokenizer, self._stages = config, tokenizer, stages
        self._most_ids = _vocab_size(config.model.path)
        self.most = most
        self.num_seen = self.num_too_long = 0

    def look(self, number: int, row: Row, place: str) -> None:
        """Counts a row, if it is one of those that are looked at.

        Raises:
            ConfigError: the tokenizer or the template does not take it.
        """
        self._stages.tick()
        is_opened = number < self.most and not row.is_equal_pair
        if self._tokenizer is None or not is_opened or not is_looked_at(number):
            return
        self.num_seen += 1
        self.num_too_long += not self.fits(row, place, self._tokenizer)

    def any_fits(self, files: tuple[str, ...]) -> bool:
        """Whether any prompt of the files is short enough."""
        tokenizer = self._tokenizer
        return tokenizer is None or any(
            self.fits(row, place, tokenizer)
            for row, place in itertools.islice(read_data_rows(files, self._config.data), self.most)
            if not row.is_equal_pair
        )

    def fits(self, row: Row, place: str, tokenizer: Tokenizer) -> bool:
        """Whether a prompt is short enough.

        Raises:
            ConfigError: as in `look`.
        """
        folder = self._config.model.path
        what = f"encoding {place} with the tokenizer and chat template of {folder}"
        with self._stages.doing(what, TEMPLATE_S, TEMPLATE_BYTES):
            found = result_of_stage(what, partial(row_lengths, row, place, tokenizer, self._config))
        if self._most_ids and found.largest_id >= self._most_ids:
            raise ConfigError(
                f"the tokenizer of {folder} gives token {found.largest_id} for {place}, but its config.json "
                f"says vocab_size={self._most_ids}. Copy the folder's files again.",
                key="model.path",
            )
        return found.fits


def _check_files(
    config: RunConfig, files: tuple[str, ...], tokenizer: Tokenizer | None, stages: Stages
) -> list[str]:
    """Checks every row, and the lengths of some; returns notes.

    Raises:
        ConfigError: a file or row cannot be used, no row has a ground truth, or every prompt is too long.
    """
    is_held_out = config.is_given and files == config.data.val_files
    most = config.validation.max_prompts if is_held_out else sys.maxsize
    prompts, pictures = _Prompts(config, tokenizer, stages, most), PictureHeads(config)

    def look(number: int, row: Row, place: str) -> None:
        prompts.look(number, row, place)
        pictures.look(row, place)
        if files == config.data.train_files:  # judges see no held-out rows but in an evaluation
            _check_criteria(config, row, place)

    counts = check_rows(files, config.data, look)
    pictures.refuse_changed()
    return [
        *_truth_notes(config, files, counts),
        *_equal_notes(files, counts),
        *_length_notes(config, files, prompts, min(most, counts.rows)),
        *pictures.notes(files),
    ]


def _check_criteria(config: RunConfig, row: Row, place: str) -> None:
    """Refuses a row whose criteria cannot be used."""
    known = config_columns(config.data)
    for index, genrm in enumerate(config.genrms):
        key, place_in_row = f"genrms[{index}].judging.criteria_key", genrm.judging.criteria_key
        if place_in_row and place_in_row.split(".", 1)[0] not in known:
            says = f"column {place_in_row.split('.', 1)[0]} is not read; put the criteria into extra_info."
            raise ConfigError(says, key=key)
        try:
            refuse_row(genrm, row.raw)
        except UnusableRow as error:
            raise ConfigError(f"{place}: {error}.", key=key) from error


def _truth_notes(config: RunConfig, files: tuple[str, ...], counts: RowCounts) -> Iterator[str]:
    key, named = config.data.ground_truth_key, ", ".join(files)
    if not key or not counts.without_truth or not _needs_truth(config):
        return
    if counts.without_truth == counts.rows:
        raise ConfigError(
            f"no row of {named} has a column '{key}', which reward functions and templates get as "
            "ground_truth; name the right column, or write ground_truth_key: '' if there is none.",
            key="data.ground_truth_key",
        )
    yield f"{counts.without_truth} of {counts.rows} rows of {named} have no '{key}': its value is None."


def _equal_notes(files: tuple[str, ...], counts: RowCounts) -> Iterator[str]:
    """Tells of pairs of which nothing can be learnt."""
    named = f"of the {counts.rows} rows of {', '.join(files)}"
    if counts.equal_pairs == counts.rows:
        raise ConfigError(f"{counts.equal_pairs} {named} have the same chosen and rejected: correct them.")
    if counts.equal_pairs:
        yield f"{counts.equal_pairs} {named} have the same chosen and rejected, and are skipped."


def _needs_truth(config: RunConfig) -> bool:
    return (
        any(reward.style == "verl" for reward in config.rewards)
        or any(genrm.judging.needs_truth for genrm in config.genrms)
        or any(genrm.path for genrm in config.genrms)
        or any("{ground_truth}" in genrm.template for genrm in config.genrms)
    )


def _length_notes(
    config: RunConfig, files: tuple[str, ...], prompts: _Prompts, num_rows: int
) -> Iterator[str]:
    named, (key, limit) = ", ".join(files), limits_in_words(config)
    seen, long = prompts.num_seen, prompts.num_too_long
    if not seen or long <= MANY_TOO_LONG * seen:
        return
    if long == seen and num_rows <= MOST_ROWS and not (num_rows > seen and prompts.any_fits(files)):
        is_whole = prompts.most == sys.maxsize
        which = f"every prompt of {named}" if is_whole else f"each of the first {num_rows} rows of {named}"
        raise ConfigError(f"{which} is longer than {limit} tokens; raise it.", key=key)
    yield (
        f"{key}: {long} of {seen} prompts of {named} that were looked at are longer than {limit} tokens and "
        "will be skipped."
    )


def _check_judge(config: RunConfig, genrm: GenRMSection, key: str, stages: Stages) -> list[str]:
    """Loads a GenRM's tokenizer and encodes the shortest question; returns notes.

    Raises:
        ConfigError: it cannot be used, or a question does not fit into the GenRM's context.
    """
    folder = config.judge_folder(genrm)
    if genrm.sees != "none":
        refuse_blind(config, genrm, key)
    tokenizer = _tokenizer(config, folder)
    if genrm.chat and not tokenizer.has_chat_template:
        raise ConfigError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); add one, or write chat: false.",
            key=f"{key}.chat",
            missing=f"{folder}/{TEMPLATE_FILE}",
        )
    if genrm.template:
        try:
            check_asked(genrm, key)
        except ConfigError:
            return []  # told by another check
    if genrm.verdict.read == "soft":
        word_tokens(genrm, tokenizer)
    check_writable(genrm, tokenizer, key)
    num_end = len(thought_ending(genrm, tokenizer).ids) if genrm.think.budget else 0
    what = f"{key}.model: encoding a question with the tokenizer and chat template of {folder}"
    shortest = shortest_shown(genrm, config.rollout.n)
    with stages.doing(what, TEMPLATE_S, TEMPLATE_BYTES):
        num_tokens = result_of_stage(what, lambda: len(question_ids(genrm, tokenizer, shortest)))
        is_known = genrm.has_known_questions
        notes = list(context_notes(config, genrm, key, num_tokens, num_end)) if is_known else []
        if genrm.sees != "none":
            seen = result_of_stage(what, partial(seeing_notes, config, genrm, key, tokenizer, shortest))
            notes += seen
    return notes


def _tokenizer(config: RunConfig, folder: str) -> Tokenizer:
    tokenizer = Tokenizer(folder, config.data.template_time)
    tokenizer.check_vocabulary()
    return tokenizer


def question_ids(
    genrm: GenRMSection, tokenizer: Tokenizer, shown: Shown, prompt: str | list[dict[str, Any]] | None = None
) -> list[int]:
    """Returns a question to a GenRM as its engine gets it, as token ids; `prompt` is that of the data row."""
    if genrm.kind == "scalar" and genrm.chat:
        said = conversation_of(
            str(shown["prompt"]) if prompt is None else prompt, ("assistant", str(shown["completion"]))
        )
        return tokenizer.encode_chat(said, add_generation_prompt=False)
    parts = [
        TextPart(text, is_own) for text, is_own in render_template(genrm.template or "{completion}", shown)
    ]
    if not genrm.chat:
        return tokenizer.encode_parts(parts, adds_special=True)
    return tokenizer.encode_chat([{"role": "user", "content": parts}])


def _policy_tokenizer(config: RunConfig, stages: Stages) -> Tokenizer | None:
    """The policy's tokenizer; None if there is no folder, which another check tells.

    Raises:
        ConfigError: it cannot be used.
    """
    folder = config.model.path
    if not Path(folder).is_dir():
        return None
    what = f"model.path: the tokenizer of {folder}"
    with stages.doing(what):
        tokenizer = result_of_stage(what, partial(_tokenizer, config, folder))
    if config.environment.path and tokenizer.has_chat_template:
        what = f"model.path: encoding an answer with the tokenizer and chat template of {folder}"
        with stages.doing(what, TEMPLATE_S, TEMPLATE_BYTES):
            result_of_stage(what, partial(check_answer, config, tokenizer))
    return tokenizer


def _turn_notes(config: RunConfig, tokenizer: Tokenizer | None, stages: Stages) -> Iterator[str]:
    """Tells a template whose turns end with a token that ends no completion."""
    if tokenizer is None or not tokenizer.has_chat_template or not config.data.apply_chat_template:
        return
    try:
        with stages.doing(f"reading the chat template of {config.model.path}", TEMPLATE_S, TEMPLATE_BYTES):
            found = tokenizer.end_of_turn
    except ConfigError:  # it does not take such messages, or needs too much memory; the rows' own are checked
        return
    if found is not None and found[1] not in tokenizer.eos_ids and not config.rollout.ignore_eos:
        yield (
            f"model.path: the chat template ends a turn with '{found[0]}' (token {found[1]}), which ends no "
            f"completion: they run on to rollout.max_response_tokens. Add {found[1]} to eos_token_id in "
            f"generation_config.json of {config.model.path}."
        )


def check_text(stages: Stages, text: str) -> tuple[list[ConfigError], list[str]]:
    """Checks the files of a config that is given as text; returns mistakes and notes."""
    config = parse_resolved(text)
    faults: list[ConfigError] = []
    notes: list[str] = []
    tokenizer = None
    try:
        tokenizer = _policy_tokenizer(config, stages)
        notes += _turn_notes(config, tokenizer, stages)
    except ConfigError as error:
        faults.append(error)
    for what, check in _parts(config, tokenizer, stages):
        try:
            with stages.doing(what):
                notes += result_of_stage(what, check)
        except ConfigError as error:
            faults.append(error)
    return faults, notes


def _parts(
    config: RunConfig, tokenizer: Tokenizer | None, stages: Stages
) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    for files in filter(None, (config.data.train_files, config.data.val_files)):
        yield f"reading {', '.join(files)}", partial(_check_files, config, files, tokenizer, stages)
    for index, genrm in enumerate(config.genrms):
        folder = config.judge_folders.get(genrm.name, "")
        if folder and Path(folder).is_dir():
            key = f"genrms[{index}]"
            what = f"{key}.model: the tokenizer of {folder}"
            yield what, partial(_check_judge, config, genrm, key, stages)


def _vocab_size(folder: str) -> int:
    """The vocabulary's size by config.json; 0 if it is not known."""
    try:
        values = read_config(folder)
    except ConfigError:
        return 0  # told by another check
    found = decoder_config(values).get("vocab_size")
    return found if type(found) is int else 0


if __name__ == "__main__":
    answer_watched(check_text)
