"""Stores of strangers: whatever a manifest says, however it is sealed, and whatever lies in the store, no
command touches anything outside of the two stores, and each ends with a sentence.

Two watches: the interpreter's audit events name every file that a command opens, lists, makes or removes; the
S3 server's log names every key. `YATT_FUZZ=5000 YATT_FUZZ_SEED=7 pytest` of this file runs the long form.
Without a seed each run draws its own, and a failure prints it.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
import torch

from tests.conftest import BUCKET, s3_server
from tests.hostile_manifests import HostileManifest, drawn_manifest
from tests.runs import HANG_S, RunFile
from tests.saved_weights import saved_run
from tests.seeds import seed_of
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import saved_scalars
from yatt.checkpoint.local.shards import Shard, read_shards
from yatt.checkpoint.store.store import Store, open_store
from yatt.cli.main import main
from yatt.control.rollouts.groups.carried import read_state
from yatt.core.attempts.checkpoint_names import manifest_name
from yatt.core.attempts.claims import Commit
from yatt.errors import CheckpointError

COUNT = int(os.environ.get("YATT_FUZZ", "60"))
BUCKET_COUNT = int(os.environ.get("YATT_FUZZ", "20"))
"""A case in a bucket costs eight times one in folders."""

SEED = seed_of("YATT_FUZZ_SEED")
NEWEST = manifest_name(Commit(2, 1))
pytestmark = [pytest.mark.timeout(900 + 2 * COUNT), pytest.mark.filterwarnings("ignore")]


@dataclass
class Watch:
    """The paths that this process touches while it is on."""

    is_on: bool = False
    touched: set[str] = field(default_factory=set)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and (event == "open" or event.startswith(("os.", "shutil."))):
            paths = [each for each in arguments[:2] if isinstance(each, bytes | str)]
            self.touched.update(map(os.fsdecode, paths))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """For one command, which has to end."""
        self.touched.clear()
        before = signal.signal(signal.SIGALRM, _stop)
        signal.alarm(int(HANG_S))
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def outside(self, allowed: tuple[Path, ...], home: Path) -> list[str]:
        """What was touched of a home, or through a planted link, and is not allowed."""
        found = []
        for path in self.touched:
            place = Path(os.path.realpath(path))
            is_theirs = place.is_relative_to(home) and not any(place.is_relative_to(each) for each in allowed)
            if is_theirs or place == Path("/dev/zero"):
                found.append(path)
        return found


def _stop(*_: object) -> None:
    raise AssertionError(f"no end after {HANG_S:g} s")


WATCH = Watch()
sys.addaudithook(WATCH)


def facts(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything under a folder: kind, content and time of each."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_mtime_ns, content)
    return found


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with things that are nobody's business."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    draft = tmp_path / "outside" / "thesis" / "000001-0123abcd" / "draft"
    draft.parent.mkdir(parents=True)
    draft.write_text("years of work")
    (tmp_path / "outside" / "thesis" / "chapter").write_text("more years")
    (tmp_path / "outside" / "dot_profile").write_text("umask 022")
    os.mkfifo(tmp_path / "outside" / "pipe")
    (tmp_path / "outside" / "zeros").symlink_to("/dev/zero")
    return tmp_path


@dataclass
class Commands:
    """Every command that reads a store, and what a start reads of it.

    Args:
        made: folder of what they export.
        allowed: what they may touch.
        options: fsspec's options of the store's URL.
    """

    run: RunFile
    home: Path
    source: str
    made: Path
    allowed: tuple[Path, ...]
    capsys: Any
    monkeypatch: Any
    options: dict[str, Any] = field(default_factory=dict)
    num_done: dict[str, int] = field(default_factory=dict)

    def check(self, target: str, iteration: tuple[int, ...]) -> None:
        """Runs all of them; of this iteration, or of the one that they choose."""
        options = [word for key, value in self.options.items() for word in ("--option", f"{key}={value}")]
        to = [word.replace("--option", "--to-option") for word in options]
        model, store = ("--model", self.run.folder / "policy"), ("--store", *options)
        self._type("list", "ckpt", "list", self.source, *store)
        self._type("verify", "ckpt", "verify", self.source, *iteration, *store)
        self._type("copy", "ckpt", "copy", self.source, target, *iteration, *store, *to)
        self._type("export", "ckpt", "export", self.source, *iteration, self.made / "hf", *store, *model)
        asked = [f"--iteration={number}" for number in iteration]
        self._type("convert", "convert", self.source, self.made / "hf2", *asked, *options, *model)
        self._restore()
        self._type("prune", "ckpt", "prune", self.run.run_dir)

    def _type(self, name: str, *words: object) -> None:
        self.monkeypatch.setattr(sys, "argv", ["yatt", *map(str, words)])
        with WATCH.watching():
            code = main()
        said = "".join(self.capsys.readouterr())
        assert code in (0, 1, 2), (name, code, said)
        assert "Traceback" not in said and "\x1b" not in said and len(said) < 20_000, said[:2000]
        assert code == 0 or said.strip(), f"{name} says nothing"
        self._end(name, is_done=code == 0)

    def _restore(self) -> None:
        is_done = False
        with WATCH.watching(), contextlib.suppress(CheckpointError):
            restored(open_store(self.source, self.options))
            is_done = True
        self._end("restore", is_done=is_done)

    def _end(self, name: str, *, is_done: bool) -> None:
        self.num_done[name] = self.num_done.get(name, 0) + is_done
        assert WATCH.outside(self.allowed, self.home) == [], name


def restored(store: Store) -> None:
    """What a start reads: the newest whole checkpoint's weights, scalars and prompt groups.

    Raises:
        CheckpointError: there is none, or it cannot be restored.
    """
    manifest = Checkpoints(store, 0).newest().manifest
    if manifest is None:
        raise CheckpointError("there is no whole checkpoint")
    saved_scalars(manifest)
    tensors = {piece.key: piece for file in manifest.files for piece in file.tensors}
    wanted = [
        Shard(
            key=key, global_shape=piece.global_shape, offset=(0,) * len(piece.global_shape),
            tensor=torch.empty(piece.global_shape, dtype=getattr(torch, piece.dtype), device="meta"),
        )
        for key, piece in tensors.items()
    ]  # fmt: skip
    read_shards(store, manifest.files, wanted)
    if manifest.nodes:
        read_state(store, manifest.nodes, shard=0, num_shards=len(manifest.nodes))


def repeated(check: Callable[[random.Random, int], None], count: int = COUNT) -> None:
    """Runs the cases; a failure names its seed."""
    for number in range(count):
        try:
            check(random.Random(SEED + number), number)
        except BaseException as error:
            error.add_note(f"YATT_FUZZ=1 YATT_FUZZ_SEED={SEED + number}")
            raise


def check_counts(commands: Commands, count: int = COUNT) -> None:
    """Some cases have to be harmless and some refused, else the test shows nothing."""
    if count >= 60:
        assert min(commands.num_done.values()) > 0, commands.num_done
        assert commands.num_done["copy"] < 0.7 * count, commands.num_done


# ---- folders ------------------------------------------------------------------------------------

LINKS = {
    "a file": ("{file}", "dot_profile"), "a file to a pipe": ("{file}", "pipe"),
    "a file to zeros": ("{file}", "zeros"), "a save": ("{save}", "thesis/000001-0123abcd"),
    "a step": ("{step}", "thesis"), "manifests": ("manifests", "thesis"),
    "an adoption": ("adopted/000001.json", "zeros"), "the owner": ("run_id", "dot_profile"),
}  # fmt: skip
STRANGE = ("\u0663", "\u00b2", "9" * 100, "-1", "1e3", "00000003.1")


def put_link(draw: random.Random, store: Path, file: str, outside: Path) -> None:
    where, target = draw.choice([*LINKS.values()])
    save = file.rpartition("/")[0]
    place = store / where.format(file=file, save=save, step=save.rpartition("/")[0])
    remove(place)
    place.symlink_to(outside / target)


def put_pipe(draw: random.Random, store: Path, file: str, _: Path) -> None:
    place = store / draw.choice((file, "run_id", NEWEST, "adopted/000001.json"))
    remove(place)
    os.mkfifo(place)


def put_folder(_: random.Random, store: Path, file: str, __: Path) -> None:
    (store / file).unlink()
    (store / file).mkdir()


def put_names(_: random.Random, store: Path, __: str, ___: Path) -> None:
    for name in STRANGE:
        (store / f"global_step_{name}").mkdir()
        for folder in ("manifests", "adopted", "holders"):
            (store / folder).mkdir(exist_ok=True)
            (store / folder / f"{name}.{name}.json").write_text("{}")


def put_depth(_: random.Random, store: Path, __: str, ___: Path) -> None:
    (store / "holders").mkdir(exist_ok=True)
    for name in ("holders/000009.0123456789ab.json", "adopted/000001.json"):
        (store / name).write_text("[" * 100_000)


def put_length(draw: random.Random, store: Path, file: str, _: Path) -> None:
    os.truncate(store / draw.choice((NEWEST, "run_id", "adopted/000001.json", file)), 1 << 40)


HARMS = (put_link, put_link, put_pipe, put_folder, put_names, put_depth, put_length)


def remove(place: Path) -> None:
    shutil.rmtree(place) if place.is_dir() else place.unlink()


def test_a_hostile_folder_leads_nowhere(home, capsys, monkeypatch):
    outside = home / "outside"
    run = saved_run(home / "theirs", iterations=(1, 2), checkpoint={"keep": 1})
    source, target, made, pristine = (
        run.run_dir / "checkpoints", home / "copy", home / "made", home / "pristine"
    )  # fmt: skip
    shutil.copytree(source, pristine)
    whole = (source / NEWEST).read_bytes()
    file = Checkpoints(open_store(str(source), {}), 0).read(NEWEST).files[0].path
    allowed = (source, target, made, run.run_dir, run.folder / "policy", home / "state")
    commands = Commands(run, home, str(source), made, allowed, capsys, monkeypatch)
    before = facts(outside) | facts(run.folder / "policy")

    def check(draw: random.Random, number: int) -> None:
        shutil.rmtree(source)
        shutil.copytree(pristine, source)
        for folder in (target, made):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        hostile = drawn_manifest(draw, whole, outside)
        (source / hostile.name).write_bytes(hostile.data)
        if draw.random() < 0.4:
            draw.choice(HARMS)(draw, source, file, outside)
        commands.check(str(target), (2,) if number % 3 else ())
        assert facts(outside) | facts(run.folder / "policy") == before

    repeated(check)
    check_counts(commands)


# ---- S3 -----------------------------------------------------------------------------------------


class Objects:
    """All objects of an S3 server."""

    def __init__(self, endpoint: str) -> None:
        import boto3

        self.client = boto3.client("s3", endpoint_url=endpoint)

    def tags(self, prefix: str = "") -> dict[str, str]:
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
        return {each["Key"]: each["ETag"] for each in listed}

    def content(self, prefix: str) -> dict[str, bytes]:
        return {
            key: self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in self.tags(prefix)
        }

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)


def keys_in(log: Path) -> set[str]:
    """Keys and prefixes of the requests that a server has got."""
    found = set()
    for path, query in re.findall(rf'"[A-Z]+ /{BUCKET}([^ ?"]*)(?:\?([^ "]*))? HTTP', log.read_text()):
        found.update([unquote(path).removeprefix("/"), *parse_qs(query).get("prefix", ())])
    return found - {""}


@pytest.mark.slow
def test_a_hostile_bucket_leads_nowhere(home, capsys, monkeypatch):
    with s3_server(home / "server.log") as endpoint:
        options, objects = {"endpoint_url": endpoint}, Objects(endpoint)
        checkpoint = {"keep": 1, "url": f"s3://{BUCKET}/theirs", "storage_options": options}
        run = saved_run(home / "theirs", iterations=(1, 2), checkpoint=checkpoint)
        for key in ("thesis/chapter", "dot_profile", "theirs-other/run_id", "run_id", "../thesis/chapter"):
            objects.put(key, b"years of work")
        pristine, others = objects.content("theirs/"), objects.tags()
        tags, made = objects.tags("theirs/"), home / "made"
        allowed = (made, run.run_dir, run.folder / "policy", home / "state")
        url = f"s3://{BUCKET}/theirs"
        commands = Commands(run, home, url, made, allowed, capsys, monkeypatch, options)
        (home / "server.log").write_text("")

        def check(draw: random.Random, number: int) -> None:
            for key in objects.tags("theirs/").keys() - pristine.keys():
                objects.remove(key)
            present = objects.tags("theirs/")
            for key in pristine:
                if present.get(key) != tags[key]:
                    objects.put(key, pristine[key])
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            hostile: HostileManifest = drawn_manifest(draw, pristine[f"theirs/{NEWEST}"], home / "outside")
            objects.put(f"theirs/{hostile.name}", hostile.data)
            commands.check(f"s3://{BUCKET}/copies/{number}", (2,) if number % 3 else ())
            for key in objects.tags("copies/"):
                objects.remove(key)
            left = objects.tags()
            assert {key: left.get(key) for key in others if not key.startswith("theirs/")} == {
                key: tag for key, tag in others.items() if not key.startswith("theirs/")
            }

        repeated(check, BUCKET_COUNT)
        check_counts(commands, BUCKET_COUNT)
        asked = {
            key for key in keys_in(home / "server.log") if not f"{key}/".startswith(("theirs/", "copies/"))
        }
        assert asked <= {"run_id"}, "no other key was asked for"
