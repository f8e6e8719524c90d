"""Damages that files meet in practice: crashes, full disks, lost blocks, other people's editors."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def truncated(path: Path) -> None:
    data = _content(path)
    path.write_bytes(data[: max(0, len(data) - 7)])


def nul_block(path: Path) -> None:
    data = _content(path)
    middle = len(data) // 2
    path.write_bytes(data[:middle] + b"\0" * 4096 + data[middle:])


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\xff\n" + _content(path) + b"\xff" * 100 + b"\n")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage_line(path: Path) -> None:
    path.write_bytes(_content(path) + b'{"kind": "attempt.end", "attempt": "x"\n"}\n' + b"[" * 50_000 + b"\n")


def other_json(path: Path) -> None:
    lines = (
        '[]', '7', '"x"', 'null', '{}', '{"training/global_step": "x"}', '{"training/global_step": true}',
        '{"training/global_step": 1, "critic/rewards/mean": "high", "timing_s/step": []}',
        '{"training/global_step": 9, "perf/throughput": 1' + "0" * 400 + ', "timing_s/step": 1}',
        '{"training/global_step": 1' + "0" * 400 + '}',
        '{"training/global_step": 1, "reward": 1' + "0" * 400 + '}',
        '{"kind": "ckpt.commit", "attempt": 1, "wall": "2026-01-01T00:00:00", "iteration": 1, "size_bytes": 1'
        + "0" * 400 + '}',
        '{"training/global_step": 9, "critic/rewards/mean": 0.5}',
        '{"training/global_step": 1, "scores": 7, "verdicts": []}',
        '{"training/global_step": 1, "reward": "x", "scores": {"a": "b"}}',
        '{"kind": 5, "attempt": 1, "wall": "2026-01-01T00:00:00"}',
        '{"kind": "attempt.start", "attempt": 1, "wall": "2026-01-01T00:00:00", "nodes": "two"}',
        '{"kind": "attempt.end", "attempt": 1, "wall": "no time", "exit_code": 0, "reason": ""}',
        '{"kind": "phase.begin", "attempt": 1, "wall": "2026-01-01T00:00:00", "t": "x", "phase": []}',
        '{"kind": "lease.grant", "attempt": 1, "wall": "2026-01-01T00:00:00", "slab": 5}',
        '{"kind": "ckpt.commit", "attempt": 1, "wall": "0001-01-01T00:00:00", "iteration": 1, "size_bytes": 1}',  # noqa: E501
    )  # fmt: skip
    path.write_bytes(_content(path) + "".join(f"{line}\n" for line in lines).encode())


def a_folder(path: Path) -> None:
    _remove(path)
    path.mkdir()
    (path / "inside").write_text("x")


def a_fifo(path: Path) -> None:
    _remove(path)
    os.mkfifo(path)


def removed(path: Path) -> None:
    _remove(path)


DAMAGES: tuple[Callable[[Path], None], ...] = (
    truncated, nul_block, not_text, empty, garbage_line, other_json, a_folder, a_fifo, removed,
)  # fmt: skip
