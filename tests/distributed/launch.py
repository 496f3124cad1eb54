"""Starts the ranks of a distributed test, and says on which device.

    def run_x(rank: int, world_size: int, ...) -> None: ...      # in every rank, inside a process group

    def test_x(tmp_path): spawn(run_x, 4, tmp_path, ...)

On the CPU with gloo, or with FSDP_OFFLOAD_TEST_DEVICE=cuda on GPUs with NCCL, one for each rank.
"""

import datetime
import multiprocessing
import os
import traceback
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing as torch_multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DEVICE_TYPE = os.environ.get("FSDP_OFFLOAD_TEST_DEVICE", "cpu")

# Ranks that wait for each other in vain have met a bug: a rank failed, or they disagree on the order of collectives.
TIMEOUT = datetime.timedelta(seconds=60)

# Imported once, in the process from which all ranks of all tests are forked.
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel"]


def spawn(run: Callable[..., None], world_size: int, tmp_path: Path, *args: Any) -> None:
    """``run(rank, world_size, *args)`` in ``world_size`` processes; the first exception of a rank is raised here."""
    if DEVICE_TYPE != "cpu" and torch.accelerator.device_count() < world_size:
        pytest.skip(f"needs {world_size} devices, there are {torch.accelerator.device_count()}")
    multiprocessing.set_forkserver_preload(_PRELOAD)
    store = tmp_path / f"store-{uuid.uuid4().hex}"
    try:
        torch_multiprocessing.start_processes(
            _rank_main, (run, world_size, store, args), nprocs=world_size, start_method="forkserver"
        )
    except (torch_multiprocessing.ProcessRaisedException, torch_multiprocessing.ProcessExitedException) as error:
        pytest.fail(str(error), pytrace=False)


def _rank_main(rank: int, run: Callable[..., None], world_size: int, store: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    device = this_device(rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    # Object collectives and checkpoints need a backend for the CPU as well.
    backend = "gloo" if DEVICE_TYPE == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT)
    run(rank, world_size, *args)
    dist.barrier()
    dist.destroy_process_group()


def this_device(rank: int | None = None) -> torch.device:
    """Where this rank's parameters are."""
    if DEVICE_TYPE == "cpu":
        return torch.device("cpu")
    return torch.device(DEVICE_TYPE, dist.get_rank() if rank is None else rank)


def mesh(*sizes: int, names: tuple[str, ...] = ("dp",)) -> DeviceMesh:
    """A mesh over all ranks."""
    return init_device_mesh(DEVICE_TYPE, sizes, mesh_dim_names=names)


def agree(problems: Iterable[str]) -> list[str]:
    """The problems of all ranks, on all ranks: they leave a failing case together and go on with the next."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(problems))
    return [f"rank {rank}: {problem}" for rank, found in enumerate(gathered) for problem in found]


def attempt(action: Callable[[], Iterable[str]]) -> list[str]:
    """What ``action`` finds wrong, on all ranks; an exception is something wrong."""
    try:
        problems = list(action())
    except Exception:  # noqa: BLE001  # reported with all others, by the name of its case
        problems = [traceback.format_exc(limit=-6)]
    return agree(problems)


def run_cases(cases: dict[str, Callable[[], Iterable[str]]]) -> None:
    """Every case, even if others fail; then one error with the problems of all of them.

    FSDP_OFFLOAD_TEST_CASE runs only the cases whose names contain it.
    """
    wanted = os.environ.get("FSDP_OFFLOAD_TEST_CASE", "")
    failed = {}
    for name, case in cases.items():
        if wanted in name:
            torch.manual_seed(0)
            failed[name] = attempt(case)
    report = "\n".join(f"== {name}\n" + "\n".join(found[:3]) for name, found in failed.items() if found)
    if report:
        raise AssertionError(f"failing cases:\n{report}")
