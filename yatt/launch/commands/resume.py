"""`yatt resume` of a run that was submitted: the next job of the run."""

from dataclasses import dataclass
from pathlib import Path

from yatt.config.site import SiteConfig
from yatt.errors import EXIT_FINISHED
from yatt.launch.checks.preflight import check_preflight
from yatt.launch.commands.submit import plan_job, queue_job, say_over, show_job
from yatt.launch.folder.folder import open_existing, take_changes
from yatt.launch.folder.inputs import check_inputs_of_resume
from yatt.launch.folder.occupied import make_way
from yatt.launch.resolve.plan import Resized
from yatt.launch.resolve.resolved import resolve_config
from yatt.launch.resolve.site_defaults import are_engines_here


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """How a run is resumed.

    Attributes:
        changes: ``key=value`` each, recorded in the run folder.
        take_over: if the run is active, let it save and stop first.
        after: id of a job that has to end before this one starts.
    """

    changes: tuple[str, ...] = ()
    take_over: bool = False
    after: str = ""


def resume_submitted(
    folder: Path, site: SiteConfig, resized: Resized, how: Resuming, *, dry_run: bool = False
) -> int:
    """Submits another job of the run in `folder`.

    Raises:
        ConfigError: see `submit_run`; or a key may not change.
    """
    paths, before = open_existing(folder)
    new = resolve_config(before, site, how.changes, resized)
    new.check(paths)
    if new.is_over(paths):
        return say_over(paths)
    config = new.config
    check_preflight(config, runs_here=False, engines_are_here=are_engines_here(site))
    check_inputs_of_resume(config, paths, tells=True)
    plan = plan_job(new)
    if dry_run:
        return show_job(config, plan, how.after)
    make_way(paths, take_over=how.take_over)
    queue_job(paths, take_changes(folder, how.changes, resized).config, plan, after=how.after)
    return EXIT_FINISHED
