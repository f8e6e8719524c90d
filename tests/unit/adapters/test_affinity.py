"""Lists of CPUs as the kernel writes them."""

import pytest
from hypothesis import given, strategies as st

from yatt.adapters.machine.affinity import cpus_near, cpus_text, parse_cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", set()), ("\n", set()), ("0", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,64-65,9\n", {0, 1, 9, 64, 65})],
)
def test_lists_are_read(text, cpus):
    assert parse_cpus(text) == cpus


@given(st.frozensets(st.integers(0, 4096)))
def test_what_is_shown_is_read_back(cpus):
    assert parse_cpus(cpus_text(cpus)) == cpus


def test_a_device_of_which_the_kernel_says_nothing_is_near_no_cpu(tmp_path):
    device = tmp_path / "bus/pci/devices/0000:65:00.0"
    device.mkdir(parents=True)
    assert cpus_near("0000:65:00.0", tmp_path) == frozenset()
    (device / "local_cpulist").write_text("not a list")
    assert cpus_near("0000:65:00.0", tmp_path) == frozenset()
    (device / "local_cpulist").write_text("8-9\n")
    assert cpus_near("0000:65:00.0", tmp_path) == {8, 9}
