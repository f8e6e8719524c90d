"""`yatt stack RUN`: where each process of a run is."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yatt.adapters.processes.stack_dump import StackDump

    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_stack(commands: "Parsers") -> None:
    """Adds `yatt stack`."""
    command = commands.add_parser("stack", help="print the Python stacks of a run's processes")
    command.add_argument("run", type=Path, help="run folder, run file, name or id")
    command.add_argument("--role", default="", help="only processes whose name begins with ROLE")
    command.add_argument("--here", action="store_true", help="only processes on this machine")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(action=_stack)


def _stack(arguments: argparse.Namespace) -> int:
    import json
    import sys
    from dataclasses import asdict

    from yatt.launch.commands.stacks import stacks_of
    from yatt.paths import RunPaths
    from yatt.printable import printable, printable_lines

    paths = RunPaths(arguments.run)
    paths.check_is_run()
    found = stacks_of(paths, only_here=arguments.here)
    dumps = [dump for dump in found.dumps if dump.name.startswith(arguments.role)]
    if arguments.json:
        print(json.dumps({"processes": [asdict(dump) for dump in dumps], "not_asked": found.not_asked}))
        return 0
    for dump in dumps:
        print("\n".join(map(printable_lines, _lines(dump))))
    for node, why in found.not_asked.items():
        sys.stderr.write(f"yatt: {printable(node)} could not be asked: {printable(why)}\n")
    if not dumps:
        sys.stderr.write(f"yatt: no process of {printable(str(paths.root))} was found\n")
    return 0


def _lines(dump: "StackDump") -> Iterator[str]:
    attempt = f", attempt {dump.attempt}" if dump.attempt else ""
    yield f"== {dump.name}{attempt}, pid {dump.pid} on {dump.host}: {dump.state}"
    if dump.text:
        yield dump.text.rstrip()
    else:
        where = f" in {dump.waits_in}" if dump.waits_in else ""
        yield (
            f"  It did not answer. A process in state D waits{where} in the kernel, mostly for a disk or a "
            "network filesystem; one in state T was stopped; one in state Z has ended."
        )
    yield ""
