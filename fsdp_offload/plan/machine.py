"""What a machine can do: profiles by name, each number with its source, and this machine, measured and cached."""

import dataclasses
import hashlib
import json
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device and its share of a host. Rates are what is reached in training, in 10**9 bytes or 10**12 operations.

    Attributes:
        name: of the profile.
        device_bytes: memory of one device.
        context_bytes: of that, what the driver and NCCL take.
        workspace_bytes: what the matrix library keeps for itself.
        devices_per_host: how many share a host.
        matmul_tflops, matmul_backward_tflops: of large bf16 products, without what reading and writing takes.
        fp32_tflops: of fp32 products.
        attention_tflops, attention_backward_tflops: of causal fused attention.
        memory_gb_per_s: device memory.
        kernel_us: what each kernel takes beside its work.
        launch_us: what the host needs to launch one kernel.
        load_gb_per_s, store_gb_per_s: pinned copies one way.
        two_way_gb_per_s: both at once, added.
        host_gb_per_s: all copies of all devices of the host, added.
        host_bytes: memory of the host.
        peer_gb_per_s: gathers and reductions between devices of a host, for each device.
        network_gb_per_s: the same between hosts.
        contention: the share by which transfers and computation take longer beside each other.
        gather_contention: the share by which computation takes longer beside gathers and reductions.
    """

    name: str
    device_bytes: int
    context_bytes: int
    workspace_bytes: int
    devices_per_host: int
    matmul_tflops: float
    matmul_backward_tflops: float
    fp32_tflops: float
    attention_tflops: float
    attention_backward_tflops: float
    memory_gb_per_s: float
    kernel_us: float
    launch_us: float
    load_gb_per_s: float
    store_gb_per_s: float
    two_way_gb_per_s: float
    host_gb_per_s: float
    host_bytes: int
    peer_gb_per_s: float
    network_gb_per_s: float
    contention: float
    gather_contention: float


def builtin_machines() -> dict[str, Path]:
    """Profiles by name: those that come with the package, and the user's own."""
    folders = [Path(__file__).parent / "machines"]
    try:
        import platformdirs
    except ImportError:
        pass  # then there is no place where a user would have put any; a path always works
    else:
        folders.append(platformdirs.user_config_path("fsdp_offload") / "machines")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def machine_of(machine: "Machine | str | Path") -> Machine:
    """Find out what is meant: the name of a profile, the path of one, or ``"this"``.

    Raises:
        ValueError: there is no such profile, or it is not right; the message says what there is, or what is wrong.
    """
    if isinstance(machine, Machine):
        return machine
    if str(machine) == "this":
        return this_machine()
    profiles = {name.lower(): path for name, path in builtin_machines().items()}
    path = profiles.get(str(machine).lower(), Path(machine))
    if not path.is_file():
        names = ", ".join(builtin_machines())
        raise ValueError(f"no machine {str(machine)!r}: there are {names}; or give a TOML file, or 'this' to measure")
    return _read(path)


def _read(path: Path) -> Machine:
    """Read a profile: a table ``{ value, source }`` for each number."""
    try:
        numbers = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"machine {path}: {error}") from None
    fields = {field.name: field.type for field in dataclasses.fields(Machine) if field.name != "name"}
    if wrong := sorted(numbers.keys() ^ fields.keys()):
        raise ValueError(f"machine {path}: these numbers are missing, or not known: {', '.join(wrong)}")
    for name, number in numbers.items():
        value = number.get("value") if isinstance(number, dict) else None
        if not isinstance(value, int | float) or value < 0 or not number.get("source"):
            raise ValueError(f"machine {path}: {name} must be {{ value = <number>, source = <text> }}, got {number!r}")
    values = {name: fields[name](number["value"]) for name, number in numbers.items()}  # type: ignore[operator]
    return Machine(name=path.stem, **values)


# Measuring this one --------------------------------------------------------------------------------------------------


def this_machine() -> Machine:
    """Measure this machine in some seconds, or take what was measured before.

    Without platformdirs there is no place to keep it, and it is measured each time.

    Raises:
        ValueError: there is no accelerator.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"machine 'this' has no GPU to measure; name one: {', '.join(builtin_machines())}")
    path = _cache_path()
    if path is not None:
        try:
            return Machine(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            pass  # not measured yet, or by another version
    machine = measured(torch.device("cuda", 0))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(machine), indent=1), encoding="utf-8")
    return machine


def _cache_path() -> Path | None:
    """Return the file that keeps the measurements of this machine with this torch."""
    try:
        import platformdirs
    except ImportError:
        return None
    properties = torch.cuda.get_device_properties(0)
    identity = (properties.name, properties.total_memory, torch.cuda.device_count(), torch.__version__, _host_bytes())
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return Path(platformdirs.user_cache_path("fsdp_offload")) / f"machine-{key}.json"


_NETWORK_GB_PER_S, _CONTENTION, _GATHER_CONTENTION, _KERNEL_US = 25.0, 0.06, 0.025, 3.0
"""Defaults for what one host cannot measure in seconds: a 200 Gb/s adapter for each device; as on the H200 profile."""

_SUSTAINED = 0.82
"""Share that training reaches of the rate of products over some milliseconds, with the device at its power limit: the
profile of the H200 beside ``examples/benchmark_results/2026-11-23-h200x1-plan-machine.jsonl``."""


def measured(device: torch.device, numel: int = 8192) -> Machine:
    """Measure products, attention, device memory and the links of all devices. What cannot be seen is a default."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    taken_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    block = torch.empty(numel * numel // 16, 64, dtype=torch.uint8, device=device)
    memory_gb_per_s = 2 * block.numel() / _seconds(block.clone, device) / 1e9
    forward, backward = _matmul_tflops(device, numel, memory_gb_per_s)
    attention, attention_backward = _attention_tflops(device, numel // 2)
    fp32 = torch.ones(numel // 2, numel // 2, device=device)
    small = torch.zeros(1, device=device)
    one_way = [_link_gb_per_s([device], load=load, store=not load) for load in (True, False)]
    devices = [torch.device(device.type, index) for index in range(torch.cuda.device_count())]
    return Machine(
        name=torch.cuda.get_device_name(device),
        device_bytes=total_bytes,
        context_bytes=max(0, taken_bytes),
        workspace_bytes=64 << 20,
        devices_per_host=len(devices),
        matmul_tflops=forward,
        matmul_backward_tflops=backward,
        fp32_tflops=2 * (numel // 2) ** 3 / _seconds(lambda: fp32 @ fp32, device) / 1e12,
        attention_tflops=attention,
        attention_backward_tflops=attention_backward,
        memory_gb_per_s=memory_gb_per_s,
        kernel_us=_KERNEL_US,
        launch_us=_seconds(lambda: [small.add_(1) for _ in range(100)], device) * 1e4,
        load_gb_per_s=one_way[0],
        store_gb_per_s=one_way[1],
        two_way_gb_per_s=_link_gb_per_s([device], load=True, store=True),
        host_gb_per_s=_link_gb_per_s(devices, load=True, store=True),
        host_bytes=_host_bytes(),
        peer_gb_per_s=_peer_gb_per_s(devices),
        network_gb_per_s=_NETWORK_GB_PER_S,
        contention=_CONTENTION,
        gather_contention=_GATHER_CONTENTION,
    )


def _matmul_tflops(device: torch.device, numel: int, memory_gb_per_s: float) -> tuple[float, float]:
    layer = nn.Linear(numel // 2, numel // 2, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(numel, numel // 2, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    flops = 2 * numel * (numel // 2) ** 2
    forward = _seconds(lambda: layer(x), device)
    both = _seconds(lambda: layer(x).backward(grad), device)
    bytes_s = 2 * (x.numel() + grad.numel() + layer.weight.numel()) / memory_gb_per_s / 1e9  # of one product
    tflops = flops / (forward - bytes_s) / 1e12, 2 * flops / (both - forward - 2 * bytes_s) / 1e12
    return _SUSTAINED * tflops[0], _SUSTAINED * tflops[1]


def _attention_tflops(device: torch.device, length: int) -> tuple[float, float]:
    query, key, value = (
        torch.randn(2, 16, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    flops = 2 * query.numel() * length  # causal: half of four

    def attend() -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    forward = _seconds(attend, device)
    both = _seconds(lambda: attend().backward(value.detach()), device)
    return flops / forward / 1e12, 2.5 * flops / (both - forward) / 1e12


def _link_gb_per_s(devices: list[torch.device], *, load: bool, store: bool, nbytes: int = 256 << 20) -> float:
    sides = []
    for device in devices:
        for is_load in [True] * load + [False] * store:
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(nbytes, dtype=torch.uint8, device=device)
            sides.append((*((there, host) if is_load else (host, there)), torch.Stream(device)))

    def copy() -> None:
        for _ in range(4):
            for target, source, stream in sides:
                with stream:
                    target.copy_(source, non_blocking=True)

    return 4 * len(sides) * nbytes / _seconds(copy, *devices) / 1e9


def _peer_gb_per_s(devices: list[torch.device], nbytes: int = 256 << 20) -> float:
    if len(devices) < 2:
        return _NETWORK_GB_PER_S  # there is nobody in this host to talk to
    here, there = (torch.empty(nbytes, dtype=torch.uint8, device=device) for device in devices[:2])
    return nbytes / _seconds(lambda: there.copy_(here), *devices[:2]) / 1e9


def _seconds(work: Callable[[], Any], *devices: torch.device, repeats: int = 5) -> float:
    """The median time from idle devices to idle devices, of work repeated until it lasts."""
    times = []
    for repeat in range(repeats + 2):
        for device in devices:
            torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        for _ in range(5):
            work()
        for device in devices:
            torch.accelerator.synchronize(device)
        if repeat >= 2:
            times.append((time.perf_counter() - begin) / 5)
    return sorted(times)[len(times) // 2]


def _host_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0
