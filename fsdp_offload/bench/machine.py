"""What ``fsdp-offload plan --machine this`` measures, beside a profile, and how long that takes."""

import dataclasses
import time
from typing import Annotated

import typer

from ..plan import machine_of
from .record import bench_device, print_record


def main(
    beside: Annotated[str, typer.Option(help="Profile to compare with.")] = "H200",
) -> None:
    """This machine as the plan measures it, beside a profile."""
    bench_device()
    profile = dataclasses.asdict(machine_of(beside))
    begin_s = time.perf_counter()
    found = dataclasses.asdict(machine_of("this"))
    measured_s = time.perf_counter()
    again = dataclasses.asdict(machine_of("this"))
    print_record(
        "plan-machine",
        device=found["name"],
        beside=profile["name"],
        seconds=measured_s - begin_s,
        again_seconds=time.perf_counter() - measured_s,
        same_again=again == found,
        measured={name: _rounded(value) for name, value in found.items() if name != "name"},
        profile={name: _rounded(value) for name, value in profile.items() if name != "name"},
    )


def _rounded(value: float) -> float:
    return round(value, 3)
