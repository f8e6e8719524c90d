"""Words around the parser: examples in each help, suggestions for mistyped words, completion in shells."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from string import Template

EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": (
        "yatt run run.yaml",
        "yatt run run.yaml overlay.yaml rollout.n=16 run.dir=runs/other",
    ),
    "submit": (
        "yatt submit run.yaml --site site.yaml",
        "yatt submit run.yaml --site site.yaml --dry-run",
        "yatt submit run.yaml --site site.yaml --set time_limit_min=240 --sweep optimizer.lr=1.0e-6,2.0e-6",
    ),
    "resume": (
        "yatt resume runs/one",
        "yatt resume runs/one trainer.total_iterations=2000 checkpoint.save_every=5",
        "yatt resume runs/one --nodes 8",
    ),
    "join": ("yatt join runs/one --nodes 2",),
    "cancel": ("yatt cancel runs/one", "yatt cancel --now runs/one"),
    "attach": ("yatt attach runs/one 3", "yatt attach runs/one 0 --do nvidia-smi"),
    "list": ("yatt list", "yatt list runs"),
    "ckpt": (
        "yatt ckpt list runs/one",
        "yatt ckpt export runs/one 120 model",
        "yatt ckpt prune runs/one --keep 2 --dry-run",
    ),
    "convert": (
        "yatt convert runs/one model",
        "yatt convert hf-model --to-checkpoint s3://bucket/start",
    ),
    "eval": (
        "yatt eval runs/one --n 8 --k 1,8",
        "yatt eval models/qwen3 test.jsonl --reward builtin:gsm8k --temperature 0 --out results/qwen3",
    ),
    "status": ("yatt status runs/one", "yatt status run.yaml --json"),
    "watch": ("yatt watch runs/one",),
    "report": ("yatt report runs/one --out one.html", "yatt report runs/one runs/two --out both.html"),
    "logs": ("yatt logs runs/one -f --role trainer", "yatt logs runs/one -n 100"),
    "show": ("yatt show runs/one 120", "yatt show runs/one 120 7"),
    "check": ("yatt check run.yaml", "yatt check run.yaml rollout.n=16 --site site.yaml --elsewhere"),
    "stack": ("yatt stack runs/one",),
    "plan": ("yatt plan run.yaml", "yatt plan run.yaml trainer.tensor_model_parallel_size=4 --gpu-gib 64"),
    "simulate": ("yatt simulate runs/one", "yatt simulate run.yaml --run runs/one --gpus 4096"),
    "clean": ("yatt clean --dry-run",),
    "sft": ("yatt sft sft.yaml max_steps=100",),
    "diagnose": (
        "yatt diagnose --site site.yaml run.yaml",
        "yatt diagnose --site site.yaml run.yaml --nodes 2",
    ),
    "config": ("yatt config run.yaml overlay.yaml rollout.n=16", "yatt config runs/one --changed"),
    "init": (
        "yatt init run.yaml --model models/qwen3 --data train.jsonl --reward builtin:gsm8k",
        "yatt init run.yaml --model models/qwen3 --data train.jsonl --judge models/judge --nodes 4",
        "yatt init --examples examples",
    ),
    "completion": ('eval "$(yatt completion bash)"',),
}
"""Examples per command."""


def add_examples(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the examples to the help of each command."""
    for name, parser in commands.choices.items():
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        listed = "\n".join(f"  {line}" for line in EXAMPLES[name])
        parser.epilog = f"examples:\n{listed}"


def meant(word: str, known: Sequence[str]) -> str:
    """Returns the sentence that suggests the known word nearest to a mistyped one; empty if none is near."""
    near = get_close_matches(word, known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


BASH = Template("""\
_yatt() {
    local word="$${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=()
    if [ "$$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($$(compgen -W "$commands" -- "$$word"))
        return
    fi
    case "$$word" in
    -*)
        case "$${COMP_WORDS[1]}" in
$options
        esac ;;
    esac
    [ "$${#COMPREPLY[@]}" -gt 0 ] || COMPREPLY=($$(compgen -f -- "$$word"))
}
complete -o filenames -F _yatt yatt
""")
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def completion(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", shell: str) -> str:
    """Returns the script that completes commands, their options and file names.

    Args:
        shell: bash or zsh.
    """
    options = "\n".join(
        f'        {name}) COMPREPLY=($(compgen -W "{" ".join(options_of(parser))}" -- "$word")) ;;'
        for name, parser in commands.choices.items()
    )
    script = BASH.substitute(commands=" ".join(commands.choices), options=options)
    return ZSH + script if shell == "zsh" else script


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the options of a command, long and short."""
    return [option for action in parser._actions for option in action.option_strings]
