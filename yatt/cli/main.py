"""The `yatt` command. Every subcommand imports what it needs when it runs, so that help is instant."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Generator, Sequence
from difflib import get_close_matches
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from yatt.adapters.files.full_disk import is_full
from yatt.adapters.files.patience import is_passing
from yatt.cli.arguments.ckpt import add_ckpt, add_convert
from yatt.cli.arguments.eval import add_eval
from yatt.cli.arguments.init import add_init
from yatt.cli.arguments.judge import add_judge
from yatt.cli.arguments.logs import add_logs
from yatt.cli.arguments.plan import add_plan
from yatt.cli.arguments.show import add_show
from yatt.cli.arguments.simulate import add_simulate
from yatt.cli.commands.check import add_check
from yatt.cli.commands.config import add_config
from yatt.cli.commands.running import add_running, add_set
from yatt.cli.commands.stack import add_stack
from yatt.cli.finding import run_folder
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, YattError
from yatt.printable import printable, printable_lines
from yatt.version import __version__

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
    "judge": (
        "yatt judge eval run.yaml judge pairs.jsonl --min-agreement 0.8 --html",
        "yatt judge again runs/one --iterations 100..120 --genrm new.yaml --exit-above 0.2",
        "yatt judge data runs/one --label exact --balanced --out rows.jsonl",
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

GROUPS = {
    "prepare": ("init", "check", "config", "plan", "simulate", "diagnose", "sft"),
    "train": ("run", "submit", "resume", "cancel", "join"),
    "look": ("list", "status", "watch", "logs", "show", "report", "stack", "attach"),
    "checkpoints and models": ("ckpt", "convert", "eval", "judge"),
    "this machine": ("clean", "completion"),
}
"""Commands by task, as `yatt --help` and the README list them."""


class CommandsHelp(argparse.HelpFormatter):
    """Lists the commands by task."""

    def _iter_indented_subactions(self, action: argparse.Action) -> Generator[argparse.Action, None, None]:
        listed = {each.dest: each for each in super()._iter_indented_subactions(action)}
        if not isinstance(action, argparse._SubParsersAction):
            yield from listed.values()
            return
        for task, names in GROUPS.items():
            yield argparse.Action([], dest=task, metavar=f"{task}:")
            self._indent()
            yield from (listed[name] for name in names)
            self._dedent()


def add_examples(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the examples to the help of each command."""
    for name, parser in commands.choices.items():
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        listed = "\n".join(f"  {line}" for line in EXAMPLES[name])
        parser.epilog = f"examples:\n{listed}"


def nearest_word(word: str, known: Sequence[str]) -> str:
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


def completion_script(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", shell: str) -> str:
    """Returns the script that completes commands, their options and file names.

    Args:
        shell: bash or zsh.
    """
    options = "\n".join(
        f'        {name}) COMPREPLY=($(compgen -W "{" ".join(parser_options(parser))}" -- "$word")) ;;'
        for name, parser in commands.choices.items()
    )
    script = BASH.substitute(commands=" ".join(commands.choices), options=options)
    return ZSH + script if shell == "zsh" else script


def parser_options(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the options of a command, long and short."""
    return [option for action in parser._actions for option in action.option_strings]


if TYPE_CHECKING:
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_INTERRUPTED = 130


def main() -> int:
    """Runs the command. Prints an expected error as one message and returns its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as in `yatt ... >&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until exit
    try:
        return _carried_out(_parsed())
    finally:
        _let_go_of_output()


def _let_go_of_output() -> None:
    """Flushes the output, or discards it: the interpreter flushes at exit, and would end with 120 if that
    fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _carried_out(arguments: argparse.Namespace) -> int:
    try:
        action: Callable[[argparse.Namespace], int] = arguments.action
        if isinstance(named := getattr(arguments, "run", None), Path):
            arguments.run = run_folder(named)
        code = action(arguments)
        try:
            sys.stdout.flush()
        except OSError:
            if not getattr(arguments, "trains", False):  # its output is not what such a command is for
                raise
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except YattError as error:
        sys.stderr.write(f"yatt: {printable_lines(str(error))}\n")
        is_ours = is_passing(error) and not is_full(error.__cause__)
        return EXIT_FAILED if is_ours else error.exit_code
    except OSError as error:
        if (
            error.errno == errno.EPIPE
        ):  # the reader of our output has closed it; BrokenPipeError is ESHUTDOWN too
            return EXIT_FAILED if getattr(arguments, "trains", False) else 0
        where = f"{error.filename}: " if error.filename else ""
        where = printable_lines(where)
        sys.stderr.write(
            f"yatt: {where}{error.strerror or error}. Free space or fix it, then run the command again.\n"
        )
        return EXIT_USER_MISTAKE if is_full(error) or not is_passing(error) else EXIT_FAILED


def _parsed() -> argparse.Namespace:
    """Parses the arguments. Also accepts overlays and settings after options, which argparse does not."""
    parser, commands = command_parser()
    words = sys.argv[1:]
    if words and not words[0].startswith("-") and words[0] not in commands.choices:
        known = nearest_word(words[0], list(commands.choices)) or " See yatt --help."
        parser.error(f"there is no command '{printable(words[0])}'.{known}")
    arguments, rest = parser.parse_known_args(words)
    if any(word.startswith("-") for word in rest) or (rest and "more" not in arguments):
        command = next(word for word in words if word in commands.choices)
        options = parser_options(commands.choices[command])
        near = next((found for word in rest if (found := nearest_word(word.partition("=")[0], options))), "")
        listed = printable(" ".join(rest))
        parser.error(f"unrecognized arguments: {listed}; see yatt {command} --help.{near}")
    if rest:
        arguments.more = [*arguments.more, *rest]
    return arguments


def command_parser() -> "tuple[argparse.ArgumentParser, Parsers]":
    """Returns the parser, and those of its commands."""
    parser = argparse.ArgumentParser(
        prog="yatt",
        description="Reinforcement learning of language models with generative reward models.",
        formatter_class=CommandsHelp,
    )
    parser.add_argument("--version", action="version", version=f"yatt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_running(commands)
    add_ckpt(commands)
    add_convert(commands)
    add_eval(commands)
    add_judge(commands)
    _add_looking(commands)
    add_show(commands)
    add_check(commands)
    add_plan(commands)
    add_simulate(commands)
    add_config(commands)
    add_init(commands)
    cleaning = commands.add_parser(
        "clean", help="remove files that your killed runs left on this machine, and unused compiled code"
    )
    cleaning.add_argument(
        "folders", type=Path, nargs="*", default=[], help="node-local folders (default: /tmp, /dev/shm)"
    )
    cleaning.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    cleaning.set_defaults(action=_clean)
    sft = commands.add_parser("sft", help="supervised fine-tuning: create or warm up a model")
    sft.add_argument("config", type=Path, help="SFT file (YAML)")
    sft.add_argument("more", nargs="*", default=[], help="overlay files (*.yaml) and key=value")
    sft.set_defaults(action=_sft)
    diagnose = commands.add_parser("diagnose", help="check whether a run will work on this cluster")
    diagnose.add_argument("config", type=Path, nargs="?", help="run file, to check its requirements as well")
    diagnose.add_argument("more", nargs="*", default=[], help="overlay files (*.yaml) and section.key=value")
    diagnose.add_argument("--site", type=Path, required=True, help="site file (YAML)")
    add_set(diagnose)
    diagnose.add_argument("--json", action="store_true", help="print one JSON object")
    diagnose.add_argument("--nodes", type=int, default=0, help="run a short test job on this many nodes")
    diagnose.set_defaults(action=_diagnose)
    shell = commands.add_parser("completion", help="print the script that completes commands in your shell")
    shell.add_argument("shell", choices=("bash", "zsh"))
    shell.set_defaults(action=lambda arguments: _completion(commands, arguments.shell))
    add_examples(commands)
    return parser, commands


def _completion(commands: "Parsers", shell: str) -> int:
    sys.stdout.write(completion_script(commands, shell))
    return 0


def _add_looking(commands: "Parsers") -> None:
    """Adds the commands that only read a run folder."""
    for name, action, text in (
        ("status", _status, "show the state of a run"),
        ("watch", _watch, "follow a run on the terminal"),
        ("report", _report, "write one self-contained HTML page about a run"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("run", type=Path, help="run folder, run file, name or id")
        command.set_defaults(action=action)
        if name == "report":
            command.add_argument(
                "others", type=Path, nargs="*", default=[], help="other run folders, to compare them"
            )
        if name == "status":
            command.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "report":
            command.add_argument("--out", type=Path, help="output file (default: RUN/report.html)")
    add_logs(commands)
    add_stack(commands)


def _status(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.look import status

    return status(arguments.run, as_json=arguments.json)


def _watch(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.look import watch

    return watch(arguments.run)


def _report(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.look import compare, report

    if arguments.others:
        path = compare([arguments.run, *map(run_folder, arguments.others)], arguments.out)
    else:
        path = report(arguments.run, arguments.out)
    sys.stdout.write(f"{path}\n")
    return 0


def _clean(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.clean import clean

    return clean(arguments.folders, dry_run=arguments.dry_run)


def _sft(arguments: argparse.Namespace) -> int:
    from yatt.launch.commands.sft import run_sft

    return run_sft(arguments.config, arguments.more)


def _diagnose(arguments: argparse.Namespace) -> int:
    from yatt.config.load import load_command
    from yatt.config.site import load_site, with_settings
    from yatt.launch.diagnose.report import diagnose

    config = load_command(arguments.config, arguments.more) if arguments.config else None
    site = with_settings(load_site(arguments.site), arguments.set)
    return diagnose(site, config, as_json=arguments.json, try_num=arguments.nodes)


if __name__ == "__main__":
    sys.exit(main())
