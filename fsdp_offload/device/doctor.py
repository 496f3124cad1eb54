"""The command ``fsdp-offload doctor``: facts about the machine for a bug report, one per line.

Without a GPU it says so and prints the rest. With one, it initialises CUDA and copies 1 GiB each way.
"""

import itertools
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from .arena import Region
from .copy_queues import VARIABLE
from .host_limits import host_memory

_COPIED_BYTES = 1 << 30


def main(version: str, *, as_json: bool = False) -> None:
    found = itertools.chain([("fsdp_offload", version)], facts())
    if as_json:
        if sys.stderr.isatty():
            sys.stderr.write("measuring ...\n")
        sys.stdout.write(f"{json.dumps(dict(found), indent=1, ensure_ascii=False)}\n")
        return
    for name, value in found:  # each as soon as it is known: the link takes seconds
        sys.stdout.write(f"{name:32} {value}\n")
        sys.stdout.flush()


def facts() -> Iterator[tuple[str, str]]:
    """Yield names and values: versions, limits of host memory, devices, the link of the current device."""
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, Python {platform.python_version()}"
    yield "system", f"{platform.platform()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    memory, locked = host_memory(), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit, free = (f"{nbytes / 1e9:.1f} GB" for nbytes in (memory.total_bytes, memory.available_bytes))
    yield "host memory", f"{limit} is the limit of machine and container, {free} free"
    enough = locked == resource.RLIM_INFINITY
    yield "memlock (ulimit -l)", "unlimited" if enough else f"{locked} bytes; pinning more needs a higher limit"
    nodes = {node: node / "cpulist" for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))}
    cpus = [f"{node.name}: CPUs {file.read_text().strip()}" for node, file in nodes.items()]
    yield "NUMA nodes", ", ".join(cpus) or "unknown"
    yield VARIABLE, f"{os.environ.get(VARIABLE, 'not set')} (32: small copies do not wait behind loads)"
    yield "ranks of this host", os.environ.get("LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE is not set")
    if not torch.cuda.is_available():
        yield "GPU", "none that torch can use"
        return
    driver = Path("/proc/driver/nvidia/version")
    yield "driver", driver.read_text().splitlines()[0].strip() if driver.exists() else "unknown"
    for index in range(torch.cuda.device_count()):
        left, total = (f"{nbytes / 1e9:.1f} GB" for nbytes in torch.cuda.mem_get_info(index))
        yield f"GPU {index}", f"{torch.cuda.get_device_name(index)}, {left} of {total} free"
    yield from _link(torch.device("cuda", torch.cuda.current_device()))


def _link(device: torch.device) -> Iterator[tuple[str, str]]:
    begin = time.perf_counter()
    try:
        homes = [Region(_COPIED_BYTES, device=device, pin=True).bytes for _ in range(2)]
    except (MemoryError, RuntimeError) as error:
        yield "pinning", f"failed: {error}"
        return
    yield "pinning", f"{2 * _COPIED_BYTES / (time.perf_counter() - begin) / 1e9:.1f} GB/s"
    places = [torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device) for _ in homes]
    streams = [torch.cuda.Stream(device) for _ in homes]

    def seconds(*directions: int) -> float:
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for way in directions:
            with torch.cuda.stream(streams[way]):
                for _ in range(4):
                    pair = (places[way], homes[way]) if way == 0 else (homes[way], places[way])
                    pair[0].copy_(pair[1], non_blocking=True)
        torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / 4

    seconds(0, 1)  # the first copies of a process take longer
    for name, directions in {"host to device": (0,), "device to host": (1,), "both at once": (0, 1)}.items():
        yield name, f"{len(directions) * _COPIED_BYTES / seconds(*directions) / 1e9:.1f} GB/s"
