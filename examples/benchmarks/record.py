"""Helpers of all benches: the record of the machine, output, and clocks."""

import datetime
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import typer


def print_machine() -> None:
    """Print hardware, versions, date and command, without which figures cannot be compared."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    print_record(
        "machine",
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else str(accelerator or "cpu"),
        torch=torch.__version__,
        python=platform.python_version(),
        date=datetime.date.today().isoformat(),
        command=shlex.join(["python", "-m", "examples.benchmarks", *sys.argv[1:]]),
    )


def print_record(what: str, **figures: Any) -> None:
    """Print one JSON line, with floats rounded to 4 decimals."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"bench": what, **rounded}), flush=True)


def bench_device() -> torch.device:
    """Return the current accelerator.

    Raises:
        SystemExit: there is none; on the CPU the figures would mean nothing.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        sys.exit("This bench measures copies between host and device, and there is no accelerator here.")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def device_bytes_of(mib: int | None) -> int | Literal["auto"]:
    """Return ``OffloadPolicy.device_bytes`` for an option in MiB."""
    return "auto" if mib is None else mib << 20


def wall_ms(work: Callable[[], None], device: torch.device, *, repeats: int, warmup: int = 1) -> list[float]:
    """Return the wall-clock milliseconds of each repeat of ``work``, from an idle device to an idle device."""
    times = []
    for repeat in range(warmup + repeats):
        torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        work()
        torch.accelerator.synchronize(device)
        if repeat >= warmup:
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def cpu_ms(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Return this thread's median CPU milliseconds in ``work``; each repeat begins on an idle device."""
    times = []
    for _ in range(repeats):
        torch.accelerator.synchronize(device)
        begin = time.thread_time()
        work()
        times.append((time.thread_time() - begin) * 1e3)
    torch.accelerator.synchronize(device)
    return median(times)


def median(values: list[float]) -> float:
    """Return the median, on which outliers have little influence."""
    return statistics.median(values)


def run(function: Callable[..., None], argv: Sequence[str]) -> None:
    """Call ``function`` with the options of ``argv``; its annotations define the options.

    Raises:
        typer.BadParameter: an option does not accept its value.
    """
    app = typer.Typer(add_completion=False)
    app.command()(function)
    app([*argv], standalone_mode=False)
