"""`yatt check`: says what is wrong with a run before it is started."""

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


MOST_SAMPLES = 100


def add_check(commands: "Parsers") -> None:
    """Adds `yatt check`."""
    command = commands.add_parser("check", help="say what is wrong with a run; nothing is started")
    command.add_argument("config", type=Path, help="run file (YAML)")
    command.add_argument("more", nargs="*", default=[], help="overlay files (*.yaml) and section.key=value")
    command.add_argument("--site", type=Path, help="site file (YAML) of the cluster it will run on")
    command.add_argument(
        "--elsewhere",
        action="store_true",
        help="it will run on another machine: skip files, stores and libraries that are not here",
    )
    command.add_argument(
        "--samples",
        type=_count,
        default=0,
        metavar="N",
        help="show N prompts and the judges' questions about them as tokens' text, and lengths",
    )
    command.add_argument(
        "--ask", action="store_true", help="put one question to each judge behind a URL; this may cost money"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(action=_check)


def _count(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= MOST_SAMPLES:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 to {MOST_SAMPLES}")
    return int(text)


def _check(arguments: argparse.Namespace) -> int:
    from yatt.config.origin import DEFAULT, load_with_origins
    from yatt.config.site import load_site
    from yatt.config.tree import files_and_arguments
    from yatt.errors import EXIT_USER_MISTAKE, ConfigError
    from yatt.launch.commands.checking import check_run
    from yatt.printable import printable_lines

    origins: dict[str, str] = {}
    try:
        config, origins = load_with_origins(*files_and_arguments(arguments.config, arguments.more))
        site = load_site(arguments.site) if arguments.site else None
    except ConfigError as error:
        if not arguments.json:
            raise
        found = [*error.findings]
    else:
        found = check_run(
            config, site, elsewhere=arguments.elsewhere, num_samples=arguments.samples, asks=arguments.ask
        )
    failures = [each for each in found if each.level == "fail"]
    if arguments.json:
        written = {_as_in_findings(key): place for key, place in origins.items() if place != DEFAULT}
        listed = [
            {
                "level": each.level,
                "key": each.key,
                "place": each.place or each.file or written.get(each.key, ""),
                "says": each.in_words(),
            }
            for each in found
        ]
        print(json.dumps({"ok": not failures, "found": listed}))
    else:
        for each in found:
            words = each.in_words()
            one_line = words if each.level == "sample" else " ".join(map(str.strip, words.splitlines()))
            print(printable_lines(f"{each.level:4}  {one_line}"))
        count = "1 mistake" if len(failures) == 1 else f"{len(failures)} mistakes"
        print(f"{arguments.config}: {count if failures else 'ok'}")
    return EXIT_USER_MISTAKE if failures else 0


def _as_in_findings(key: str) -> str:
    """`genrms.0.path` as `genrms[0].path`."""
    return re.sub(r"\.([0-9]+)(?=\.|$)", r"[\1]", key)
