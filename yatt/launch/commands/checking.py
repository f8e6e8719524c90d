"""`yatt check`: everything that is known about a run before its start. Nothing is started; data that the run
needs (`data.map`, the hub) is made, as a start would do, because rows are checked."""

import glob
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from yatt.adapters.inputs.data_file import NO_FILE
from yatt.adapters.node_local.local_folder import check_in_memory
from yatt.config.doubts import doubtful_settings
from yatt.config.schema import DataSection, FromCheckpointSection, RunConfig
from yatt.config.site import SiteConfig
from yatt.errors import ConfigError
from yatt.launch.checks.planned_memory import memory_doubts
from yatt.launch.checks.preflight import check_preflight
from yatt.launch.checks.score_trial import TriedFunction
from yatt.launch.checks.shown_samples import shown_samples
from yatt.launch.commands.asked_judges import asked_judges
from yatt.launch.commands.executor import template_of
from yatt.launch.folder.folder import check_folder
from yatt.launch.resolve.completed import completed_config
from yatt.launch.resolve.data_files import HUB, with_made_data
from yatt.launch.resolve.plan import Resized, effective_config
from yatt.launch.resolve.site_defaults import are_engines_here, with_store
from yatt.models.folder import CONFIG

Level = Literal["fail", "note", "skip", "call", "sample"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing that a check says.

    Attributes:
        level: fail: the run would be refused. note: allowed, but rarely intended. skip: cannot be known here.
            call: what a function has given on a few rows, or a judge has answered. sample: prompts, questions
            and lengths.
        says: key or place, and what to do.
    """

    level: Level
    says: str


@dataclass(frozen=True, slots=True)
class Absent:
    """A file or folder of the config that is not on this machine.

    Attributes:
        has_config: a model folder, of which only config.json is here.
    """

    key: str
    path: str
    has_config: bool

    def explains(self, mistake: str) -> bool:
        """Whether a mistake is only that the file is not here."""
        name = ":".join(self.path.split(":")[:2]) if self.path.startswith(HUB) else self.path
        return name in mistake and (not self.has_config or " has no " in mistake)

    def in_words(self) -> str:
        """Returns a sentence."""
        what = f"of {self.path} only config.json is" if self.has_config else f"{self.path} is not"
        return f"{self.key}: {what} on this machine"


def check_run(
    config: RunConfig, site: SiteConfig | None = None, *, elsewhere: bool = False, num_samples: int = 0,
    asks: bool = False,
) -> list[CheckResult]:  # fmt: skip
    """Checks files, functions, stores, sizes and memory of a run.

    Args:
        site: where the run is to be submitted; the cluster itself is not asked.
        elsewhere: the run starts on another machine: files that are not here are skipped, not refused.
        num_samples: how many prompts are shown as the policy gets them, if nothing is wrong.
        asks: put one question to each judge behind a URL, if nothing is wrong; not from elsewhere.

    Returns:
        What was found; empty if there is nothing to say.
    """
    absent: list[Absent] = []
    skipped: list[str] = []
    if elsewhere:
        config, urls = _without_stores(config)
        absent = list(_absent(config))
        skipped = [f"{url} is not asked from this machine" for url in urls]
    config, failures = _ready(config, site, elsewhere=elsewhere)
    is_here = site is None and not elsewhere
    if is_here:
        failures += _shm_failures(config)
    engines = not elsewhere and (site is None or are_engines_here(site))
    tried: list[TriedFunction] = []
    try:
        tried = check_preflight(config, runs_here=is_here, engines_are_here=engines)
    except ConfigError as error:
        failures += _lines(error)
    failures = [line for line in failures if not any(each.explains(line) for each in absent)]
    failures = [line for line in failures if not line.startswith(_not_files(config.data))]
    notes = [*doubtful_settings(config), *(() if failures else memory_doubts(config))]
    skipped += [each.in_words() for each in absent]
    skipped += ["the cluster: `yatt diagnose --site SITE RUN_FILE` asks Slurm"] if site is not None else []
    return [
        *(CheckResult("fail", line) for line in dict.fromkeys(failures)),
        *(CheckResult("note", f"{key} {says}") for key, says in notes),
        *(CheckResult("skip", line) for line in skipped),
        *(CheckResult("call", each.in_words()) for each in tried),
        *(_asked(config, elsewhere=elsewhere) if asks and not failures else ()),
        *(
            CheckResult("sample", each)
            for each in _samples(config, 0 if failures or elsewhere else num_samples)
        ),
    ]


def _asked(config: RunConfig, *, elsewhere: bool) -> Iterator[CheckResult]:
    """Asks the judges behind URLs; yields what came of it."""
    if elsewhere or all(genrm.has_engine for genrm in config.genrms):
        why = "with --elsewhere" if elsewhere else "none has api.url"
        yield CheckResult("skip", f"no judge was asked: {why}")
        return
    yield from (CheckResult(level, says) for level, says in asked_judges(config))


def _samples(config: RunConfig, number: int) -> list[str]:
    return shown_samples(config, number) if number else []


def _ready(config: RunConfig, site: SiteConfig | None, *, elsewhere: bool) -> tuple[RunConfig, list[str]]:
    """Returns the config as a start would have it, and mistakes."""
    try:
        config = with_made_data(completed_config(config))
        if site is not None:
            config = effective_config(with_store(config, site), site, Resized())
            template_of(site)
    except ConfigError as error:
        return config, _lines(error)
    try:
        if not elsewhere:
            check_folder(config)
    except ConfigError as error:  # its lines belong together
        return config, [" ".join(map(str.strip, str(error).splitlines()))]
    return config, []


def _shm_failures(config: RunConfig) -> list[str]:
    try:
        check_in_memory(Path(config.launch.shm_dir), "launch.shm_dir")
    except ConfigError as error:
        return _lines(error)
    return []


def _lines(error: ConfigError) -> list[str]:
    lines = str(error).splitlines()
    return [line.strip() for line in lines if line.startswith("  ")] or lines


def _not_files(data: DataSection) -> tuple[str, ...]:
    """Returns the beginnings of mistakes that only say that an entry did not become files, which is said."""
    entries = (*data.train_files, *data.val_files)
    return tuple(f"{each}: {NO_FILE}" for each in entries if each.startswith(HUB) or glob.has_magic(each))


def _absent(config: RunConfig) -> Iterator[Absent]:
    for path, key in {path: key for key, path in _paths(asdict(config), "")}.items():
        place = Path(path).expanduser()
        has_config = (place / CONFIG).is_file()
        is_here = place.exists() or bool(glob.glob(str(place), recursive=True))
        if not is_here or (has_config and not any(place.glob("*.safetensors"))):
            yield Absent(key, path, has_config)


def _without_stores(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Returns the config without stores behind a URL, and their URLs."""
    urls = [url for url in (config.checkpoint.url, config.run.from_checkpoint.url) if "://" in url]
    if config.checkpoint.url in urls:
        config = replace(config, checkpoint=replace(config.checkpoint, url="", storage_options={}))
    if config.run.from_checkpoint.url in urls:
        config = replace(config, run=replace(config.run, from_checkpoint=FromCheckpointSection()))
    return config, urls


PATHS = frozenset(
    {"path", "model", "family", "train_files", "val_files", "media_root", "media_store", "map", "url"}
)
"""Keys whose value is a file, a folder or a URL."""


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
    return bool(value) and "://" not in value and not value.startswith("builtin:")
