"""Host memory of exactly the size asked for, that goes with its last user and is not inherited by forked children."""

import ctypes
import errno
import gc
import mmap
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_offload.device import arena
from fsdp_offload.device.arena import Region
from fsdp_offload.device.host_limits import cores_of_rank
from tests.forks import in_forked_child, resident_bytes

MIB = 1 << 20
CPU = torch.device("cpu")


def take(nbytes: int, **options: Any) -> Region:
    return Region(nbytes, device=CPU, pin=False, **options)


def mapping_of(address: int) -> dict[str, str] | None:
    """What the kernel says about the mapping that holds ``address``; ``None`` if there is none."""
    heads = re.split(r"^([0-9a-f]+)-([0-9a-f]+) .*\n", Path("/proc/self/smaps").read_text(), flags=re.M)[1:]
    for begin, end, lines in zip(heads[::3], heads[1::3], heads[2::3], strict=True):
        if int(begin, 16) <= address < int(end, 16):
            return dict(re.findall(r"^(\w+): *(.*)$", lines, re.M))
    return None


# Size ----------------------------------------------------------------------------------------------------------------


def test_it_takes_what_was_asked_for_and_no_power_of_two() -> None:
    nbytes = 33 * MIB
    before = resident_bytes()
    region = take(nbytes)
    assert (region.nbytes, region.bytes.numel(), region.pinned) == (nbytes, nbytes, False)
    assert resident_bytes() - before == pytest.approx(nbytes, rel=0.05)


def test_nothing_is_a_region_too() -> None:
    region = take(0)
    assert region.bytes.shape == (0,)
    assert region.range(0, 0, torch.float32, (0, 5), (5, 1)).shape == (0, 5)


# Ranges --------------------------------------------------------------------------------------------------------------


def test_each_range_has_a_storage_of_its_own_of_exactly_its_size() -> None:
    region = take(4096)
    for offset, dtype, shape, stride in [
        (0, torch.float32, (16, 4), (4, 1)),
        (256, torch.bfloat16, (3, 5), (5, 1)),
        (320, torch.float64, (4, 6), (1, 4)),  # transposed
        (512, torch.int64, (), ()),
        (576, torch.complex64, (7,), (1,)),
        (704, torch.float8_e4m3fn, (7,), (1,)),
    ]:
        numel = torch.Size(shape).numel()
        value = region.range(offset, numel * dtype.itemsize, dtype, shape, stride)
        assert (value.shape, value.stride(), value.dtype) == (shape, stride, dtype)
        assert value.storage_offset() == 0
        assert value.untyped_storage().nbytes() == numel * dtype.itemsize
        assert value.data_ptr() == region.bytes.data_ptr() + offset


def test_ranges_are_the_region_itself_which_is_zero_at_first(tmp_path: Path) -> None:
    region = take(4 * MIB)
    assert not region.bytes.any()
    value = region.range(MIB, 4096, torch.float32, (1024,), (1,))
    value.copy_(torch.arange(1024.0))
    assert torch.equal(region.bytes[MIB : MIB + 4096].view(torch.float32), torch.arange(1024.0))
    region.bytes.fill_(7)
    assert (value.view(torch.uint8) == 7).all()
    torch.save(value, tmp_path / "range.pt")
    assert (tmp_path / "range.pt").stat().st_size < 16_384, "the whole region has been saved"


# Lifetime ------------------------------------------------------------------------------------------------------------


def test_memory_goes_with_the_last_tensor_and_not_before() -> None:
    nbytes = 32 * MIB
    before = resident_bytes()
    region = take(nbytes)
    address = region.bytes.data_ptr()
    value = region.range(0, 4096, torch.float32, (1024,), (1,))
    view = value[10:20]
    del region, value
    assert mapping_of(address) is not None
    view.fill_(3)
    del view
    assert mapping_of(address) is None
    assert resident_bytes() - before < nbytes / 4


# Fork ----------------------------------------------------------------------------------------------------------------


def test_a_forked_child_does_not_have_it() -> None:
    region = take(MIB)
    address = region.bytes.data_ptr()
    assert in_forked_child(lambda: mapping_of(address) is None) == 0
    assert mapping_of(address) is not None


def test_a_forked_child_that_drops_it_keeps_what_it_has_put_there() -> None:
    regions = [take(64 * MIB)]
    address = regions[0].bytes.data_ptr()

    def drop() -> bool:
        fixed = 0x10  # MAP_FIXED: where else the kernel would put it depends on what it finds
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
        map_there = ctypes.CDLL(None, use_errno=True).mmap
        map_there.restype = ctypes.c_void_p
        map_there.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        mine = map_there(address, MIB, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        ctypes.memset(mine, 7, MIB)
        regions.clear()
        gc.collect()
        return mine == address and ctypes.string_at(mine, MIB) == bytes([7]) * MIB

    assert in_forked_child(drop) == 0
    assert not regions[0].bytes.any()


# Touch ---------------------------------------------------------------------------------------------------------------


def pieces(*sizes: int, margin: int = 0) -> tuple[bytearray, list[tuple[int, int]]]:
    """Memory full of ones, and where each of these pieces of it begins."""
    content = bytearray(b"\xff" * (sum(sizes) + 2 * margin))
    begin = ctypes.addressof((ctypes.c_ubyte * len(content)).from_buffer(content)) + margin
    return content, [(begin + sum(sizes[:number]), size) for number, size in enumerate(sizes)]


def test_every_byte_is_touched_and_none_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_TOUCH_CHUNK_BYTES", 8192)
    content, places = pieces(5 * 8192 + 100, 8192, 1, 0, 8191, margin=64)
    arena._touch_and_lock(places, arena._clear, None, {})
    assert content == b"\xff" * 64 + b"\0" * (len(content) - 128) + b"\xff" * 64


def test_a_piece_is_locked_once_all_of_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_TOUCH_CHUNK_BYTES", 8192)
    _content, places = pieces(5 * 8192 + 100, 8192, 300)
    errors: dict[int, int] = {}
    are_set = lambda address, nbytes: int(any(ctypes.string_at(address, nbytes)))  # noqa: E731
    arena._touch_and_lock(places, arena._clear, are_set, errors)
    assert errors == dict.fromkeys(dict(places), 0)


@pytest.mark.parametrize("advice", [arena._MADV_POPULATE_WRITE, 9999])
def test_a_file_has_all_its_pages_and_keeps_what_they_hold(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    """Also on a kernel that does not know the advice."""
    monkeypatch.setattr(arena, "_TOUCH_CHUNK_BYTES", 8192)
    monkeypatch.setattr(arena, "_MADV_POPULATE_WRITE", advice)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(b"\xff" * 100)
        file.truncate(5 * 8192 + 4096)
        region = take(5 * 8192 + 4096, breaks=[8192], file=file.fileno())
        assert os.fstat(file.fileno()).st_blocks * 512 >= region.nbytes
        assert region.bytes[:100].eq(255).all()
        assert not region.bytes[100:].any()


def test_a_page_for_which_there_is_no_room_is_an_error() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(8192)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping := mmap.mmap(file.fileno(), 8192)))
        file.truncate(4096)  # a write behind that would be a SIGBUS, as in a full file system
        with pytest.raises(OSError, match="MADV_POPULATE_WRITE") as raised:
            arena._populate(file.fileno(), address, address, len(mapping))
        assert raised.value.errno == errno.ENOSPC


def test_every_page_exists_before_the_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_TOUCH_CHUNK_BYTES", MIB)
    region = take(5 * MIB + 4096)
    mapping = mapping_of(region.bytes.data_ptr()) or {}
    # The kernel may have put a neighbour into the same mapping.
    assert int(mapping["Rss"].split()[0]) * 1024 >= 5 * MIB + 4096


def test_cores_are_shared_among_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cores_of_rank() == 12
    for ranks, cores in (("4", 3), ("8", 1), ("99", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert cores_of_rank() == cores


# Driver --------------------------------------------------------------------------------------------------------------


class FakeDriver:
    """What of ``torch.cuda`` registering needs."""

    def __init__(self) -> None:
        self.error = 0
        self.calls: list[tuple[object, ...]] = []

    def cudart(self) -> "FakeDriver":
        return self

    def device(self, device: torch.device) -> object:
        return warnings.catch_warnings()  # any context manager

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(("synchronize",))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", address, nbytes))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister", address, mapping_of(address) is not None))
        return self.error


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(torch, "cuda", made)
    return made


def pinned(nbytes: int, **more: Any) -> Region:
    return Region(nbytes, device=torch.device("cuda"), pin=True, **more)


def test_memory_is_registered_with_its_exact_size_and_unregistered_before_it_goes(driver: FakeDriver) -> None:
    region = pinned(5 * mmap.PAGESIZE + 100)
    address = region.bytes.data_ptr()
    assert region.pinned
    assert driver.calls == [("register", address, 5 * mmap.PAGESIZE + 100)]
    del region
    assert driver.calls[1:] == [("synchronize",), ("unregister", address, True)]


def test_pieces_are_registered_apart(driver: FakeDriver) -> None:
    page = mmap.PAGESIZE
    region = pinned(3 * page + 100, breaks=[page, 3 * page])
    address = region.bytes.data_ptr()
    expected = [(address, page), (address + page, 2 * page), (address + 3 * page, 100)]
    assert sorted(driver.calls) == [("register", *piece) for piece in expected]
    del region
    unregistered = sorted(call[1:] for call in driver.calls if call[0] == "unregister")
    assert unregistered == [(begin, True) for begin, _ in expected]


def test_a_driver_that_refuses_says_what_to_do_and_nothing_is_kept(driver: FakeDriver) -> None:
    driver.error = 2
    with pytest.raises(RuntimeError, match="refused to page-lock 12345 bytes") as error:
        pinned(12_345)
    assert "ulimit -l" in str(error.value)
    assert "pin_memory=False" in str(error.value)
    assert [call[0] for call in driver.calls] == ["register"]


def test_a_forked_child_never_calls_the_driver(driver: FakeDriver) -> None:
    regions = [pinned(4096)]

    def drop() -> bool:
        regions.clear()
        return [call[0] for call in driver.calls] == ["register"]

    assert in_forked_child(drop) == 0
