"""Asynchronous saves by several ranks: every rank's part of every file is the state of the call.

The planner's collectives run in the writing threads, so they have a process group of their own, as in ``examples/``.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import optim
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict, set_optimizer_state_dict
from tests.async_writers import Expected, FailingWriter, HeldWriter, Waits, copied, loaded, not_the_same
from tests.distributed import models
from tests.distributed.launch import agree, run_cases, spawn, this_device
from tests.distributed.models import Net, batch, build, decay_groups
from tests.parity import Pair, Run, attach, differences
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed

ALL = 1 << 30
NONE = OffloadPolicy(bucket_bytes=1024, device_bytes=5 * 1024)
SPARE = OffloadPolicy(bucket_bytes=1024, device_bytes=5 * 1024, snapshot_bytes=ALL)
HALF = OffloadPolicy(bucket_bytes=1024, device_bytes=5 * 1024, snapshot_bytes=6000)
KEPT = OffloadPolicy(bucket_bytes=1024, device_bytes=9 * 1024, snapshot_bytes=ALL)

MakeOptimizer = Callable[[Net], Optimizer]


def adamw(net: Net) -> Optimizer:
    return optim.AdamW(decay_groups(net), lr=1e-2)


def muon(net: Net) -> Optimizer:
    """Whole parameters, which it sees as DTensors."""
    return optim.Muon([net.embed.weight, net.blocks[0].up.weight, net.odd.weight], lr=1e-2, ns_steps=1)


def freeze(net: Net) -> None:
    net.small.requires_grad_(False)


def new_run(
    shard: models.ShardNet, make: MakeOptimizer, policy: OffloadPolicy | None, *, seed: int = 0, tied: bool = False
) -> Run:
    net = build(shard, seed=seed, tied=tied, prepare=freeze)
    run = Run(net, make(net), this_device(), torch.float32)
    if policy is not None:
        attach(run.optimizer, model=net, policy=policy)
    return run


def train(run: Run, step: int) -> None:
    """``extra`` is used in two steps of three, and ``odd`` only from the third step on."""
    run.model(batch(step * 8 + run.model.data_rank), extra=step % 3 != 0).backward()
    if step < 2:
        run.model.odd.zero_grad()
    run.optimizer.step()
    run.model.zero_grad()


def state_of(run: Run, step: int) -> dict[str, Any]:
    optimizer = get_optimizer_state_dict(run.model, run.optimizer)
    return {"model": get_model_state_dict(run.model), "optimizer": optimizer, "step": step}


def load(run: Run, path: Path) -> int:
    optimizer = get_optimizer_state_dict(run.model, run.optimizer, for_load=True)
    state = {"model": get_model_state_dict(run.model), "optimizer": optimizer, "step": -1}
    # What is in no file: state that the run which saved had not made yet.
    saved = " ".join(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    optimizer["state"] = {fqn: kept for fqn, kept in optimizer["state"].items() if f"optimizer.state.{fqn}." in saved}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, optimizer)
    return state["step"]


def compared(plain: Run, other: Run, stage: str) -> list[str]:
    return agree(f"{stage}: {problem}" for problem in differences(*Pair(plain, other)))[:3]


def saves_in_a_row(
    folder: Path,
    policy: OffloadPolicy,
    shard: models.ShardNet = models.shard_even,
    make: MakeOptimizer = adamw,
    tied: bool = False,
    count: int = 6,
) -> Iterator[str]:
    """Writers are held until somebody has to wait for them; at the end one of the files is trained on."""
    plain, run = (new_run(shard, make, chosen, tied=tied) for chosen in (None, policy))
    group = dist.new_group(backend="gloo")
    stager, expected = ArenaStager(run.optimizer), Expected()
    with pytest.MonkeyPatch.context() as patch:
        waits = Waits(patch)
        for step in range(count):
            path = folder / str(step)
            expected.note(path, state_of(run, step))
            writer = waits.hold(path)
            dcp.async_save(
                state_of(run, step), storage_writer=writer, async_stager=stager, process_group=group
            ).add_done_callback(lambda future: future.result())
            writer.in_use = True
            before = waits.count
            for side in (plain, run):
                train(side, step)
            if step and (waits.count == before) != (policy.snapshot_bytes == ALL):
                yield f"step {step} has waited {waits.count - before} times"
            yield from compared(plain, run, f"after step {step}")
        waits.let_go()
        stager.close()
    dist.barrier()
    yield from expected.problems()
    resumed = new_run(shard, make, NONE, seed=1, tied=tied)
    first = load(resumed, folder / "4")
    for step in range(first, count):
        train(resumed, step)
    yield from compared(plain, resumed, f"resumed at step {first}")


def fails_on_one_rank(folder: Path, policy: OffloadPolicy) -> Iterator[str]:
    """All ranks are told, none of them waits for ever, and the next save is complete."""
    plain, run = (new_run(models.shard_even, adamw, chosen) for chosen in (None, policy))
    group = dist.new_group(backend="gloo")
    stager, kept = ArenaStager(run.optimizer), []
    for step in range(4):
        for side in (plain, run):
            train(side, step)
        kind = FailingWriter if dist.get_rank() == dist.get_world_size() - 1 else HeldWriter
        writer = kind(folder / f"bad{step}")
        future = dcp.async_save(state_of(run, step), storage_writer=writer, async_stager=stager, process_group=group)
        writer.let_go()
        if step % 2:
            for side in (plain, run):
                train(side, step + 10)
        kept.append(future)
        if "no space left on device" not in str(future.exception()):
            yield f"save {step} ended with {future.exception()!r}"
    yield from compared(plain, run, "after saves that failed")
    state = copied(state_of(run, 4))
    dcp.async_save(state_of(run, 4), checkpoint_id=folder / "good", async_stager=stager, process_group=group).result()
    yield from not_the_same(state, loaded(folder / "good", state))
    if list(folder.glob("bad*/.metadata")):
        yield "a checkpoint that failed looks complete"


STAGERS: dict[str, Callable[[], Any]] = {
    "DefaultStager": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "BlockingAsyncStager": BlockingAsyncStager,
    "ArenaStager that does not know the optimizer": ArenaStager,
}


def copies_of_other_stagers(folder: Path) -> Iterator[str]:
    run, group, expected = new_run(models.shard_even, adamw, NONE), dist.new_group(backend="gloo"), Expected()
    for number, make in enumerate(STAGERS.values()):
        train(run, number)
        expected.note(folder / str(number), state_of(run, number))
        writer, stager = HeldWriter(folder / str(number)), make()
        future = dcp.async_save(state_of(run, number), storage_writer=writer, async_stager=stager, process_group=group)
        train(run, number + 5)
        writer.let_go()
        future.result()
        stager.close()
    yield from expected.problems()


def sequence_numbers() -> list[int]:
    """Grows with every collective of any process group, barriers too."""
    return [group._get_sequence_number_for_group() for group in distributed_c10d._world.pg_map]


def staging_issues_no_collective(shard: models.ShardNet) -> Iterator[str]:
    run = new_run(shard, adamw, SPARE)
    train(run, 0)
    state, stager = state_of(run, 1), ArenaStager(run.optimizer)
    before = sequence_numbers()
    with CommDebugMode() as comms:
        stager.stage(state)
    if comms.get_total_counts() or sequence_numbers() != before:
        yield f"staging has issued {dict(comms.get_comm_counts())}, {before} became {sequence_numbers()}"
    with CommDebugMode() as comms:
        train(run, 1)
    if not comms.get_total_counts() or sequence_numbers() == before:
        yield "a step is without collectives, it seems"


def cases(folder: Path, world_size: int) -> dict[str, Callable[[], Iterator[str]]]:
    found: dict[str, Any] = {
        "all": partial(saves_in_a_row, policy=SPARE, count=10),
        "none": partial(saves_in_a_row, policy=NONE),
        "fails, none": partial(fails_on_one_rank, policy=NONE),
    }
    if world_size == 2:
        found |= {
            "half": partial(saves_in_a_row, policy=HALF),
            "resident": partial(saves_in_a_row, policy=KEPT),
            "bfloat16": partial(saves_in_a_row, policy=SPARE, shard=models.shard_bfloat16),
            "tied": partial(saves_in_a_row, policy=SPARE, tied=True),
            "Muon": partial(saves_in_a_row, policy=SPARE, make=muon),
            "fails, all": partial(fails_on_one_rank, policy=SPARE),
            "other stagers": copies_of_other_stagers,
        }
    return {name: partial(case, folder / f"case{number}") for number, (name, case) in enumerate(found.items())} | {
        "collectives": partial(staging_issues_no_collective, models.shard_even)
    }


def run_all(rank: int, world_size: int, folder: Path) -> None:
    del rank
    run_cases(cases(folder, world_size))


@world_sizes(3, 2)
def test_every_file_is_the_state_of_its_call(world_size: int, tmp_path: Path) -> None:
    spawn(run_all, world_size, tmp_path, tmp_path)
