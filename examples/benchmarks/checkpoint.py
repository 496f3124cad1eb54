"""Measures what an asynchronous save costs the training loop, with ArenaStager and with torch's own stager."""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from fsdp_offload import OffloadPolicy, offload_optimizer, remove_offload
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict

from .link import Link
from .record import bench_device, device_bytes_of, median, print_record, run, wall_ms
from .step import sharded_model, varied_sizes

_MIB = 1 << 20

MakeStager = Callable[[torch.optim.Optimizer], AsyncStager]


class _SaveWay(NamedTuple):
    """A way of staging asynchronous saves."""

    make_stager: MakeStager
    reused: bool  # one stager for all saves
    covered: bool  # snapshot_bytes is enough for all of the state


def _default_stager(_: torch.optim.Optimizer) -> AsyncStager:
    return DefaultStager(StagingOptions(False, False, False, False))  # async_save's own, if it is given no stager


WAYS = {
    "arena": _SaveWay(ArenaStager, reused=True, covered=True),
    "arena, no spare homes": _SaveWay(ArenaStager, reused=True, covered=False),
    "torch default, fresh": _SaveWay(_default_stager, reused=False, covered=False),
    "torch default, reused": _SaveWay(_default_stager, reused=True, covered=False),
}


def measure(
    params: Annotated[int, typer.Option(help="Parameters in all; AdamW's state takes 8 bytes for each.")] = 550_000_000,
    tensors: Annotated[int, typer.Option(help="Number of parameter tensors.")] = 1000,
    device_mib: Annotated[int | None, typer.Option(help="OffloadPolicy.device_bytes, in MiB, or auto.")] = None,
    repeats: Annotated[int, typer.Option(help="Saves of each kind, after a first one.")] = 3,
    compute_ms: Annotated[float, typer.Option(help="Device time between steps, as a forward and backward take.")] = 0.0,
    way: Annotated[str | None, typer.Option(help="Only this way of staging.")] = None,
    directory: Annotated[Path | None, typer.Option(help="Where to write; by default a temporary folder.")] = None,
) -> None:
    """Measure how long ``dcp.async_save`` blocks, the time of steps with and without a save, and host memory."""
    device = bench_device()
    model = sharded_model(varied_sizes(params, tensors), device)
    folder = Path(tempfile.mkdtemp(dir=directory))
    copy_ms = _model_copy_ms(model, device)
    try:
        for name, chosen in WAYS.items():
            if way not in (None, name):
                continue
            figures = _measure(model, chosen, device_bytes_of(device_mib), folder, device, repeats, compute_ms)
            print_record("checkpoint", way=name, params=params, tensors=tensors, model_copy_ms=copy_ms, **figures)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        dist.destroy_process_group()


def _measure(
    model: nn.Module,
    way: _SaveWay,
    device_bytes: int | Literal["auto"],
    folder: Path,
    device: torch.device,
    repeats: int,
    compute_ms: float,
) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    state_bytes = 8 * sum(param.numel() for param in model.parameters())
    policy = OffloadPolicy(device_bytes=device_bytes, snapshot_bytes=(state_bytes * 11 // 10) * way.covered)
    offload_optimizer(optimizer, model=model, policy=policy)
    optimizer.step()
    saves: list[_Save] = []
    stager = way.make_stager(optimizer)
    try:
        for _ in range(1 + repeats):
            saves.append(_save(model, optimizer, stager, folder, device, compute_ms))
            if not way.reused:
                stager.close()
                stager = way.make_stager(optimizer)
    except KeyError as error:  # torch 2.11: DefaultStager closes itself after its first use
        return {"failed": f"a second save with the same stager: KeyError: {error}"}
    finally:
        stager.close()
        optimizer.zero_grad(set_to_none=False)
        remove_offload(optimizer)
    first, later = saves[0], saves[1:]
    undisturbed = [ms for save in later for ms in save.undisturbed_ms]
    disturbed = [ms for save in later for ms in save.disturbed_ms]
    return {
        "state_bytes": state_bytes,
        "state_dict_ms": median([save.state_dict_ms for save in later]),
        "blocked_ms": median([save.blocked_ms for save in later]),
        "first_blocked_ms": first.blocked_ms,
        "save_s": median([save.save_s for save in later]),
        "step_ms": median(undisturbed),
        "step_during_save_ms": median(disturbed),
        "step_ratio": median(disturbed) / median(undisturbed),
        "mean_step_ratio": sum(disturbed) / len(disturbed) / (sum(undisturbed) / len(undisturbed)),
        "worst_step_during_save_ms": max(disturbed),
        "steps_during_save": len(disturbed),
        "host_growth_bytes": max(save.host_growth_bytes for save in saves),
    }


class _Save(NamedTuple):
    state_dict_ms: float
    blocked_ms: float
    save_s: float
    undisturbed_ms: list[float]
    disturbed_ms: list[float]
    host_growth_bytes: int


def _save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stager: AsyncStager,
    folder: Path,
    device: torch.device,
    compute_ms: float,
) -> _Save:
    """Measure one save in the middle of steps."""

    def step() -> None:
        if compute_ms:
            torch.cuda._sleep(int(compute_ms * 1e6 * 1.5))
        optimizer.step()

    undisturbed = wall_ms(step, device, repeats=12)
    target = folder / "save"
    with _PeakMemory() as memory:
        begin = time.perf_counter()
        state_dict = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        has_state_dict = time.perf_counter()
        response = async_save(state_dict, checkpoint_id=target, async_stager=stager)
        returned = time.perf_counter()
        future = response if isinstance(response, Future) else response.upload_completion
        del state_dict
        disturbed = []
        while not future.done():
            disturbed += wall_ms(step, device, repeats=1, warmup=0)
        future.result()
        saved = time.perf_counter()
    undisturbed += wall_ms(step, device, repeats=12)
    shutil.rmtree(target)
    return _Save(
        state_dict_ms=(has_state_dict - begin) * 1e3,
        blocked_ms=(returned - has_state_dict) * 1e3,
        save_s=saved - returned,
        undisturbed_ms=undisturbed,
        disturbed_ms=disturbed,
        host_growth_bytes=memory.growth_bytes,
    )


class _PeakMemory:
    """Context that measures how far the process's own memory grows, sampled every 20 ms."""

    growth_bytes = 0

    def __enter__(self) -> "_PeakMemory":
        self._before = _own_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.growth_bytes = max(self.growth_bytes, _own_bytes() - self._before)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _own_bytes() -> int:
    """Return this process's resident memory, which excludes the page cache of files that it writes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _model_copy_ms(model: nn.Module, device: torch.device) -> float:
    """Compute how long a copy of the model's shards to pinned memory takes at the link's one-way rate."""
    model_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    return model_bytes / Link(device).gb_per_s(64, load=False, store=True) / 1e6


def main(argv: Sequence[str]) -> None:
    """Measure with the options of ``argv``."""
    run(measure, argv)
