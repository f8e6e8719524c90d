"""A user's file and what it imports beside it run as they are now, whatever caches of Python lie there."""

import importlib
import os
import py_compile
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from yatt.adapters.inputs import user_module
from yatt.adapters.inputs.user_module import load_module
from yatt.errors import ConfigError

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


@pytest.mark.parametrize("how", ["import helper", "from helper import work", "from helper import Thing as T"])
def test_a_file_that_would_get_another_files_helper_is_refused(tmp_path: Path, how: str) -> None:
    """A name is imported once in a process: it would be scored with the other one's code."""
    for word in ("one", "two"):
        (tmp_path / word).mkdir()
        text = f"def work():\n    return '{word}'\n\n\nclass Thing:\n    pass\n"
        (tmp_path / word / "helper.py").write_text(text)
        (tmp_path / word / "reward.py").write_text(f"import json\n{how}\n")
    load_module(tmp_path / "one" / "reward.py", "rewards[x].path")
    load_module(tmp_path / "one" / "reward.py", "rewards[x].path")
    with pytest.raises(ConfigError, match=r"two/reward.* imports 'helper', and got .*one/"):
        load_module(tmp_path / "two" / "reward.py", "rewards[y].path")


def test_a_helper_that_only_one_of_two_files_has_is_its_own(tmp_path: Path) -> None:
    """Also an installed module that lies in the other one's folder stays what it is."""
    for word in ("one", "two"):
        (tmp_path / word).mkdir()
        (tmp_path / word / f"helper_{word}.py").write_text(f"WORD = '{word}'\n")
        (tmp_path / word / "json").mkdir()
        (tmp_path / word / "reward.py").write_text(f"import json\nimport helper_{word} as h\n")
    loaded = [load_module(tmp_path / word / "reward.py", "rewards[x].path") for word in ("one", "two")]
    assert [module.h.WORD for module in loaded] == ["one", "two"]
    for word in ("one", "two"):
        del sys.modules[f"helper_{word}"]


def test_a_file_that_python_cannot_read_is_named(tmp_path: Path) -> None:
    """Python gives no name and no line for it."""
    (tmp_path / "reward.py").write_bytes(b"\0")
    with pytest.raises(ConfigError, match=f"rewards.x.: {tmp_path}/reward.py: source code"):
        load_module(tmp_path / "reward.py", "rewards[x]")
