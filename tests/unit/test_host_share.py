"""Which parameters are the host's, and which share both sides can end together with: arithmetic on sizes and rates."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.cpu_update.cores import cache_bytes, cores_of_pci, parse_cores, parse_size
from fsdp_offload.planning.cpu_share import (
    NOTHING_YET,
    Rates,
    Taken,
    Traffic,
    best_fraction,
    choose_host_share,
    step_seconds,
)

SIZES = st.lists(st.integers(0, 10_000), max_size=30)
FRACTIONS = st.floats(0, 1)
ADAM = Traffic(down=0.5, up=0.5)  # fp32: gradient down, parameter up, for 8 bytes of state


def names(sizes: list[int], fraction: float, taken: Taken = NOTHING_YET) -> list[int]:
    return [index for index, on_host in enumerate(choose_host_share(sizes, fraction, taken)) if on_host]


def test_taken_from_the_end() -> None:
    assert names([10, 10, 10, 10], 0.5) == [2, 3]
    assert names([10, 10, 10, 10], 0.0) == []
    assert names([10, 10, 10, 10], 1.0) == [0, 1, 2, 3]


def test_what_is_too_large_is_passed_over() -> None:
    assert names([10, 10, 80], 0.2) == [0, 1]
    assert names([30, 10, 60], 0.4) == [0, 1]


def test_one_more_where_that_is_nearer() -> None:
    assert names([50, 50], 0.3) == [1]
    assert names([50, 50], 0.2) == []


def test_without_state_there_is_nothing_to_update() -> None:
    assert names([0, 10, 0], 1.0) == [1]


def test_what_is_added_later_counts_with_what_was_there() -> None:
    assert names([10, 10], 0.5, Taken(host_bytes=20, total_bytes=20)) == []
    assert names([10, 10], 0.5, Taken(host_bytes=0, total_bytes=20)) == [0, 1]


@given(sizes=SIZES, fraction=FRACTIONS)
def test_as_near_as_one_parameter_allows(sizes: list[int], fraction: float) -> None:
    chosen = choose_host_share(sizes, fraction, NOTHING_YET)
    share = sum(size for size, on_host in zip(sizes, chosen, strict=True) if on_host)
    left_out = [size for size, on_host in zip(sizes, chosen, strict=True) if size and not on_host]
    wanted = round(fraction * sum(sizes))
    assert share - wanted <= max(sizes, default=0) / 2
    assert not left_out or wanted - share <= min(left_out) / 2
    assert chosen == choose_host_share(list(sizes), fraction, NOTHING_YET)


def rates(cpu: float, two_way: float) -> Rates:
    return Rates(cpu=cpu, cpu_beside=cpu, one_way=two_way / 2, two_way=two_way, two_way_beside=two_way)


def seconds(fraction: float, of: Rates, traffic: Traffic = ADAM) -> float:
    return step_seconds(fraction, 10**9, of, traffic)


@given(cpu=st.floats(1e9, 1e12), ratio=st.floats(0.01, 100), down=st.floats(0.1, 2), up=st.floats(0.1, 2))
def test_never_slower_than_the_better_side(cpu: float, ratio: float, down: float, up: float) -> None:
    of, traffic = rates(cpu, cpu * ratio), Traffic(down, up)
    best = best_fraction(of, traffic)
    either = min(seconds(0.0, of, traffic), seconds(1.0, of, traffic))
    assert seconds(best, of, traffic) < 0.95 * either or (
        best in (0.0, 1.0) and seconds(best, of, traffic) < 1.2 * either
    )


@given(cpu=st.floats(1e9, 1e12), ratio=st.floats(0.75, 4))
def test_a_split_is_worth_it_where_sides_are_alike(cpu: float, ratio: float) -> None:
    """For Adam in fp32, where they do not disturb each other. A slower link has too much to do for the host as well."""
    of = rates(cpu, 2 * cpu * ratio)
    assert seconds(best_fraction(of, ADAM), of) < 0.95 * min(seconds(0.0, of), seconds(1.0, of))


def test_as_measured_on_a_machine() -> None:
    """An H200's host: 8.4 GB of state took 173 ms through the device, 222 ms in the kernel."""
    of = Rates(cpu=38e9, cpu_beside=28e9, one_way=55e9, two_way=97e9, two_way_beside=85e9)
    assert 0.4 < best_fraction(of, ADAM) < 0.6


def test_what_is_not_clear_stays_with_the_device() -> None:
    """The CPU's rate varies by more than this difference."""
    of = Rates(cpu=52e9, cpu_beside=20e9, one_way=50e9, two_way=100e9, two_way_beside=50e9)
    assert best_fraction(of, ADAM) == 0.0


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_the_slower_side_goes_on_alone(fraction: float) -> None:
    of = Rates(cpu=20e9, cpu_beside=10e9, one_way=20e9, two_way=40e9, two_way_beside=40e9)
    traffic = Traffic(down=0.0, up=0.0)
    link, cpu = (1 - fraction) / 20, fraction / 10  # seconds for 10**9 bytes, both at work
    expected = link if link > cpu else link + (cpu - link) / 2
    assert seconds(fraction, of, traffic) == pytest.approx(expected)


@pytest.mark.parametrize("ratio", [0.5, 1, 2, 4])
def test_both_sides_end_together(ratio: float) -> None:
    """The link's share of state goes both ways, so it streams half of ``two_way`` bytes of state a second."""
    of = rates(cpu=20e9, two_way=2 * 20e9 * ratio)
    traffic = Traffic(down=0.25, up=0.25)
    best = best_fraction(of, traffic)
    assert 0 < best < 1
    assert seconds(best, of, traffic) < 0.95 * min(seconds(0.0, of, traffic), seconds(1.0, of, traffic))
    link = (1 - best + best * traffic.down) * 10**9 / (20e9 * ratio)
    assert link == pytest.approx(best * 10**9 / 20e9, rel=0.1)


def test_sides_that_disturb_each_other_are_not_used_together() -> None:
    of = Rates(cpu=20e9, cpu_beside=8e9, one_way=20e9, two_way=40e9, two_way_beside=20e9)
    assert best_fraction(of, ADAM) in (0.0, 1.0)


def test_cores_as_the_kernel_lists_them() -> None:
    assert parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cores("\n") == frozenset()


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_bytes(tmp_path) == 0
    for core, (level, size, shared) in enumerate([("3", "300M", "0-1"), ("3", "300M", "0-1"), ("3", "512K", "2")]):
        for index, what in {"index0": ("1", "48K", str(core)), "index3": (level, size, shared)}.items():
            folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/{index}"
            folder.mkdir(parents=True)
            for name, text in zip(("level", "size", "shared_cpu_list"), what, strict=True):
                (folder / name).write_text(text + "\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert cache_bytes(tmp_path) == (300 << 20) + (512 << 10)
    assert parse_size("7") == 7


def test_cores_of_a_device(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    node = tmp_path / "sys/devices/system/node/node1"
    for folder in (device, node):
        folder.mkdir(parents=True)
    (node / "cpulist").write_text("4-7\n")
    (device / "numa_node").write_text("1\n")
    assert cores_of_pci("0000:17:00.0", tmp_path) == {4, 5, 6, 7}
    (device / "numa_node").write_text("-1\n")  # a virtual machine
    assert cores_of_pci("0000:17:00.0", tmp_path) == frozenset()
    assert cores_of_pci("0000:18:00.0", tmp_path) == frozenset()
