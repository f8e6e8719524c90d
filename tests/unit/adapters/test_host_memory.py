"""Available host memory, from made-up files of the kernel."""

from pathlib import Path

import pytest

from yatt.adapters.machine.host_memory import available_bytes, used_bytes, weights_bytes

MIB = 1 << 20


def kernel(folder: Path, available_mib: int, own: str) -> dict[str, Path]:
    (folder / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available_mib << 10} kB\n")
    (folder / "own").write_text(own)
    return {"meminfo": folder / "meminfo", "cgroups": folder / "cg", "own": folder / "own"}


def group(folder: Path, names: tuple[str, str], limit: str, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_the_tightest_group_around_this_process_counts(tmp_path: Path):
    files = kernel(tmp_path, 1000, "0::/slurm/job/step\n")
    assert available_bytes(**files) == 1000 * MIB, "no groups at all"
    group(
        tmp_path / "cg/slurm/job", V2, str(600 * MIB), 500 * MIB, "anon 1\nactive_file 0\ninactive_file 0\n"
    )
    group(tmp_path / "cg/slurm/job/step", V2, "max", 400 * MIB, "anon 1\n")
    assert available_bytes(**files) == 100 * MIB


def test_page_cache_counts_as_available(tmp_path: Path):
    files = kernel(tmp_path, 1000, "0::/job\n")
    stat = f"anon {10 * MIB}\ninactive_file {300 * MIB}\nactive_file {20 * MIB}\n"
    group(tmp_path / "cg/job", V2, str(600 * MIB), 580 * MIB, stat)
    assert available_bytes(**files) == 340 * MIB


def test_groups_of_version_1(tmp_path: Path):
    files = kernel(tmp_path, 1000, "5:cpu:/other\n4:memory:/job\n")
    stat = f"inactive_file 1\ntotal_inactive_file {50 * MIB}\ntotal_active_file 0\n"
    group(tmp_path / "cg/memory/job", V1, str(200 * MIB), 100 * MIB, stat)
    assert available_bytes(**files) == 150 * MIB


@pytest.mark.parametrize("own", ["", "nonsense", "0::", "1:memory\n", "0::/../..\n"])
def test_damaged_files_leave_what_the_machine_says(tmp_path: Path, own: str):
    files = kernel(tmp_path, 7, own)
    assert available_bytes(**files) == 7 * MIB
    group(tmp_path / "cg", V2, "many", 3, "")
    assert available_bytes(**files) == 7 * MIB


def test_this_machine_has_some():
    assert available_bytes() > 0


def test_weights_are_the_safetensors_files(tmp_path: Path):
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    (tmp_path / "b.safetensors").write_bytes(b"123")
    (tmp_path / "config.json").write_text("{}")
    assert weights_bytes(str(tmp_path)) == 8
    with pytest.raises(OSError):
        weights_bytes(str(tmp_path / "missing"))


def test_what_is_not_available_is_in_use(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\n")
    assert used_bytes(meminfo) == 600 << 10
