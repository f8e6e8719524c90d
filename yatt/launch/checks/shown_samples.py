"""`yatt check --samples N`: prompts as the policy gets them, filled templates of judges, and lengths.

They are made in a process with limits (`yatt.adapters.processes.watched_trial`): chat templates are programs.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from yatt.adapters.inputs.data_rows import Row, prompt_text, truth_text
from yatt.adapters.inputs.dataset import read_data_rows
from yatt.adapters.inputs.encoded_prompt import EncodedPrompt, encode_prompt
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
from yatt.errors import ConfigError
from yatt.judging.judging import shown_about
from yatt.judging.protocol import Question
from yatt.judging.template import Shown
from yatt.launch.checks.input_trial import question_ids

MOST_LENGTHS = 2000
"""Number of prompts whose length is counted."""

EMPTY = ""


def shown_samples(config: RunConfig, number: int) -> list[str]:
    """Returns texts for people: the first `number` prompts, the judges' questions about them, and lengths.

    Raises:
        ConfigError: a file, tokenizer or template cannot be used.
    """
    arguments = [resolved_text(without_secrets(config)), number]
    return run_watched("yatt.launch.checks.shown_samples", arguments, config.launch.start_timeout_s)


def _show(stages: Stages, text: str, number: int) -> tuple[list[ConfigError], list[str]]:
    config = parse_resolved(text)
    tokenizer = Tokenizer(config.model.path, config.data.template_time)
    folders = {name: folder for name, folder in config.judge_folders.items() if Path(folder).is_dir()}
    judges = {
        f"genrms[{genrm.name}]": (genrm, Tokenizer(folders[genrm.name], config.data.template_time))
        for genrm in config.genrms
        if (genrm.template or genrm.kind == "scalar") and genrm.has_known_questions and genrm.name in folders
    }
    found, lengths = [], []
    rows = islice(read_data_rows(config.data.train_files, config.data), MOST_LENGTHS)
    for index, (row, place) in enumerate(rows):
        what = f"encoding {place} with the tokenizer and chat template of {config.model.path}"
        with stages.doing(what, TEMPLATE_S, TEMPLATE_BYTES):
            prompt = result_of_stage(what, partial(encode_prompt, row, tokenizer, config))
            lengths.append(len(prompt.ids))
            if index < number:
                found.append(f"{place}: {_in_words(prompt)}:\n{_indented(_decoded(prompt, tokenizer))}")
                found += _questions(judges, row, place)
    return [], [*found, *_lengths(sorted(lengths), config)]


def _in_words(prompt: EncodedPrompt) -> str:
    pictures = ", ".join(str(each.num_tokens) for each in prompt.media)
    of_them = f", of them {pictures} of pictures" if pictures else ""
    return f"prompt of {len(prompt.ids)} tokens{of_them}"


def _decoded(prompt: EncodedPrompt, tokenizer: Tokenizer) -> str:
    """Returns the prompt with its control tokens, and one placeholder for each picture."""
    ids = list(prompt.ids)
    for each in reversed(prompt.media):
        del ids[each.start + 1 : each.start + each.num_tokens]
    return tokenizer.decode(ids, skip_special=False)


def shown_with_truth(genrm: GenRMSection, row: Row) -> tuple[Question, Shown]:
    """Returns a judge's first question about a row whose completions are the ground truth and an empty text,
    and what it is shown."""
    truth = truth_text(row.ground_truth)
    return shown_about(genrm, (truth, EMPTY), prompt_text(row.prompt), truth, row.data_source, row.raw)


def _questions(judges: dict[str, tuple[GenRMSection, Tokenizer]], row: Row, place: str) -> Iterator[str]:
    """Yields each judge's question."""
    for key, (genrm, tokenizer) in judges.items():
        ids = question_ids(genrm, tokenizer, shown_with_truth(genrm, row)[1], row.prompt)
        text, think = tokenizer.decode(ids, skip_special=False), genrm.think
        if think.budget:
            text += f"[a thought of at most {think.budget} tokens]{think.end}[the verdict]"
        yield f"{place}: question of {len(ids)} tokens to {key}:\n{_indented(text)}"


def _lengths(lengths: list[int], config: RunConfig) -> Iterator[str]:
    if not lengths:
        return
    limit = config.data.max_prompt_tokens
    p50, p99 = (lengths[min(len(lengths) - 1, int(share * len(lengths)))] for share in (0.5, 0.99))
    share = sum(length > limit for length in lengths) / len(lengths)
    yield (
        f"lengths of the first {len(lengths)} prompts, in tokens: p50 {p50}, p99 {p99}, "
        f"longest {lengths[-1]}; {share:.1%} are longer than data.max_prompt_tokens ({limit}) and are skipped"
    )


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines() or [""])


if __name__ == "__main__":
    answer_watched(_show)
