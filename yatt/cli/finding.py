"""Finds the run that an argument names: its folder, a file in it, its run file, its name or its id."""

from pathlib import Path

from yatt.errors import ConfigError


def run_folder(named: Path) -> Path:
    """Returns the run folder that `named` means; other paths are returned as they are.

    A folder is taken as it is. Of a run file, `run.dir` is meant. A word that is no path is the name of the
    folder, or the run id, of one of the user's runs.

    Raises:
        ConfigError: a run file cannot be read, or several runs have the name.
    """
    if named.is_dir():
        return named
    if named.is_file():
        if (named.parent / "config.yaml").is_file():  # config.yaml, events.jsonl and so on of a run
            return named.parent
        return _of_run_file(named) if named.suffix in (".yaml", ".yml") else named
    if named.name == str(named) and not named.exists():
        return _known(str(named)) or named
    return named


def _of_run_file(path: Path) -> Path:
    from yatt.config.tree import read_tree

    section = read_tree(path, []).value
    node = section.get("run") if isinstance(section, dict) else None
    found = node.value.get("dir") if node is not None and isinstance(node.value, dict) else None
    if found is None or not isinstance(found.value, str):
        raise ConfigError(f"{path} has no run.dir; give the run folder.")
    return Path(found.value).expanduser()


def _known(name: str) -> Path | None:
    """Returns the user's run of that name or id; None if there is none.

    Raises:
        ConfigError: there are several.
    """
    from yatt.launch.folder.known import known_runs

    roots = known_runs()
    found = [root for root in roots if root.name == name] or [root for root in roots if _id(root) == name]
    if len(found) > 1:
        listed = "\n".join(f"  {root}" for root in found)
        raise ConfigError(f"several of your runs are named {name}; give the folder:\n{listed}")
    return found[0] if found else None


def _id(root: Path) -> str:
    from yatt.adapters.run_folder.run_config import load_run
    from yatt.paths import RunPaths

    try:
        return load_run(RunPaths(root)).run.id
    except (ConfigError, OSError):
        return ""
