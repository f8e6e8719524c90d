"""Reads the run's prompts, tokenizers and chat templates before anything starts, in a process with limits of
time and memory.

So a template that loops, a tokenizer that crashes its library and a damaged parquet file
end only this process.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.files.patience import is_passing
from yatt.adapters.inputs.data_rows import has_column
from yatt.adapters.inputs.dataset import Row, RowCounts, check_rows, conversation_of, read_data_rows
from yatt.adapters.inputs.media_head import MediaRefused, head_by_parts
from yatt.adapters.inputs.text_parts import TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
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
from yatt.core.samples.verdict import Shown, check_template, render_template
from yatt.errors import ConfigError
from yatt.launch.checks.judge_check import context_notes
from yatt.launch.checks.seeing_check import check_answer, refuse_blind, seeing_notes
from yatt.media.fetch import MediaSources
from yatt.models.folder import decoder_config, takes_pictures
from yatt.models.model import read_config
from yatt.records.episode import MediaRef
from yatt.records.media import MediaItem

FIRST_ROWS, ROWS_PER_OCTAVE = 512, 256
MOST_ROWS = 20_000
"""Most rows whose length is looked at to find one that is short enough."""

MANY_TOO_LONG = 0.2
SHOWN_PICTURES = 3

ONE_LETTER = Shown(
    prompt="a", ground_truth="a", data_source="a", completion="a", completion_a="a", completion_b="a",
    completions="a",
)  # fmt: skip
"""The shortest question: its prompt and completions are one letter each."""


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
    """Encodes some prompts of data files, as a run does."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer | None, stages: Stages) -> None:
        self._config, self._tokenizer, self._stages = config, tokenizer, stages
        self._most_ids = _vocab_size(config.model.path)
        self.num_seen = self.num_too_long = 0

    def look(self, number: int, row: Row, place: str) -> None:
        """Counts a row, if it is one of those that are looked at.

        Raises:
            ConfigError: the tokenizer or the template does not take it.
        """
        self._stages.tick()
        if self._tokenizer is None or not is_looked_at(number):
            return
        self.num_seen += 1
        self.num_too_long += not self.fits(row, place, self._tokenizer)

    def any_fits(self, files: tuple[str, ...]) -> bool:
        """Whether any prompt of the files is short enough."""
        tokenizer = self._tokenizer
        return tokenizer is None or any(
            self.fits(row, place, tokenizer) for row, place in read_data_rows(files, self._config.data)
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
                f"model.path: the tokenizer of {folder} gives token {found.largest_id} for {place}, but its "
                f"config.json says vocab_size={self._most_ids}. Copy the folder's files again."
            )
        return found.fits


class _Pictures:
    """Looks at the head of every picture of data files."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._sources: MediaSources | None = None
        self._first: list[str] = []
        self._num_changed = 0
        self._has_column = False

    def look(self, row: Row, place: str) -> None:
        """Notes the pictures of a row that cannot be used.

        Raises:
            ConfigError: the run's engines take no pictures.
        """
        data = self._config.data
        self._has_column |= not row.raw.keys().isdisjoint((data.image_key, data.video_key))
        if any(ref.is_video for ref in row.media) and any(g.sees != "none" for g in self._config.genrms):
            raise ConfigError(f"{place} has videos, which a GenRM is not shown; remove genrms[].sees.")
        if row.media and self._config.rollout.engine == "transformers":
            raise ConfigError(
                f"{place} has pictures, which rollout.engine=transformers does not take; write vllm."
            )
        for fault in filter(None, map(self._fault, row.media)):
            self._num_changed += 1
            if len(self._first) < SHOWN_PICTURES:
                self._first.append(f"{place}: {fault}")

    def _fault(self, ref: MediaRef) -> str:
        """What has changed about a picture since its reference was made, by its head; empty: nothing."""
        name = ref.path or ref.sha256
        try:
            with self._opened().opened_source(MediaItem(ref.path, ref.sha256)) as source:
                if ref.is_video:
                    return ""  # a file of this kind is known by its digest only
                size = head_by_parts(source.read_at).shown_size
        except MediaRefused as error:
            return f"{name} {error}"
        except OSError as error:
            if is_passing(error):
                raise
            return f"{name} cannot be read ({error.strerror})"
        now, before = f"{size[0]} x {size[1]}", f"{ref.width} x {ref.height}"
        return "" if now == before else f"{name} has {now} pixels, and had {before}"

    def notes(self, files: tuple[str, ...]) -> Iterator[str]:
        """Tells of pictures that are not shown, and of a column that no row has.

        A text run reads only needed columns of parquet files: these are asked for their columns' names.
        """
        key, folder = self._config.data.image_key, self._config.model.path
        parquet = (Path(name) for name in files if name.endswith(".parquet"))
        keys = key, self._config.data.video_key
        is_there = self._has_column or any(has_column(path, keys) for path in parquet)
        if self._config.data.media_store or is_there is takes_pictures(folder):
            return
        named = ", ".join(files)
        if is_there:
            yield (
                f"{named}: rows have a column '{key}' (data.image_key), but {folder} takes text only: "
                "pictures are not shown."
            )
        else:
            yield (
                f"the model takes pictures, but no row of {named} has a column '{key}' (data.image_key): all "
                "prompts are text."
            )

    def _opened(self) -> MediaSources:
        data, media = self._config.data, self._config.media
        if self._sources is None:
            self._sources = MediaSources(
                data.media_root, data.media_store, media.storage_options, media.timeout_s
            )
        return self._sources

    def refuse_changed(self) -> None:
        """Refuses what was noted.

        Raises:
            ConfigError: some were.
        """
        if self._first:
            raise ConfigError(
                f"{self._num_changed} pictures are not what they were when the data was made; put them back, "
                "or remove the made file:\n  " + "\n  ".join(self._first)
            )


def _check_files(
    config: RunConfig, files: tuple[str, ...], tokenizer: Tokenizer | None, stages: Stages
) -> list[str]:
    """Checks every row, and the lengths of some; returns notes.

    Raises:
        ConfigError: a file or row cannot be used, no row has a ground truth, or every prompt is too long.
    """
    prompts, pictures = _Prompts(config, tokenizer, stages), _Pictures(config)

    def look(number: int, row: Row, place: str) -> None:
        prompts.look(number, row, place)
        pictures.look(row, place)

    counts = check_rows(files, config.data, look)
    pictures.refuse_changed()
    return [
        *_truth_notes(config, files, counts), *_length_notes(config, files, prompts, counts.rows),
        *pictures.notes(files),
    ]  # fmt: skip


def _truth_notes(config: RunConfig, files: tuple[str, ...], counts: RowCounts) -> Iterator[str]:
    key, named = config.data.ground_truth_key, ", ".join(files)
    if not key or not counts.without_truth or not _needs_truth(config):
        return
    if counts.without_truth == counts.rows:
        raise ConfigError(
            f"data.ground_truth_key: no row of {named} has a column '{key}', "
            "which reward functions and templates get as ground_truth; name the right column, or write "
            "ground_truth_key: '' if there is none."
        )
    yield f"{counts.without_truth} of {counts.rows} rows of {named} have no '{key}': its value is None."


def _needs_truth(config: RunConfig) -> bool:
    return (
        any(reward.style == "verl" for reward in config.rewards)
        or any(genrm.pairs == "ground_truth" and genrm.judging == "pairwise" for genrm in config.genrms)
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
        raise ConfigError(f"{key}: every prompt of {named} is longer than {limit} tokens; raise it.")
    yield (
        f"{key}: {long} of {seen} prompts of {named} that were looked at are longer than {limit} tokens and "
        "will be skipped."
    )


def _check_judge(config: RunConfig, genrm: GenRMSection, key: str, stages: Stages) -> list[str]:
    """Loads a GenRM's tokenizer and encodes the shortest question; returns notes.

    Raises:
        ConfigError: it cannot be used, or a question does not fit into the GenRM's context.
    """
    folder = genrm.model
    if genrm.sees != "none":
        refuse_blind(config, genrm, key)
    tokenizer = _tokenizer(config, folder)
    if genrm.chat and not tokenizer.has_chat_template:
        raise ConfigError(
            f"{key}.chat: {folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); add one, or write chat: false."
        )
    if genrm.template:
        try:
            check_template(genrm.template, key, genrm.judging, sees=genrm.sees != "none")
        except ConfigError:
            return []  # told by another check
    what = f"{key}.model: encoding a question with the tokenizer and chat template of {folder}"
    with stages.doing(what, TEMPLATE_S, TEMPLATE_BYTES):
        num_tokens = result_of_stage(what, lambda: len(question_ids(genrm, tokenizer, ONE_LETTER)))
        notes = list(context_notes(config, genrm, key, num_tokens))
        if genrm.sees != "none":
            seen = result_of_stage(what, partial(seeing_notes, config, genrm, key, tokenizer, ONE_LETTER))
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
            shown.prompt if prompt is None else prompt, ("assistant", str(shown.completion))
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
        if genrm.has_engine and Path(genrm.model).is_dir():
            key = f"genrms[{index}]"
            what = f"{key}.model: the tokenizer of {genrm.model}"
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
