"""Which parameters are the host's, and which share both sides can end together with: arithmetic on sizes and rates."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.core.packing import choose_host_share
from fsdp_offload.cpu_update import cores_of_pci

SIZES = st.lists(st.integers(0, 10_000), max_size=30)
FRACTIONS = st.floats(0, 1)


@pytest.mark.parametrize(
    ("sizes", "fraction", "taken", "chosen"),
    [
        *(([10] * 4, fraction, (), chosen) for fraction, chosen in ((0.5, [2, 3]), (0.0, []), (1.0, [0, 1, 2, 3]))),
        ([0, 10, 0], 1.0, (), [1]),  # without state there is nothing to update
        ([10, 10], 0.5, (20, 20), []),  # what is added later counts with what was there
        ([10, 10], 0.5, (20, 0), [0, 1]),
    ],
)
def test_taken_from_the_end(sizes: list[int], fraction: float, taken: tuple[int, ...], chosen: list[int]) -> None:
    assert [at for at, on_host in enumerate(choose_host_share(sizes, fraction, *taken)) if on_host] == chosen


@given(sizes=SIZES, fraction=FRACTIONS)
def test_as_near_as_one_parameter_allows(sizes: list[int], fraction: float) -> None:
    chosen = choose_host_share(sizes, fraction)
    share = sum(size for size, on_host in zip(sizes, chosen, strict=True) if on_host)
    left_out = [size for size, on_host in zip(sizes, chosen, strict=True) if size and not on_host]
    wanted = round(fraction * sum(sizes))
    assert share - wanted <= max(sizes, default=0) / 2
    assert not left_out or wanted - share <= min(left_out) / 2
    assert chosen == choose_host_share(list(sizes), fraction)


def test_cores_of_a_device(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    node = tmp_path / "sys/devices/system/node/node1"
    for folder in (device, node):
        folder.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    for listed, cores in (("4-7\n", {4, 5, 6, 7}), ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("\n", set())):
        (node / "cpulist").write_text(listed)
        assert cores_of_pci("0000:17:00.0", tmp_path) == cores
    (device / "numa_node").write_text("-1\n")  # a virtual machine
    assert cores_of_pci("0000:17:00.0", tmp_path) == frozenset()
    assert cores_of_pci("0000:18:00.0", tmp_path) == frozenset()
