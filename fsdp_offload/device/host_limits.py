"""Limits of host memory, checked before any is pinned: the kernel kills processes that pin too much."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

is_replaced: ContextVar[bool] = ContextVar("is_replaced", default=False)


@contextmanager
def memory_is_replaced() -> Iterator[None]:
    """Inside the block, make regions that other memory will replace before the first step.

    They take host memory only where they are written: they are not touched, page-locked or checked against limits.
    """
    before = is_replaced.set(True)
    try:
        yield
    finally:
        is_replaced.reset(before)


def cores_of_rank() -> int:
    """Return the cores of this process, divided by the ranks of this host."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class HostMemory(NamedTuple):
    """Bytes of host memory, as the kernel reports them."""

    total_bytes: int  # the smallest limit that applies to this process: of the machine, its cgroup, or a parent of that
    available_bytes: int  # of ``total_bytes``, without swapping; page cache counts as free


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read the machine's memory and every cgroup limit above this process (v2 and v1). ``root`` is for tests."""
    meminfo = _key_values(root / "proc/meminfo")
    total, available = meminfo["MemTotal:"] * 1024, meminfo["MemAvailable:"] * 1024
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit_name, used_name, cache_name = _CGROUPS[1 if controllers else 2]
        folder = root / mount / path.strip("/")
        for candidate in (folder, *folder.parents):
            text = "".join(_lines(candidate / limit_name)).strip()
            if text.isdigit():
                used = int("".join(_lines(candidate / used_name)).strip() or 0)
                # Page cache counts as used but is given back on demand.
                cache = _key_values(candidate / "memory.stat").get(cache_name, 0)
                total = min(total, int(text))
                available = min(available, max(0, int(text) - max(0, used - cache)))
            if candidate == root / mount:
                break
    return HostMemory(total, available)


IF_THE_KERNEL_KNOWS_LESS = (
    "if the machine has memory that the kernel does not report yet, say how much may be used with "
    "OffloadPolicy.host_limit_bytes"
)


def check_host_memory(
    needed_bytes: int,
    limit_bytes: int | None,
    held_bytes: int = 0,
    *,
    what: str = "The optimizer state to offload",
    instead: str = IF_THE_KERNEL_KNOWS_LESS,
) -> None:
    """Raise a MemoryError if ``what`` needs more than is left; ``held_bytes``, taken before, count as well.

    ``limit_bytes`` is the user's own figure, which replaces the kernel's; ``None`` asks the kernel. With ``None``, all
    ranks of this host (``LOCAL_WORLD_SIZE``, as torchrun sets it) must also fit together: each alone might pass.
    """
    if is_replaced.get():
        return
    each_bytes, here = held_bytes + needed_bytes, f"{needed_bytes} bytes of host memory on this rank"
    if limit_bytes is not None:
        held = f"{held_bytes} are taken already and " if held_bytes else ""
        limits = [(each_bytes, limit_bytes, f"{here}; {held}OffloadPolicy.host_limit_bytes allows {limit_bytes}")]
    else:
        (total_bytes, available_bytes), ranks = host_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        on_each = f"{each_bytes} bytes of host memory on each of the {ranks} ranks of this host"
        together = f"{on_each}, {each_bytes * ranks} in all; the limit is {total_bytes}"
        limits = [
            (needed_bytes, available_bytes, f"{here}; {available_bytes} are available"),
            (each_bytes * ranks, total_bytes, together),
        ]
    for asked_bytes, most_bytes, needs in limits:
        if asked_bytes > most_bytes:
            raise MemoryError(f"{what} needs {needs}. Shard over more ranks, or {instead}.")


_CGROUPS = {
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By version: folder, file of the limit, file of the usage, and the page cache's name in ``memory.stat``."""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _key_values(path: Path) -> dict[str, int]:
    pairs = (line.split()[:2] for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
