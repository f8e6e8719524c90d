"""From a config to a running run on this machine."""

from pathlib import Path

from yatt.config.load import load_resolved
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.launch.device import device_of
from yatt.launch.folder import completed, open_folder
from yatt.launch.local import Launcher
from yatt.launch.preflight import preflight
from yatt.obs.console import Console
from yatt.obs.view import RunView
from yatt.paths import RunPaths


def start_run(config: RunConfig) -> int:
    """Check everything, open the run folder, run; gives the exit code.

    Raises:
        ConfigError: something of the user's is wrong; nothing was started.
    """
    config = completed(config)
    preflight(config)
    return _run(config, open_folder(config))


def resume_run(folder: Path) -> int:
    """Go on with the run in `folder`.

    Raises:
        ConfigError: it is no run folder, or what it needs is gone.
    """
    paths = RunPaths(folder.absolute())
    if not paths.config.exists():
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml. Give the folder of run.dir.")
    config = load_resolved(paths.config)
    if Path(config.run.dir) != paths.root:
        raise ConfigError(
            f"{folder} was moved: its run.dir is {config.run.dir}. Move it back, or link it there."
        )
    preflight(config)
    return _run(config, paths)


def _run(config: RunConfig, paths: RunPaths) -> int:
    console = Console(RunView(paths, config.trainer.total_iterations))
    try:
        launcher = Launcher(
            config, paths, device_of(config.launch.device), show=console.update, say=console.say
        )
        return launcher.run()
    finally:
        console.close()
