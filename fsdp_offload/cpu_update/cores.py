"""Which of the machine's cores a thread of ours may use: those of this process, its share of them, near the device."""

import os
from pathlib import Path

import torch


def update_threads() -> int:
    """Return how many threads may update on this rank: 7/8 of its share of the process's cores, or one less.

    The rest is for the main thread and for the one that issues copies. The threads of a kernel wait for each other:
    with one on each core, all wait for the one whose core somebody else has. (H200, 16 cores: 240 ms with 16 threads,
    203 with 15, 211 with 14; beside copies 292, 246, 250; whole steps 320, 317, 309.)
    """
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, cores - max(1, cores // 8))


def cores_near(device: torch.device) -> frozenset[int]:
    """Cores of this process on the device's NUMA node; all of them where nothing is known."""
    allowed = frozenset(os.sched_getaffinity(0))
    if device.type != "cuda":
        return allowed
    found = torch.cuda.get_device_properties(device)
    numbers = [getattr(found, f"pci_{name}_id", 0) for name in ("domain", "bus", "device")]
    return cores_of_pci("{:04x}:{:02x}:{:02x}.0".format(*numbers)) & allowed or allowed


def cores_of_pci(address: str, root: Path = Path("/")) -> frozenset[int]:
    """Cores of the NUMA node of a PCI device (``"0000:17:00.0"``); none where the kernel does not say.

    ``root`` is for tests. The kernel lists cores as ``"0-3,8,10-11"``.
    """
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        listed = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
        parts = [part.partition("-") for part in listed.split(",") if part]
        return frozenset(core for begin, _, end in parts for core in range(int(begin), int(end or begin) + 1))
    except (OSError, ValueError):
        return frozenset()  # virtual machines and containers often hide it; the node is then -1 or missing
