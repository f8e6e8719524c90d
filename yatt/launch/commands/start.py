"""`yatt run` and `yatt resume` on this machine: from a config to a running run."""

import os
from collections.abc import Sequence
from pathlib import Path

from yatt.adapters.node_local.local_folder import check_in_memory
from yatt.config.schema import RunConfig
from yatt.launch.attempt.attempts import Attempts
from yatt.launch.attempt.on_this_machine import ENDING, LocalBackend
from yatt.launch.checks.preflight import check_preflight, show_doubts
from yatt.launch.folder.folder import check_folder, open_existing, open_folder, take_changes
from yatt.launch.folder.folder_wait import FolderWait
from yatt.launch.folder.inputs import check_inputs_of_resume
from yatt.launch.folder.known import remember_run
from yatt.launch.folder.occupied import make_way
from yatt.launch.node.device import device_of
from yatt.launch.resolve.plan import Resized
from yatt.launch.resolve.resolved import resolve_config
from yatt.obs.story.rows_seen import RowsSeen
from yatt.obs.story.view import RunView
from yatt.obs.terminal.console import Console
from yatt.obs.terminal.printed_samples import PrintedSamples
from yatt.paths import RunPaths

SHOWN_ROWS = 100
"""Rows of metrics that the terminal's process keeps: it shows the newest ones and the time left."""


def start_run(config: RunConfig, *, take_over: bool = False) -> int:
    """Checks everything, opens the run folder, runs; returns the exit code.

    Args:
        take_over: if the run is active, let it save and stop first.

    Raises:
        ConfigError: the user has to change something; nothing was started.
    """
    config = resolve_config(config).config
    check_preflight(config)
    check_in_memory(Path(config.launch.shm_dir), "launch.shm_dir")
    show_doubts(config)
    make_way(check_folder(config), take_over=take_over)
    paths = open_folder(config)
    remember_run(paths.root)
    return _run(config, paths)


def resume_run(
    folder: Path, resized: Resized, *, changes: Sequence[str] = (), take_over: bool = False
) -> int:
    """Resumes the run in `folder`; `take_over` as in `start_run`.

    Args:
        changes: ``key=value`` each, recorded in the run folder.

    Raises:
        ConfigError: it is not a run folder, lacks a file, does not fit on that many nodes, or a key may not
            change.
    """
    paths, before = open_existing(folder)
    new = resolve_config(before, changes=changes, resized=resized)
    new.check(paths)
    config = new.of_attempt
    check_preflight(config)
    if not new.is_over(paths):
        check_inputs_of_resume(config, paths, tells=False)
    check_in_memory(Path(config.launch.shm_dir), "launch.shm_dir")
    make_way(paths, take_over=take_over)
    remember_run(paths.root)
    return _run(take_changes(folder, changes, resized).of_attempt, paths)


def _run(config: RunConfig, paths: RunPaths) -> int:
    samples = PrintedSamples(paths.samples, config.logging.print_sample_every)
    view = RunView(paths, config.trainer.total_iterations, seen=RowsSeen(SHOWN_ROWS))
    console = Console(view, samples=samples)
    signals: list[int] = []
    wait = FolderWait(
        root=paths.root,
        limit_s=config.launch.phase_timeout_s,
        signals=signals,
        ending=ENDING,
        say=console.say,
    )
    device = device_of(config.launch.device)
    backend = LocalBackend(config, paths, device, console.update, wait, signals)
    try:
        backend.listen()
        console.pass_over()
        return Attempts(config, paths, backend, wait, console.say).run(os.environ)
    finally:
        backend.close()
        console.close()
