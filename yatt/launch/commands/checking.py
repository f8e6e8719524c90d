"""`yatt check`: everything that is known about a run before its start. Nothing is started; data that the run
needs (`data.map`, the hub) is made, as a start would do, because rows are checked."""

import glob
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from yatt.adapters.node_local.local_folder import check_in_memory
from yatt.config.doubts import doubtful_settings
from yatt.config.schema import DataSection, FromCheckpointSection, RunConfig
from yatt.config.sections.judges import RefreshSection
from yatt.config.sections.operation import TRACKERS
from yatt.config.site import SiteConfig
from yatt.errors import ConfigError, Finding
from yatt.launch.checks.planned_memory import memory_doubts
from yatt.launch.checks.preflight import check_preflight
from yatt.launch.checks.score_trial import TriedFunction
from yatt.launch.checks.shown_samples import shown_samples
from yatt.launch.commands.asked_judges import asked_judges
from yatt.launch.commands.executor import template_of
from yatt.launch.folder.folder import check_folder
from yatt.launch.resolve.data_files import HUB
from yatt.launch.resolve.resolved import NO_SITE, resolve_config
from yatt.launch.resolve.site_defaults import are_engines_here
from yatt.models.folder import CONFIG


@dataclass(frozen=True, slots=True)
class Absent:
    """A file or folder of the config that is not on this machine.

    Attributes:
        has_config: a model folder, of which only config.json is here.
    """

    key: str
    path: str
    has_config: bool

    def explains(self, mistake: Finding) -> bool:
        """Whether a mistake is only that the file, or one below the folder, is not here."""
        own, its = (Path(path).expanduser().absolute() for path in (self.path, mistake.missing))
        return bool(mistake.missing) and (own == its or own in its.parents)

    def as_skipped(self) -> Finding:
        """Returns that it could not be checked."""
        what = f"of {self.path} only config.json is" if self.has_config else f"{self.path} is not"
        return Finding(level="skip", key=self.key, says=f"{what} on this machine")


def check_run(
    config: RunConfig,
    site: SiteConfig | None = None,
    *,
    elsewhere: bool = False,
    num_samples: int = 0,
    asks: bool = False,
) -> list[Finding]:
    """Checks files, functions, stores, sizes and memory of a run.

    Args:
        site: where the run is to be submitted; the cluster itself is not asked.
        elsewhere: the run starts on another machine: files that are not here are skipped, not refused.
        num_samples: how many prompts are shown as the policy gets them, if nothing is wrong.
        asks: put one question to each judge behind a URL, if nothing is wrong; not from elsewhere.

    Returns:
        What was found; empty if there is nothing to say.
    """
    absent, skipped = list[Absent](), list[Finding]()
    if elsewhere:
        config, urls = _without_stores(config)
        absent = list(_absent(config))
        skipped = [_skipped(f"{url} is not asked from this machine") for url in urls]
    config, failures = _ready(config, site, elsewhere=elsewhere)
    is_here = site is None and not elsewhere
    if is_here:
        failures += _shm_failures(config)
    engines = not elsewhere and (site is None or are_engines_here(site))
    tried: list[TriedFunction] = []
    try:
        tried = check_preflight(config, runs_here=is_here, engines_are_here=engines)
    except ConfigError as error:
        failures += error.findings
    not_made = _not_files(config.data)
    keyed = {(each.file, each.says) for each in failures if each.key}
    failures = [
        each
        for each in {each.in_words(): each for each in failures}.values()
        if (each.key or (each.file, each.says) not in keyed)  # who found it first may not have known the key
        and each.missing not in not_made
        and not any(one.explains(each) for one in absent)
    ]
    skipped += [each.as_skipped() for each in absent]
    if site is not None:
        skipped.append(_skipped("the cluster: `yatt diagnose --site SITE RUN_FILE` asks Slurm"))
    samples = shown_samples(config, num_samples) if num_samples and not (failures or elsewhere) else []
    return [
        *failures,
        *doubtful_settings(config),
        *(() if failures else memory_doubts(config)),
        *skipped,
        *(Finding(level="call", says=each.in_words()) for each in tried),
        *(_asked(config, elsewhere=elsewhere) if asks and not failures else ()),
        *(Finding(level="sample", says=each) for each in samples),
    ]


def _skipped(says: str) -> Finding:
    return Finding(level="skip", says=says)


def _asked(config: RunConfig, *, elsewhere: bool) -> list[Finding]:
    """Asks the judges behind URLs; returns what came of it."""
    if elsewhere or all(genrm.has_engine for genrm in config.genrms):
        return [_skipped(f"no judge was asked: {'with --elsewhere' if elsewhere else 'none has api.url'}")]
    return asked_judges(config)


def _ready(config: RunConfig, site: SiteConfig | None, *, elsewhere: bool) -> tuple[RunConfig, list[Finding]]:
    """Returns the config as a start would have it, and mistakes."""
    try:
        resolved = resolve_config(config, site or NO_SITE)
        config = resolved.config
        config = resolved.of_attempt
        template_of(resolved.site)
        if not elsewhere:
            check_folder(config)
    except ConfigError as error:
        return config, [*error.findings]
    return config, []


def _shm_failures(config: RunConfig) -> tuple[Finding, ...]:
    try:
        check_in_memory(Path(config.launch.shm_dir), "launch.shm_dir")
    except ConfigError as error:
        return error.findings
    return ()


def _not_files(data: DataSection) -> frozenset[str]:
    """Returns the entries that did not become files, which is told."""
    entries = (*data.train_files, *data.val_files)
    return frozenset(each for each in entries if each.startswith(HUB) or glob.has_magic(each))


def _absent(config: RunConfig) -> Iterator[Absent]:
    for path, key in {path: key for key, path in _paths(asdict(config), "")}.items():
        place = Path(path).expanduser()
        has_config = (place / CONFIG).is_file()
        is_here = place.exists() or bool(glob.glob(str(place), recursive=True))
        if not is_here or (has_config and not any(place.glob("*.safetensors"))):
            yield Absent(key, path, has_config)


def _without_stores(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Returns the config without stores behind a URL, and their URLs."""
    given = config.checkpoint.url, config.run.from_checkpoint.url, *(g.refresh.url for g in config.genrms)
    urls = [url for url in given if "://" in url]
    if config.checkpoint.url in urls:
        config = replace(config, checkpoint=replace(config.checkpoint, url="", storage_options={}))
    if config.run.from_checkpoint.url in urls:
        config = replace(config, run=replace(config.run, from_checkpoint=FromCheckpointSection()))
    here = [replace(g, refresh=RefreshSection()) if g.refresh.url in urls else g for g in config.genrms]
    return replace(config, genrms=tuple(here)), urls


PATHS = frozenset(
    {
        "path",
        "model",
        "family",
        "train_files",
        "val_files",
        "media_root",
        "media_store",
        "map",
        "url",
        "trackers",
    }
)
"""Keys whose value is a file, a folder or a URL; or a tracker's name."""


def _paths(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields keys that name files, with their values."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _paths(part, f"{key}.{name}" if key else name)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _paths(part, f"{key}[{index}]" if isinstance(part, dict) else key)
    elif isinstance(value, str) and key.rpartition(".")[2] in PATHS and _is_path(value):
        yield key, value


def _is_path(value: str) -> bool:
    return bool(value) and "://" not in value and not value.startswith("builtin:") and value not in TRACKERS
