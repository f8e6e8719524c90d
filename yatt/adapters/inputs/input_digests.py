"""Digests of a run's inputs (`yatt.core.attempts.inputs`): cheap enough for each start.

Of a user's Python file, the digest is of the file and of the files in its folder that it imports, directly or
not. Of a large file, it is of its size and of blocks in it: of 16 GB of weights a few MB are read.

Everything here blocks: not for an event loop.
"""

import ast
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from yatt.config.schema import RunConfig
from yatt.core.attempts.inputs import InputRules
from yatt.plain_files import open_regular, read_json_object
from yatt.records import inputs

WHOLE_BYTES = 32 << 20
"""Files up to this size are read in whole."""

BLOCK_BYTES, MOST_BLOCKS, LEAST_BLOCKS, FOLDER_BLOCKS = 4096, 64, 4, 256
"""Of a larger file: the size of each block, the number of blocks, and that of all files of a folder."""

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_SETTINGS, _TEMPLATE_KEY = "tokenizer_config.json", "chat_template"
_MODEL_CONFIG = ("config.json", "generation_config.json")
_WEIGHTS = (".safetensors", ".bin")
_RUN_TIME_NAMES = ("__import__", "exec", "eval")
_RUN_TIME_CALLS = (
    "import_module",
    "run_path",
    "run_module",
    "spec_from_file_location",
    "exec_module",
    "load_module",
    "SourceFileLoader",
    "addsitedir",
)
"""Names that import by a text which only a run of the file knows; the first three not as methods."""


def input_rules(config: RunConfig) -> InputRules:
    """Returns what a change of an input costs this run."""
    return InputRules(
        has_reference=config.has_reference or bool(config.algorithm.path),
        is_deterministic=config.run.deterministic,
        accepted=frozenset(config.run.accept_changed),
    )


def add_input_digests(config: RunConfig, found: dict[str, str]) -> None:
    """Adds the digest of each input to `found`, 32 hexadecimal digits: small inputs first, because the caller
    may not have the time for all of them. One that cannot be read is missing: whoever needs it says so.

    Args:
        config: complete, with absolute paths.
    """
    for name, parts in _inputs(config):
        with contextlib.suppress(Exception):  # whatever a stranger's file makes of its reader
            found[name] = _digest(parts())


Parts = Callable[[], Iterable[tuple[str, bytes]]]
"""Gives names and digests of an input's files."""


def _inputs(config: RunConfig) -> Iterator[tuple[str, Parts]]:
    model = Path(config.model.path)
    yield inputs.TOKENIZER, partial(_tokenizer, model)
    yield inputs.TEMPLATE, partial(_template, model)
    yield inputs.MODEL_CONFIG, partial(_model_config, model)
    if config.data.val_files:
        yield inputs.HELD_OUT, partial(_rows, config.data.val_files)
    functions = {
        inputs.ENVIRONMENT: config.environment.path,
        inputs.ALGORITHM: config.algorithm.path,
        inputs.FAMILY: config.model.family,
        **{inputs.reward_input(reward.name): reward.path for reward in config.rewards},
        **{inputs.genrm_input(genrm.name, is_model=False): genrm.path for genrm in config.genrms},
    }
    for name, path in functions.items():
        if path and not path.startswith("builtin:"):
            yield name, partial(_python, Path(path))
    for genrm in config.genrms:
        if genrm.has_engine:
            yield inputs.genrm_input(genrm.name, is_model=True), partial(_judge, Path(genrm.model))
    yield inputs.WEIGHTS, partial(_weights, model)
    if config.has_critic and config.critic.path:  # else it begins as the policy
        critic = Path(config.critic.path)
        yield inputs.CRITIC_CONFIG, partial(_model_config, critic)
        yield inputs.CRITIC_WEIGHTS, partial(_weights, critic)


def _digest(parts: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, part in parts:
        digest.update(json.dumps([name, part.hex()]).encode())
    return digest.hexdigest()[:32]


def file_digest(path: Path, num_blocks: int = MOST_BLOCKS) -> bytes:
    """Returns a digest of a file; of a large one, see the module.

    Args:
        num_blocks: of a large file, the first and the last block included.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256(f"{size} ".encode())
        last = size - BLOCK_BYTES
        for number in range(num_blocks):
            file.seek(last * number // (num_blocks - 1))
            digest.update(file.read(BLOCK_BYTES))
        return digest.digest()


def _present(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        if (folder / name).is_file():
            yield name, file_digest(folder / name)


def _check_is_there(folder: Path) -> None:
    """Raises OSError for a model's folder without a config: one that is not mounted now has no files, not
    others."""
    (folder / _MODEL_CONFIG[0]).stat()


def _tokenizer(folder: Path) -> Iterator[tuple[str, bytes]]:
    _check_is_there(folder)
    yield from _present(folder, _TOKENIZER)
    yield _SETTINGS, _of_value({k: v for k, v in _settings(folder).items() if k != _TEMPLATE_KEY})


def _template(folder: Path) -> Iterator[tuple[str, bytes]]:
    _check_is_there(folder)
    yield from _present(folder, _TEMPLATE_FILES)
    yield _SETTINGS, _of_value(_settings(folder).get(_TEMPLATE_KEY))


def _settings(folder: Path) -> dict[str, object]:
    return read_json_object(folder / _SETTINGS) or {}


def _of_value(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _model_config(folder: Path) -> Iterator[tuple[str, bytes]]:
    _check_is_there(folder)
    yield from _present(folder, _MODEL_CONFIG)


def _weights(folder: Path) -> Iterator[tuple[str, bytes]]:
    _check_is_there(folder)
    names = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHTS)
    num_blocks = min(MOST_BLOCKS, max(LEAST_BLOCKS, FOLDER_BLOCKS // max(1, len(names))))
    for name in names:
        yield name, file_digest(folder / name, num_blocks)


def _judge(folder: Path) -> Iterator[tuple[str, bytes]]:
    for part in (_tokenizer, _template, _weights, _model_config):
        yield from part(folder)


def _rows(files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Rows have the order of their files; a file may be moved."""
    for file in files:
        yield "", file_digest(Path(file))


def _python(path: Path) -> Iterator[tuple[str, bytes]]:
    for file in imported_files(path):
        yield str(file.relative_to(path.parent)), file_digest(file)


def imported_files(path: Path) -> list[Path]:
    """Returns a Python file and the files in its folder and below that it imports, directly or not, sorted.

    They are found by reading, not by running. If one of them imports by names that are made at run time, or
    changes `sys.path`, every Python file in the folder and in the packages below it counts.

    Raises:
        OSError: one cannot be read.
    """
    folder, found, waiting, is_dynamic = path.parent, {path}, [path], False
    while waiting:
        file = waiting.pop()
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, RecursionError):  # whoever imports it says so
            continue
        is_dynamic |= any(_is_made_at_run_time(node) for node in ast.walk(tree))
        new = {place for node in ast.walk(tree) for place in _places(node, file, folder)} - found
        found |= new
        waiting += new
    return sorted(found | _of_packages(folder) if is_dynamic else found)


def _of_packages(folder: Path) -> set[Path]:
    """Python files in a folder, and in the packages below it."""
    found = {path for path in folder.glob("*.py") if path.is_file()}
    for init in folder.glob("*/__init__.py"):
        found |= _of_packages(init.parent)
    return found


def _is_made_at_run_time(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        is_path = node.attr == "path" and isinstance(node.value, ast.Name) and node.value.id == "sys"
        return is_path or node.attr in _RUN_TIME_CALLS
    return isinstance(node, ast.Name) and node.id in (*_RUN_TIME_NAMES, *_RUN_TIME_CALLS)


def _places(node: ast.AST, file: Path, folder: Path) -> Iterator[Path]:
    """Files in the folder that an import statement runs."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _files_of(folder, alias.name.split("."))
    elif isinstance(node, ast.ImportFrom):
        if node.level > len(file.parents):
            return
        start = file.parents[node.level - 1] if node.level else folder
        if start != folder and folder not in start.parents:
            return  # Python refuses it too: the user's file is in no package
        words = node.module.split(".") if node.module else []
        yield from _files_of(start, words)
        for alias in node.names:
            yield from _files_of(start, [*words, alias.name])


def _files_of(start: Path, words: list[str]) -> Iterator[Path]:
    """The files of a dotted name, its packages' own ones included."""
    place = start
    for word in words:
        yield from (path for path in (place / word / "__init__.py", place / f"{word}.py") if path.is_file())
        place = place / word
