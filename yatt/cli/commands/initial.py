"""Composes the run file of `yatt init`; the names of columns come from the first row of the data."""

import argparse
import glob
import json
import shutil
import sys
from pathlib import Path
from string import Template
from typing import Any

import yaml

from yatt.adapters.inputs.data_rows import raw_rows
from yatt.config.load import load_run_config
from yatt.errors import EXIT_FINISHED, ConfigError
from yatt.launch.resolve.completed import model_limit
from yatt.launch.resolve.data_files import HUB
from yatt.printable import printable

PROMPT_COLUMNS = ("prompt", "question", "problem", "input", "instruction", "messages")
TRUTH_COLUMNS = ("reward_model.ground_truth", "answer", "ground_truth", "solution", "label", "target")

JUDGE_TEMPLATE = """\
Problem:
{prompt}

Answer:
{completion}

Is the answer correct? Think step by step. End with one line: "score: N", N from 0 (wrong) to 10 (correct)."""

PAGE = Template("""\
# A run file of yatt. Every key: docs/configuration.md. Check it: yatt check $file
run:
  # Folder of all output. A start with the same folder resumes the run.
  dir: $dir
launch:
  # Number of nodes, and GPUs per node.
  nodes: $nodes
  gpus_per_node: $gpus
model:
  # Hugging Face folder of the policy.
  path: $model
  dtype: $dtype
data:
  train_files: $train
${columns}\
  # Longer prompts are skipped and counted, in tokens.
  max_prompt_tokens: $prompt
rollout:
  # Completions per prompt, and their maximum length in tokens.
  n: 8
  max_response_tokens: $response
${small}\
${scores}\
${validation}\
algorithm:
  # GRPO: advantages are relative to the other completions of the same prompt.
  adv_estimator: grpo
optimizer:
  lr: 1.0e-6
trainer:
  # Iterations, prompts per iteration, and prompts per optimizer step.
  total_iterations: 100
  train_batch_size: 64
  mini_batch_size: 32
  # Tokens (prompts and completions) per packed micro-batch; limits the memory of training.
  max_tokens_per_micro_batch: 16384
checkpoint:
  # Saves every so many iterations, and at the end. `url: s3://bucket/prefix` sets another place.
  save_every: 10
  keep: 2
""")

SMALL = """\
  # For a machine without GPUs: few requests at the same time, a small KV cache.
  max_num_seqs: 64
  kv_cache_bytes: 134217728
  enforce_eager: true
"""


def write_run_file(arguments: argparse.Namespace) -> int:
    """Creates the file, and checks that it loads.

    Raises:
        ConfigError: the file exists, or an answer is missing or not possible.
    """
    path: Path | None = arguments.file
    if path is None:
        raise ConfigError("write the name of the run file to create, or --examples FOLDER.")
    if path.exists():
        raise ConfigError(f"{path} exists; write another name, or remove it.")
    _complete(arguments)
    text = _page(arguments)
    try:
        with path.open("x") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from error
    try:
        load_run_config([path], [])
    except ConfigError:
        path.unlink()
        raise
    sys.stdout.write(
        f"{path} is written. Next:\n  yatt check {path}\n  yatt run {path}\n"
        f"  yatt submit {path} --site SITE.yaml\n"
    )
    return EXIT_FINISHED


EXAMPLE_FOLDERS = ("configs", "slurm", "tools")
"""Folders of examples, in the repository and in the wheel (``data-files`` of pyproject.toml)."""


def copy_examples(folder: Path, prefix: Path = Path(sys.prefix)) -> int:
    """Copies the example run files, site files, schemas and job scripts.

    Args:
        prefix: of the environment that yatt is installed in.

    Raises:
        ConfigError: the folder exists, cannot be written, or this installation has no examples.
    """
    installed, checkout = prefix / "share" / "yatt", Path(__file__).parents[3]
    source = installed if (installed / "configs").is_dir() else checkout
    if not (source / "configs").is_dir():
        raise ConfigError(f"there are no examples in {installed}; install yatt's wheel again.")
    try:
        folder.mkdir(parents=True)
        for name in EXAMPLE_FOLDERS:
            shutil.copytree(source / name, folder / name)
    except OSError as error:
        raise ConfigError(f"--examples: {error.filename}: {error.strerror}; write a new folder.") from error
    sys.stdout.write(
        f"{folder}: example run files in configs, site files in configs/sites, job scripts in slurm\n"
    )
    return EXIT_FINISHED


QUESTIONS = (
    ("model", "Hugging Face folder of the policy"),
    ("data", "file of prompts (JSONL or parquet)"),
    ("reward", "reward: builtin:gsm8k, builtin:exact or a Python file (empty: a judge)"),
    ("judge", "Hugging Face folder of the judge"),
)


def _complete(arguments: argparse.Namespace) -> None:
    """Asks for what is missing, if somebody can answer.

    Raises:
        ConfigError: something is missing.
    """
    for name, question in QUESTIONS:
        is_missing = not getattr(arguments, name)
        if name in ("reward", "judge"):
            is_missing = not (arguments.reward or arguments.judge)
        if is_missing and sys.stdin.isatty():
            answer = _answer(question)
            setattr(arguments, name, [answer] if name == "data" and answer else answer)
        elif is_missing and name != "reward":
            option = "--reward or --judge" if name == "judge" else f"--{name}"
            raise ConfigError(f"write {option}: {question}.")
    if not (arguments.model and arguments.data and (arguments.reward or arguments.judge)):
        raise ConfigError("a run needs a model, data, and a reward or a judge.")
    for size in ("nodes", "gpus_per_node"):
        if getattr(arguments, size) < 1:
            raise ConfigError(f"--{size.replace('_', '-')} {getattr(arguments, size)}: write 1 or more.")


def _page(arguments: argparse.Namespace) -> str:
    file: Path = arguments.file
    prompt, response = _lengths(arguments.model)
    return PAGE.substitute(
        file=printable(str(file)),
        dir=_flow(arguments.dir or f"runs/{file.stem}"),
        nodes=arguments.nodes,
        gpus=arguments.gpus_per_node,
        model=_flow(arguments.model),
        dtype="float32" if arguments.cpu else "bfloat16",
        train=_flow(arguments.data),
        columns=_columns(arguments),
        prompt=prompt,
        response=response,
        small=SMALL if arguments.cpu else "",
        scores=_judge(arguments) + _rewards(arguments.reward),
        validation=_validation(arguments),
    )


LENGTHS = (1024, 1024)
"""Tokens of a prompt and a completion, for models whose context is long enough or not known."""


def _lengths(model: str) -> tuple[int, int]:
    """Returns tokens of a prompt and a completion that fit the model's context."""
    limit = model_limit(str(Path(model).expanduser()))
    if not limit or limit >= sum(LENGTHS):
        return LENGTHS
    return max(1, limit // 2), max(1, limit - limit // 2)


def _columns(arguments: argparse.Namespace) -> str:
    """Returns the keys about columns: those that are named, else that the first row has, else as answered.

    Raises:
        ConfigError: it cannot be read, or the column of the prompt is not known.
    """
    data = Path(arguments.data[0])
    files = f"  # Held-out prompts.\n  val_files: {_flow(arguments.val)}\n" if arguments.val else ""
    about = "  # Columns of the prompt, and of the reference answer ('': none)"
    if str(data).startswith(HUB):
        prompt, truth = arguments.prompt_key or "prompt", arguments.ground_truth_key
        truth = "answer" if truth is None else truth
        about += "" if arguments.prompt_key else ": name those that it has"
    else:
        data = Path(next(iter(sorted(glob.glob(str(data)))), data))
        row, _ = next(raw_rows(data), ({}, ""))
        if not row:
            raise ConfigError(f"--data: {data} has no rows.")
        prompt = _prompt_column(row, arguments.prompt_key)
        truth = _truth_column(row, arguments.ground_truth_key, is_asked=bool(arguments.reward))
    return f"{files}{about}.\n  prompt_key: {_flow(prompt)}\n  ground_truth_key: {_flow(truth)}\n"


def _prompt_column(row: dict[str, Any], named: str) -> str:
    usual = [name for name in PROMPT_COLUMNS if _is_prompt(_at(row, name))]
    listed = printable(", ".join(row))
    found = named or next((name for name in usual if not _is_answered(_at(row, name))), "")
    found = found or _answer(f"column of the prompt ({listed})")
    if not found and usual:
        raise ConfigError(
            f"column {usual[0]}: the chat of the first row ends with an answer of the assistant, which would "
            "be a part of the prompt. Take it out with a function (data.map) in a run file of your own; if "
            f"it is the beginning of the completion, write --prompt-key {usual[0]}."
        )
    if not found:
        raise ConfigError(
            f"--data: the first row has no column {', '.join(PROMPT_COLUMNS)}; it has {listed}. Name that of "
            "the prompt with --prompt-key."
        )
    _check_column(row, found, "--prompt-key")
    if not _is_prompt(_at(row, found)):
        raise ConfigError(
            f"--prompt-key {printable(found)}: the first row has neither text there nor a list of "
            "{role, content} messages."
        )
    return found


def _truth_column(row: dict[str, Any], named: str | None, *, is_asked: bool) -> str:
    if named is None:
        named = next((name for name in TRUTH_COLUMNS if _at(row, name) is not None), "")
        listed = printable(", ".join(row))
        named = named or (
            _answer(f"column of the reference answer ({listed}; empty: none)") if is_asked else ""
        )
    if named:
        _check_column(row, named, "--ground-truth-key")
    return named


def _check_column(row: dict[str, Any], name: str, option: str) -> None:
    if _at(row, name) is None:
        listed = printable(", ".join(row))
        raise ConfigError(f"{option} {printable(name)}: the first row has no such column; it has {listed}.")


def _is_prompt(value: Any) -> bool:
    """Whether it is text, or a chat."""
    if isinstance(value, str):
        return bool(value)
    is_chat = isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)
    return is_chat and bool(value)


def _is_answered(value: Any) -> bool:
    return isinstance(value, list) and value[-1].get("role") == "assistant"


def _answer(question: str) -> str:
    """What is typed; empty if nobody can type, or wants to."""
    if not sys.stdin.isatty():
        return ""
    try:
        return input(f"{question}: ").strip()
    except EOFError:
        return ""


def _at(row: Any, key: str) -> Any:
    for part in key.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def _rewards(reward: str | None) -> str:
    if not reward:
        return ""
    name = reward.removeprefix("builtin:") if reward.startswith("builtin:") else Path(reward).stem
    about = "# A built-in function, or compute_score(data_source, solution_str, ground_truth, extra_info)."
    return f"rewards:\n  {about}\n  - {_flow({'name': name, 'path': reward})}\n"


def _judge(arguments: argparse.Namespace) -> str:
    if not arguments.judge:
        return ""
    template = "".join(f"      {line}\n" if line else "\n" for line in JUDGE_TEMPLATE.split("\n"))
    chat = "true" if _has_chat_template(Path(arguments.judge)) else "false"
    lines = (
        "genrms:",
        "  # A generative reward model: the pattern's last match in its text is the score.",
        "  - name: judge",
        f"    model: {_flow(arguments.judge)}",
        f"    dtype: {'float32' if arguments.cpu else 'bfloat16'}",
        f"    chat: {chat}",
        "    template: |-",
        template.rstrip("\n"),
        "    verdict: {pattern: 'score:\\s*(\\d+)', minimum: 0, maximum: 10}",
        "    max_tokens: 1024",
    )
    small = "".join(f"    {line.strip()}\n" for line in SMALL.splitlines()) if arguments.cpu else ""
    return "\n".join(lines) + "\n" + small


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        found = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and bool(found.get("chat_template"))


def _validation(arguments: argparse.Namespace) -> str:
    if not arguments.val:
        return ""
    if not arguments.reward:
        raise ConfigError("--val: validation needs a reward function; write --reward too.")
    name = arguments.reward.removeprefix("builtin:")
    name = name if arguments.reward.startswith("builtin:") else Path(name).stem
    about = "# Scores held-out prompts before the first iteration, every so many, and at the end."
    return f"validation:\n  {about}\n  reward: {_flow(name)}\n  every: 10\n  temperature: 0.0\n"


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")
