"""A user's file and what it imports beside it run as they are now, whatever caches of Python lie there."""

import importlib
import os
import py_compile
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from yatt.adapters import user_module
from yatt.adapters.user_module import load_module

MADE = ("helper", "package", "package.part", "installed")


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "path_hooks", sys.path_hooks[:])
    monkeypatch.setattr(user_module, "_theirs", set())
    yield
    for name in MADE:
        sys.modules.pop(name, None)


def written(path: Path, text: str) -> Path:
    """A file with a cache of other content that Python would take for its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("new", "old"))
    os.utime(path, (1e9, 1e9))
    py_compile.compile(str(path))
    path.write_text(text)
    os.utime(path, (1e9, 1e9))
    return path


def test_no_cache_is_taken_for_a_users_file_nor_for_what_it_imports(tmp_path: Path) -> None:
    own = written(tmp_path / "reward.py", "import helper\nfrom package import part\nOWN = 'new'\n")
    written(tmp_path / "helper.py", "WORD = 'new'\n")
    written(tmp_path / "package" / "__init__.py", "WORD = 'new'\n")
    written(tmp_path / "package" / "part.py", "WORD = 'new'\n")
    module = load_module(own, "rewards[x]")
    assert (module.OWN, module.helper.WORD, module.part.WORD) == ("new",) * 3
    assert sys.modules["package"].WORD == "new"


def test_packages_that_are_installed_below_a_users_folder_keep_their_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment often lies in the project's folder: torch would be compiled at each start."""
    packages = tmp_path / ".venv" / "site-packages"
    written(packages / "installed.py", "WORD = 'new'\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(user_module, "_OURS", [packages])
    module = load_module(written(tmp_path / "reward.py", "import installed\n"), "rewards[x]")
    assert module.installed.WORD == "old", "Python's own rule"


def test_a_users_folder_below_one_of_the_path_is_a_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_module, "_OURS", [tmp_path])
    written(tmp_path / "own" / "helper.py", "WORD = 'new'\n")
    module = load_module(written(tmp_path / "own" / "reward.py", "import helper\n"), "rewards[x]")
    assert module.helper.WORD == "new"
    importlib.invalidate_caches()


def test_modules_without_a_source_and_those_of_an_archive_are_found(tmp_path: Path) -> None:
    bare = written(tmp_path / "helper.py", "WORD = 'new'\n")
    py_compile.compile(str(bare), cfile=str(tmp_path / "helper.pyc"))
    bare.unlink()
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("installed.py", "WORD = 'zipped'\n")
    text = f"import sys\nsys.path.append({str(tmp_path / 'lib.zip')!r})\nimport helper, installed\n"
    module = load_module(written(tmp_path / "reward.py", text), "rewards[x]")
    assert (module.helper.WORD, module.installed.WORD) == ("new", "zipped")


def test_two_files_have_helpers_of_one_name(tmp_path: Path) -> None:
    """Each gets its own, also when it is loaded again; and a module that is installed wins over both."""
    files = []
    for word in ("one", "two"):
        folder = tmp_path / word
        (folder / "package").mkdir(parents=True)
        (folder / "helper.py").write_text(f"WORD = '{word}'\n")
        (folder / "package" / "__init__.py").write_text("")
        (folder / "package" / "part.py").write_text(f"WORD = '{word}'\n")
        (folder / "json.py").write_text("WORD = 'no'\n")
        files.append(folder / "reward.py")
        files[-1].write_text(
            "import json\nimport helper\nfrom package import part\nWORDS = helper.WORD, part.WORD\n"
        )
    loaded = [load_module(files[at], "rewards[x]") for at in (0, 1, 0)]
    assert [module.WORDS for module in loaded] == [("one",) * 2, ("two",) * 2, ("one",) * 2]
    assert loaded[1].helper.WORD == "two", "what was imported before stays"
    assert not hasattr(loaded[0].json, "WORD")


def test_an_installed_module_below_another_users_folder_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the file's folder has one of its name, as `datasets`."""
    packages = tmp_path / "one" / ".venv" / "site-packages"
    written(packages / "installed.py", "WORD = 'new'\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(user_module, "_OURS", [packages])
    first = load_module(written(tmp_path / "one" / "reward.py", "import installed\n"), "rewards[x]")
    (tmp_path / "two" / "installed").mkdir(parents=True)
    second = load_module(written(tmp_path / "two" / "reward.py", "import installed\n"), "rewards[y]")
    assert first.installed is second.installed
