"""Rates and sizes of machines, from the tables of ``machines.toml``, each number with its source."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from ..device.host_limits import host_memory
from ..policy import check_is

MACHINES = Path(__file__).parent / "machines.toml"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU and its share of a host, in 10**9 bytes and 10**12 operations."""

    name: str
    memory_gb: float  # of one GPU
    hbm_gb_per_s: float  # peak rate of device memory
    bf16_tflops: float  # peak rates of dense products
    fp32_tflops: float
    link_gb_per_s: float  # pinned copies, one way
    peer_gb_per_s: float  # gathers and reductions between GPUs of a host, for each GPU
    network_gb_per_s: float  # the same between hosts
    devices_per_host: int
    host_gb: float
    host_gb_per_s: float  # rate of the host's memory for the copies of all its GPUs, both ways added
    two_way: float = 1.831  # rate of copies both ways at once, divided by that of one way: as on the H200
    die_gb_per_s: float = 4100.0  # limit of the die with any memory: as on the H200, and on the H100, the same die
    launch_us: float = 6.6  # time of the host for launching one kernel: as on the H200's host
    contention: float = 0.025  # share by which copies and computation slow each other down: see below

    @property
    def device_bytes(self) -> int:
        """Memory of one GPU."""
        return int(self.memory_gb * 1e9)

    def two_way_gb_per_s(self, ranks: int) -> float:
        """Return the rate of a GPU's copies, both ways added, while all of ``ranks`` on its host copy.

        Each GPU has its own link, and waits at the host's memory for the copies of the others.
        """
        others = min(ranks, self.devices_per_host) - 1
        return 1 / (1 / (self.two_way * self.link_gb_per_s) + others / self.host_gb_per_s)


# Shares of the peak rates, and times, that training reached on the H200; other GPUs are taken to reach the same. Fitted
# to the plain iterations of examples/benchmark_results/2026-11-22-h200-train-latest.jsonl, 2026-11-22-h200x1-plan.jsonl
# and 2026-11-23-h200x1-plan-auto.jsonl. Shares of products leave out the time for their bytes.
SHARES = {
    "forward": {"matmul": 0.742, "attention": 0.637},
    "backward": {"matmul": 0.702, "attention": 0.637, "attention_backward": 0.475},
}
DETERMINISTIC = {"attention": 0.40, "attention_backward": 0.29}  # attention_backward: of the busy multiprocessors
MULTIPROCESSORS = 132
FP32 = 0.746  # of any product
HBM = 0.854  # of the memory's rate
UPDATE = 0.75  # of the memory's rate, for a fused optimizer
UNEVEN = 0.65  # of the die's rate: kernels that reduce or rearrange, copies of fully_shard
KERNEL_US = 3.0  # launch and tail of each kernel in a full queue
GATHER_CONTENTION = 0.025  # share by which gathers and reductions slow computation. ``contention``, of copies, is a
# median: 15 settled rows against plain ones, -2 to 6 %, records of GPTs and Llamas from 2026-11-25 to 2026-11-29.
CONTEXT_BYTES, WORKSPACE_BYTES = 700_000_000, 64 << 20  # driver and NCCL; cuBLAS


def builtin_machines() -> dict[str, Machine]:
    """Read the tables of ``machines.toml``, by name."""
    return _read(MACHINES)


def machine_of(machine: "Machine | str | Path | None") -> Machine:
    """Return a built-in machine by name, the one in a TOML file, or (``None``) the machine with this host's GPUs."""
    check_is(machine, Machine | str | Path | None, "machine must be a name, a TOML file or a Machine", 'machine="H200"')
    if machine is None:
        return _here()
    if isinstance(machine, Machine):
        return machine
    machines = {name.lower(): one for name, one in builtin_machines().items()}
    if str(machine).lower() in machines:
        return machines[str(machine).lower()]
    if not Path(machine).is_file():
        why = "a folder" if Path(machine).is_dir() else "no such file or built-in machine"
        raise ValueError(
            f"machine {str(machine)!r}: {why}; there are {', '.join(builtin_machines())}. Or give a TOML file."
        )
    found = list(_read(Path(machine)).values())
    if len(found) != 1:
        raise ValueError(f"machine {machine}: the file must have one table, [name], with the numbers of one machine")
    return found[0]


def _here() -> Machine:
    """Find the table of this host's GPUs, with the memory that GPU and host have."""
    import torch  # here, so that --help does not wait for it

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    words = set(name.replace("RTX ", "RTX").replace("-", " ").split())
    for one in builtin_machines().values():
        if {*one.name.split("-")} == words & {*one.name.split("-"), "PCIe"}:
            memory_gb = torch.cuda.get_device_properties().total_memory / 1e9
            if abs(memory_gb / one.memory_gb - 1) < 0.1:
                host_gb = host_memory().total_bytes / 1e9
                return replace(one, memory_gb=memory_gb, host_gb=host_gb, devices_per_host=torch.cuda.device_count())
    found = f"no table of {name}, the GPU here" if name else "no GPU here"
    raise ValueError(
        f"machine: there is {found}. Write --machine and one of {', '.join(builtin_machines())}, or a TOML file"
    )


def _read(path: Path) -> dict[str, Machine]:
    """Read tables ``[name]`` of ``field = { value, source }``."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        for number in (number for numbers in tables.values() for number in numbers.values()):
            if not number["value"] > 0 or not number["source"].strip():
                raise ValueError(f"got {number!r}")
        return {
            name: Machine(name=name, **{field: number["value"] for field, number in numbers.items()})
            for name, numbers in tables.items()
        }
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"machine {path}: its tables [name] must have the numbers of Machine, each as "
            f"{{ value = <positive number>, source = <text> }}: {error}"
        ) from None
