"""An archive on a node's own disk: all of it or nothing, and nothing beside it."""

import io
import os
import random
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from yatt.adapters.node_local.copied_files import GivenUp
from yatt.adapters.node_local.local_copy import LocalCopies
from yatt.adapters.node_local.unpacked_archive import LIST, UnpackedArchive

PYC = b"compiled for a source of 17 s" * 100


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **about: object) -> tuple:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mtime, info.mode = kind, len(data), 17, 0o644
    for key, value in about.items():
        setattr(info, key, value)
    return info, data


def archive_of(path: Path, members: Iterable[tuple], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


ENVIRONMENT = (
    member("./lib", kind=tarfile.DIRTYPE),
    member("./lib/empty", kind=tarfile.DIRTYPE),
    member("./lib/a.py", b"a = 1"),
    member("./lib/__pycache__/a.pyc", PYC),
    member("./bin/tool", b"#!/bin/sh", mode=0o755),
    member("./bin/python3", kind=tarfile.SYMTYPE, linkname="/usr/bin/python3"),
    member("./bin/python", kind=tarfile.SYMTYPE, linkname="python3"),
    member("./lib/b.py", kind=tarfile.LNKTYPE, linkname="./lib/a.py"),
    member("./lib64", kind=tarfile.SYMTYPE, linkname="lib"),
    member("./nothing", b""),
)


@pytest.fixture
def copies(tmp_path: Path) -> LocalCopies:
    (tmp_path / "disk").mkdir()
    return LocalCopies.within(tmp_path / "disk", lambda: False)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_an_archive_is_unpacked_once_with_links_times_and_modes(
    copies: LocalCopies, tmp_path: Path, mode: str
) -> None:
    archive = archive_of(tmp_path / "environment.tar", ENVIRONMENT, mode)
    copy = copies.unpack(archive)
    files = {str(path.relative_to(copy)) for path in copy.rglob("*")} - {LIST}
    assert files == {str(Path(info.name)) for info, _ in ENVIRONMENT} | {"bin", "lib/__pycache__"}
    assert (copy / "lib/__pycache__/a.pyc").read_bytes() == PYC
    assert (copy / "lib/a.py").stat().st_mtime == 17
    assert (copy / "lib/b.py").samefile(copy / "lib/a.py") and (copy / "lib64/a.py").is_file()
    assert os.readlink(copy / "bin/python3") == "/usr/bin/python3"
    assert os.access(copy / "bin/tool", os.X_OK) and not os.access(copy / "lib/a.py", os.X_OK)
    before = (copy / "lib/a.py").stat().st_ino
    assert copies.unpack(archive) == copy
    assert (copy / "lib/a.py").stat().st_ino == before


def test_an_unpacked_copy_that_a_crash_has_cut_is_made_anew(copies: LocalCopies, tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "environment.tar", ENVIRONMENT)
    for damage in (
        lambda copy: os.truncate(copy / "lib/a.py", 2),
        lambda copy: (copy / "bin/python3").unlink(),
        lambda copy: os.truncate(copy / LIST, 5),
        lambda copy: (copy / LIST).unlink(),
        lambda copy: (copy / LIST).write_text("[1]"),
        lambda copy: (copy / "nothing").unlink(),
    ):
        damage(copies.unpack(archive))
        copies.release(keep=True)
        copy = copies.unpack(archive)
        assert (copy / "lib/a.py").read_bytes() == b"a = 1" and (copy / "nothing").is_file()
        assert (copy / "bin/python3").is_symlink()


def test_what_python_compiles_again_is_no_damage(copies: LocalCopies, tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "environment.tar", ENVIRONMENT)
    copy = copies.unpack(archive)
    (copy / "lib/__pycache__/a.pyc").write_bytes(b"compiled anew")
    assert copies.unpack(archive) == copy
    assert (copy / "lib/__pycache__/a.pyc").read_bytes() == b"compiled anew"


def test_links_may_come_again_and_have_hard_links(copies: LocalCopies, tmp_path: Path) -> None:
    """As `cp -al` and `tar -r` leave them."""
    members = [
        member("a", kind=tarfile.SYMTYPE, linkname="x"), member("b", kind=tarfile.LNKTYPE, linkname="a"),
        member("a", kind=tarfile.SYMTYPE, linkname="y"), member("c", b"file"),
        member("c", kind=tarfile.SYMTYPE, linkname="z"),
        member("d", kind=tarfile.SYMTYPE, linkname=str(tmp_path / "out")), member("d", b"file"),
    ]  # fmt: skip
    copy = copies.unpack(archive_of(tmp_path / "x.tar", members))
    assert [os.readlink(copy / name) for name in "abc"] == ["y", "x", "z"]
    assert (copy / "d").read_bytes() == b"file" and not (tmp_path / "out").exists()
    assert UnpackedArchive.of(tmp_path / "x.tar").is_whole(copy)


def test_a_changed_archive_has_another_copy(copies: LocalCopies, tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "environment.tar", ENVIRONMENT)
    first = copies.unpack(archive)
    archive_of(archive, [member("a.py", b"a = 2")])
    second = copies.unpack(archive)
    assert (second / "a.py").read_bytes() == b"a = 2" and (first / "lib/a.py").read_bytes() == b"a = 1"


def test_the_last_of_two_members_of_one_name_counts(copies: LocalCopies, tmp_path: Path) -> None:
    twice = [member("a", b"first"), member("b", kind=tarfile.LNKTYPE, linkname="a"), member("a", b"2nd")]
    copy = copies.unpack(archive_of(tmp_path / "x.tar", twice))
    assert ((copy / "a").read_bytes(), (copy / "b").read_bytes()) == (b"2nd", b"first")


@pytest.mark.parametrize(
    "hostile",
    [
        [member("../out", b"x")],
        [member("a/../../out", b"x")],
        [member("/OUT", b"x")],
        [member("link", kind=tarfile.SYMTYPE, linkname="OUT"), member("link/out", b"x")],
        [member("hard", kind=tarfile.LNKTYPE, linkname="OUT/secret")],
        [member("hard", kind=tarfile.LNKTYPE, linkname="../../../../secret")],
        [
            member("link", kind=tarfile.SYMTYPE, linkname="OUT"),
            member("link/out", kind=tarfile.SYMTYPE, linkname="/x"),
        ],
        [
            member("link", kind=tarfile.SYMTYPE, linkname="OUT"),
            member("link/out/deep", kind=tarfile.SYMTYPE, linkname="/x"),
        ],
        [member("late", b"x", mtime=1 << 70)],
        [member("pipe", kind=tarfile.FIFOTYPE)],
        [member("null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3)],
        [member(LIST, b'{"a": 1}'), member("a", b"x")],
    ],
)  # fmt: skip
def test_what_leads_out_of_an_archive_is_refused(
    copies: LocalCopies, tmp_path: Path, hostile: list[tuple]
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    for info, _ in hostile:
        info.name = info.name.replace("OUT", str(tmp_path / "out"))
        info.linkname = info.linkname.replace("OUT", str(tmp_path))
    archive = archive_of(tmp_path / "x.tar", [member("first", b"1"), *hostile])
    with pytest.raises(OSError):
        copies.unpack(archive)
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "x.tar", "disk"}
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.name == "first"], "nothing stays"


@pytest.mark.parametrize(("mode", "step"), [("w", 256), ("w:gz", 5), ("w:bz2", 41), ("w:xz", 41)])
def test_an_archive_that_is_cut_anywhere_is_refused(tmp_path: Path, mode: str, step: int) -> None:
    """But where only the zeros at its end are missing, or what a compression adds to them."""
    whole = archive_of(tmp_path / "x.tar", ENVIRONMENT, mode).read_bytes()
    used = sum(info.size + 511 & ~511 for info, _ in ENVIRONMENT) + 512 * len(ENVIRONMENT)
    num_refused, lengths = 0, range(0, len(whole), step)
    for length in lengths:
        (tmp_path / "cut.tar").write_bytes(whole[:length])
        cut, copy = UnpackedArchive.of(tmp_path / "cut.tar"), tmp_path / f"copy{length}"
        try:
            cut.write(copy, lambda: False)
        except OSError as error:
            assert "not a whole tar archive" in str(error)
            num_refused += 1
        else:
            assert mode != "w" or length > used
            assert len([path for path in copy.rglob("*") if path.name != LIST]) == len(ENVIRONMENT) + 2
    assert num_refused > len(lengths) * (0.25 if mode == "w" else 0.8)


@pytest.mark.parametrize("seed", range(30))
def test_damaged_archives_write_nothing_beside_the_copy(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    data = bytearray(archive_of(tmp_path / "x.tar", ENVIRONMENT).read_bytes())
    for _ in range(draw.randint(1, 20)):
        block = draw.randrange(len(ENVIRONMENT)) * 512
        data[block + draw.randrange(512)] = draw.choice([0, 0x2F, 0x2E, 0x37, 0xFF, draw.randrange(256)])
    (tmp_path / "x.tar").write_bytes(data)
    copy = tmp_path / "disk" / "copy"
    copy.parent.mkdir()
    try:
        UnpackedArchive.of(tmp_path / "x.tar").write(copy, lambda: False)
    except OSError:
        pass
    else:
        assert UnpackedArchive.of(tmp_path / "x.tar").is_whole(copy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "x.tar"]
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_unpacking_ends_when_nobody_waits_for_it(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "x.tar", ENVIRONMENT)
    looks = iter(range(100))
    with pytest.raises(GivenUp):
        UnpackedArchive.of(archive).write(tmp_path / "copy", lambda: next(looks) > 4)
    assert not (tmp_path / "copy" / LIST).exists()


def test_an_archive_that_changes_while_it_is_unpacked_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "x.tar", ENVIRONMENT)

    def touching() -> bool:
        os.utime(archive, (1, 1))
        return False

    with pytest.raises(OSError, match="changed while it was unpacked"):
        UnpackedArchive.of(archive).write(tmp_path / "copy", touching)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None])
def test_what_is_no_file_is_refused(
    copies: LocalCopies, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "x.tar")
    with pytest.raises(OSError, match=r"not a file|No such file"):
        copies.unpack(tmp_path / "x.tar")
