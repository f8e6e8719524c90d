"""Imports Python files that a config names: reward functions, environments, algorithms, model families."""

import contextlib
import hashlib
import importlib.util
import os
import sys
import tempfile
import traceback
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType

from yatt.adapters.node_local.local_folder import own_subfolder
from yatt.errors import ConfigError, words_of


class _FromSource(SourceFileLoader):
    """Compiles the file as it is now. Python's cache takes a file that was changed within a second, to the
    same length, for the same; and it would lie beside the user's file."""

    def get_code(self, fullname: str) -> CodeType:
        del fullname
        return self.source_to_code(self.get_data(self.path), self.path)


_OURS = [Path(folder).resolve() for folder in sys.path if folder]
"""Folders of installed packages, whose caches Python may use; one may lie below a user's folder."""

FOR_CHILDREN = f"yatt-modules-{os.getuid()}"
"""Folder of modules that import users' files."""

PREFIX = "yatt_user_"
"""Of the names of modules that are users' files."""

_theirs: set[Path] = set()
"""Folders of users' files."""


def _finder_of(folder: str) -> FileFinder:
    """A hook of `sys.path_hooks`: finds modules in a user's folder and below, and compiles their source."""
    place = Path(folder).resolve()
    parents = (place, *place.parents)
    theirs = next((each for each in parents if each in _theirs), None)
    if (
        theirs is None
        or not place.is_dir()
        or any(ours in parents and theirs in ours.parents for ours in _OURS)
    ):
        raise ImportError(f"{folder} is no user's folder")
    return FileFinder(
        folder,
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (_FromSource, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )


def _import_from_source(folder: Path) -> None:
    """Makes modules in this folder, which a user's file imports, be compiled from their present source."""
    if not _theirs:
        sys.path_hooks.insert(0, _finder_of)
    _theirs.add(folder.resolve())
    for known in [each for each in sys.path_importer_cache if folder in (Path(each), *Path(each).parents)]:
        del sys.path_importer_cache[known]


def _name_of(path: Path) -> str:
    """Returns the module's name: files in several folders may be called the same."""
    return f"{PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _let_children_find(name: str, path: Path) -> None:
    """Lets a process that `multiprocessing` spawns import the module: functions are pickled by its
    name, and the process has this one's path. The folder stays: this process may be killed."""
    text = (
        "from pathlib import Path\n\nfrom yatt.adapters.inputs.user_module import load_module\n\n"
        f"load_module(Path({str(path)!r}), 'rewards')\n"
    )
    with contextlib.suppress(OSError):  # without it, only such processes fail
        folder = own_subfolder(Path(tempfile.gettempdir()), FOR_CHILDREN)
        new = folder / f"{name}.{os.getpid()}"
        new.write_text(text)
        new.replace(folder / f"{name}.py")
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def _refuse_others_helpers(module: ModuleType, folder: Path, key: str) -> None:
    """Refuses a file that has got a module beside another user's file instead of the one beside it: a name is
    imported once in a process.

    Raises:
        ConfigError: it has.
    """
    others = _theirs - {folder.resolve()}
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if not isinstance(name, str) or name.startswith(PREFIX):
            continue
        if not isinstance(known := sys.modules.get(name), ModuleType):
            continue
        top = name.partition(".")[0]
        is_beside = _is_in(known, others) and ((folder / f"{top}.py").exists() or (folder / top).is_dir())
        if is_beside:
            raise ConfigError(
                f"{module.__file__} imports '{name}', and got {known.__file__}, which another user's file "
                "has imported before. Rename one of the two, or put the files into one folder.",
                key=key,
            )


def _is_in(module: ModuleType, folders: set[Path]) -> bool:
    """Whether a module is a file in one of these folders or below, and no installed one that lies there."""
    file = getattr(module, "__file__", None)
    parents = [*Path(file).resolve().parents] if folders and file else []
    theirs = next((each for each in parents if each in folders), None)
    return theirs is not None and not any(ours in parents and theirs in ours.parents for ours in _OURS)


def load_module(path: Path, key: str) -> ModuleType:
    """Imports a user's file. Files beside it can be imported by it.

    Args:
        key: the config key that names the file, for messages.

    Raises:
        ConfigError: there is no such file, or it cannot be imported.
    """
    if not path.is_file():
        says = f"no file {path}; write the path of a Python file."
        raise ConfigError(says, key=key, missing=str(path))
    spec = importlib.util.spec_from_file_location(_name_of(path), path)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise ConfigError(f"{path} is not a Python file.", key=key)
    spec.loader = _FromSource(spec.name, str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _let_children_find(spec.name, path)
    _import_from_source(path.parent.absolute())
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # a file beside it can be imported
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}" if error.filename else str(path)  # none: it has a NUL
        raise ConfigError(f"{error.msg}.", key=key, file=place) from error
    except SystemExit as error:
        raise ConfigError(
            f"loading the file ends the process ({words_of(error)}). Leave that to `if __name__ == "
            "'__main__':`.",
            key=key,
            file=where_raised(error, path),
        ) from error
    except Exception as error:
        raise ConfigError(f"{words_of(error)}.", key=key, file=where_raised(error, path)) from error
    _refuse_others_helpers(module, path.parent, key)
    return module


def where_raised(error: BaseException, path: Path | None) -> str:
    """file:line of the user's code that raised; the innermost line of all if none of it is the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path is not None and Path(frame.filename) == path]
    if not frames:
        return str(path or "yatt")
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"
