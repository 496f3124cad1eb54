"""Measures how fast this machine copies between pinned host memory and the device, and how fast it pins."""

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import torch
import typer
from torch import Tensor

from fsdp_offload.device.arena import BREAK_BYTES, Region
from fsdp_offload.device.lanes import PIECE_BYTES, Lane, TurnsLane

from .record import bench_device, median, print_record, run, wall_ms

_CHUNK_BYTES = 64 << 20
_SMALL_BYTES = 64 << 10
_SMALL_COPIES = 12
_SLEEP_CYCLES = 2_000_000  # about 1 ms of the GPU's clock


def measure(
    gib: Annotated[float, typer.Option(help="GiB to copy each way for one figure.")] = 4.0,
    repeats: Annotated[int, typer.Option(help="Measurements of each figure; medians are printed.")] = 7,
) -> None:
    """Measure the one-way and two-way bandwidth of pinned copies, and how fast memory is pinned and first touched."""
    device = bench_device()
    chunks = max(1, int(gib * (1 << 30)) // _CHUNK_BYTES)
    link = Link(device)
    one_way = {name: [link.gb_per_s(chunks, **{name: True}) for _ in range(repeats)] for name in ("load", "store")}
    both = [link.gb_per_s(chunks, load=True, store=True) for _ in range(repeats)]
    print_record(
        "link",
        load_gb_per_s=median(one_way["load"]),
        store_gb_per_s=median(one_way["store"]),
        two_way_gb_per_s=median(both),
        two_way_best_gb_per_s=max(both),
        chunk_bytes=_CHUNK_BYTES,
    )
    _small_copies(device, link, chunks)
    _pinning(int(gib * (1 << 30)), device, repeats)


def _small_copies(device: torch.device, link: "Link", chunks: int) -> None:
    """Measure how long a small copy to the device waits during large loads in our lanes."""
    state, parameters = (TurnsLane(device, PIECE_BYTES, name=name) for name in ("state", "parameters"))
    lanes: dict[str, tuple[Lane, ...]] = {
        "one_stream": (Lane(device, torch.Stream(device)),),
        "taking_turns": (state,),
        "two_taking_turns": (parameters, state),
    }
    for name, used in lanes.items():
        waits_ms, gb_per_s = link.among_small_copies(used, chunks)
        print_record(
            "small-copies",
            loads=name,
            load_gb_per_s=gb_per_s,
            median_wait_ms=median(waits_ms),
            longest_wait_ms=max(waits_ms),
            small_bytes=_SMALL_BYTES,
        )


class Link:
    """Copies fixed chunks through two device buffers for each direction, as an ideal offload would."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hosts = [Region(_CHUNK_BYTES, device=device, pin=True) for _ in range(4)]
        self._slots = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(4)]
        self._streams = (torch.Stream(device), torch.Stream(device))

    def gb_per_s(self, chunks: int, *, load: bool = False, store: bool = False) -> float:
        """Copy ``chunks`` chunks each way; return 10**9 bytes per second, both directions added."""

        def copy() -> None:
            for chunk in range(chunks):
                if load:
                    self._copy(self._slots[chunk % 2], self._hosts[chunk % 2].bytes, self._streams[0])
                if store:
                    self._copy(self._hosts[2 + chunk % 2].bytes, self._slots[2 + chunk % 2], self._streams[1])

        (ms,) = wall_ms(copy, self._device, repeats=1)
        return chunks * _CHUNK_BYTES * (load + store) / ms / 1e6

    def among_small_copies(self, lanes: Sequence[Lane], chunks: int) -> tuple[list[float], float]:
        """Return the milliseconds from issue to end of each small copy, and the GB/s of the loads in ``lanes``."""
        small_host = torch.empty(_SMALL_BYTES, dtype=torch.uint8, pin_memory=True)
        small = torch.empty(_SMALL_BYTES, dtype=torch.uint8, device=self._device)
        stream = torch.Stream(self._device)
        events = [[torch.Event(self._device, enable_timing=True) for _ in range(2)] for _ in range(_SMALL_COPIES)]
        torch.accelerator.synchronize(self._device)
        begin = lanes[-1].mark(timed=True)
        for lane in lanes:
            for chunk in range(chunks // len(lanes)):
                lane.copy([(self._slots[chunk % 2], self._hosts[chunk % 2].bytes)])
        for lane in lanes[:-1]:
            lanes[-1].wait(lane.mark())
        end = lanes[-1].mark(timed=True)
        with stream:
            for asked, ended in events:
                torch.cuda._sleep(_SLEEP_CYCLES)  # spread the small copies over the time of the loads
                stream.record_event(asked)
                small.copy_(small_host, non_blocking=True)
                stream.record_event(ended)
        torch.accelerator.synchronize(self._device)
        rate = chunks // len(lanes) * len(lanes) * _CHUNK_BYTES / end.elapsed_ms_since(begin) / 1e6
        return [asked.elapsed_time(ended) for asked, ended in events], rate

    @staticmethod
    def _copy(target: Tensor, source: Tensor, stream: torch.Stream) -> None:
        with stream:
            target.copy_(source, non_blocking=True)


def _pinning(nbytes: int, device: torch.device, repeats: int) -> None:
    seconds: dict[str, list[float]] = {"pin": [], "touch": [], "touch_huge": []}
    for _ in range(repeats):  # interleave the three, so that all run under the same conditions
        seconds["touch"].append(_first_touch_seconds(nbytes, mmap.MADV_NORMAL))
        seconds["touch_huge"].append(_first_touch_seconds(nbytes, mmap.MADV_HUGEPAGE))
        begin = time.perf_counter()
        region = Region(nbytes, device=device, pin=True, breaks=range(BREAK_BYTES, nbytes, BREAK_BYTES))
        seconds["pin"].append(time.perf_counter() - begin)
        del region
    rate = {name: nbytes / median(values) / 1e9 for name, values in seconds.items()}
    print_record(
        "pin",
        nbytes=nbytes,
        pin_gb_per_s=rate["pin"],
        first_touch_gb_per_s=rate["touch"],
        share_of_first_touch=rate["pin"] / rate["touch"],
        huge_page_first_touch_gb_per_s=rate["touch_huge"],
        share_of_huge_page_first_touch=rate["pin"] / rate["touch_huge"],
    )


def _first_touch_seconds(nbytes: int, advice: int, chunk_bytes: int = 32 << 20) -> float:
    """Return the seconds to write each page of new memory once, with one thread per core; nothing is pinned."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(advice)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for start in range(0, nbytes, chunk_bytes):
            pool.submit(ctypes.memset, address + start, 1, min(chunk_bytes, nbytes - start))
    return time.perf_counter() - begin


def main(argv: Sequence[str]) -> None:
    """Measure with the options of ``argv``."""
    run(measure, argv)
