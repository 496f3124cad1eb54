"""Run a distributed test on its ranks, and say on which device.

    def run_x(rank: int, world_size: int, ...) -> None: ...      # in every rank, inside a process group

    def test_x(tmp_path): spawn(run_x, 4, tmp_path, ...)

On the CPU with gloo, or with FSDP_OFFLOAD_TEST_DEVICE=cuda on GPUs with NCCL, one for each rank.

On the CPU the ranks of a test file are forked from a process that lives on (``nursery.py``) and has imported torch and
that file: a rank begins in hundredths of a second, and inherits nothing from those that ran before it.
"""

import datetime
import faulthandler
import multiprocessing
import os
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing as torch_multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed import nursery
from tests.overlapping import slow_down

DEVICE_TYPE = os.environ.get("FSDP_OFFLOAD_TEST_DEVICE", "cpu")

# Ranks that wait for each other in vain have met a bug: a rank failed, or they disagree on the order of collectives.
TIMEOUT = datetime.timedelta(seconds=60)
# A rank that hangs anywhere else is ended, and shows where it was. No test takes nearly as long.
STUCK_AFTER_S = 900.0


class Case(NamedTuple):
    """What ranks are to do, and where they meet."""

    run: Callable[..., None]
    world_size: int
    args: tuple[Any, ...]
    folder: Path  # of this case alone
    stuck_after_s: float


def spawn(run: Callable[..., None], world_size: int, tmp_path: Path, *args: Any, module: str = "") -> None:
    """``run(rank, world_size, *args)`` in ``world_size`` processes; the first exception of a rank is raised here.

    Where a rank skips, as by ``pytest.importorskip``, the test is skipped. Ranks are forked from a process that has
    imported ``module``, or else that of ``run``.
    """
    if DEVICE_TYPE != "cpu" and torch.accelerator.device_count() < world_size:
        pytest.skip(f"needs {world_size} devices, there are {torch.accelerator.device_count()}")
    folder = tmp_path / f"ranks-{uuid.uuid4().hex}"
    folder.mkdir()
    case = Case(run, world_size, args, folder, STUCK_AFTER_S)
    # Imports may touch the GPU, which processes forked later could not use: there, every rank imports for itself.
    problem = (
        nursery.run(module or run.__module__, run_case, case) if DEVICE_TYPE == "cpu" else run_case("forkserver", case)
    )
    skipped = sorted(folder.glob("skipped-*"))
    if len(skipped) == world_size:
        pytest.skip(skipped[0].read_text())
    if skipped:
        problem = f"of {world_size} ranks, only some skip: {', '.join(path.name for path in skipped)}\n{problem or ''}"
    if problem:
        said = [f"rank {path.suffix[1:]} was at:\n{path.read_text()}" for path in sorted(folder.glob("stuck.*"))]
        said += [f"rank {path.name[7:]}:\n{path.read_text()}" for path in sorted(folder.glob("failed-*"))]
        pytest.fail("\n".join([problem, *(text for text in said if "File" in text)]), pytrace=False)


def run_case(start_method: str, case: Case) -> str | None:
    """Start the ranks, wait for them, and return what went wrong."""
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(nursery.PRELOAD)
    try:
        torch_multiprocessing.start_processes(_rank_main, (case,), nprocs=case.world_size, start_method=start_method)
    except (torch_multiprocessing.ProcessRaisedException, torch_multiprocessing.ProcessExitedException) as error:
        return str(error)
    return None


def _rank_main(rank: int, case: Case) -> None:
    with (case.folder / f"stuck.{rank}").open("w") as file:
        faulthandler.dump_traceback_later(case.stuck_after_s, exit=True, file=file)
        try:
            _join_and_run(rank, case)
        except pytest.skip.Exception as skipped:
            (case.folder / f"skipped-{rank}").write_text(str(skipped))
            os._exit(0)  # the others skip as well; whatever the process group waits for, nobody does
        except BaseException:  # torch may see a rank first whose peer has gone
            (case.folder / f"failed-{rank}").write_text(traceback.format_exc())
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def _join_and_run(rank: int, case: Case) -> None:
    torch.set_num_threads(1)
    device = this_device(rank)
    if device.type != "cpu":
        # Two plain trainings must have the same bits; kernels that add with atomics (gradients of embeddings) do not.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA is first used
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.accelerator.set_device_index(device.index)
    # Object collectives and checkpoints need a backend for the CPU as well.
    backend = "gloo" if DEVICE_TYPE == "cpu" else "cpu:gloo,cuda:nccl"
    store = f"file://{case.folder / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=case.world_size, timeout=TIMEOUT)
    # A rank that ends at once (it skips) would close connections that others are still making: of gloo, on GPUs too.
    dist.all_reduce(torch.zeros(1))
    case.run(rank, case.world_size, *case.args)
    dist.barrier()
    dist.destroy_process_group()


def this_device(rank: int | None = None) -> torch.device:
    """Where this rank's parameters are."""
    if DEVICE_TYPE == "cpu":
        return torch.device("cpu")
    return torch.device(DEVICE_TYPE, dist.get_rank() if rank is None else rank)


def slow_updates() -> None:
    """On streams, what does not wait for an update reads what was there before; in this process, which ends with it."""
    if DEVICE_TYPE != "cpu":
        slow_down("U", 2_000_000)


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


def spawn_cases(
    cases: Mapping[str, Callable[[], Iterable[str]]], world_size: int, tmp_path: Path, every: int = 1
) -> None:
    """:func:`run_cases` in ``world_size`` processes; a case is a function of the test's file, or a partial of one."""
    first = next(iter(cases.values()))
    spawn(_run_cases, world_size, tmp_path, cases, every, module=getattr(first, "func", first).__module__)


def _run_cases(rank: int, world_size: int, cases: Mapping[str, Callable[[], Iterable[str]]], every: int) -> None:
    warnings.filterwarnings("ignore", message="offload_optimizer: ")
    run_cases(cases, every)


def unless_refused(action: Callable[[], Any], error: type[Exception], *words: str) -> Iterator[str]:
    """What is wrong where ``action`` is to raise ``error`` with all of these words in it."""
    try:
        action()
    except error as raised:
        yield from (f"{word!r} is not in: {raised}" for word in words if word not in str(raised))
    else:
        yield f"no {error.__name__}"


def run_cases(cases: Mapping[str, Callable[[], Iterable[str]]], every: int = 1) -> None:
    """Every so-manieth case, even if others fail; then one error with the problems of all of them.

    FSDP_OFFLOAD_TEST_CASE runs only the cases whose names contain it.
    """
    wanted = os.environ.get("FSDP_OFFLOAD_TEST_CASE", "")
    failed = {}
    for name, case in list(cases.items())[::every]:
        if wanted in name:
            torch.manual_seed(0)
            failed[name] = attempt(case)
    report = "\n".join(f"== {name}\n" + "\n".join(found[:3]) for name, found in failed.items() if found)
    if report:
        raise AssertionError(f"failing cases:\n{report}")
