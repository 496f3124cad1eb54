"""Checkpoint metadata and state dicts are this rank's own affair: no collective, whatever the sharding.

Ranks are alone, in a process group of our own that raises: also an attempt that somebody catches is noticed.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import all_reduce
from torch.futures import Future
from torch.optim import Optimizer

from fsdp_offload import remove_offload
from fsdp_offload.checkpoint import (
    ArenaStager,
    SavePlanner,
    chunks_of,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
    with_chunks,
)
from tests.distributed import models
from tests.distributed.launch import agree, spawn, this_device
from tests.distributed.models import Net, batch, build, decay_groups
from tests.distributed.test_sharded_checkpoints import TINY
from tests.parity import attach, local, take_step
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed


@dataclass
class Subject:
    """A model whose optimizer has state after two steps, and another optimizer that has none yet."""

    net: Net
    optimizer: Optimizer

    def __post_init__(self) -> None:
        self.params = [param.detach() for group in self.optimizer.param_groups for param in group["params"]]
        self.fresh, self.plain = fresh, _ = [optim.AdamW(decay_groups(self.net)) for _ in range(2)]
        attach(fresh, model=self.net, policy=TINY)
        self.get, self.get_fresh = (partial(get_optimizer_state_dict, self.net, one) for one in (self.optimizer, fresh))
        self.set, self.set_fresh = (partial(set_optimizer_state_dict, self.net, one) for one in (self.optimizer, fresh))

    def plan_a_save(self) -> None:
        planner = SavePlanner()
        planner.set_up_planner({"model": self.net.state_dict(), "optimizer": self.get()})
        assert planner.create_local_plan().items

    def load_in_place(self, *, offload: bool = True) -> None:
        optimizer = self.fresh if offload else self.plain
        state = get_optimizer_state_dict(self.net, optimizer, for_load=True)
        for values in state["state"].values():
            for value in values.values():
                local(value).fill_(1)
        set_optimizer_state_dict(self.net, optimizer, state)


FLAT = {"flatten_optimizer_state_dict": True}

# What must not issue a collective: a line for each. Subjects have just been through a forward without a backward, after
# which FSDP2's root is still gathered.
ACTIONS: dict[str, Callable[[Subject], Any]] = {
    "chunks_of": lambda it: [chunks_of(param) for param in it.params],
    "chunks_of, a flat range": lambda it: [chunks_of(param, (0, local(param).numel())) for param in it.params],
    "with_chunks": lambda it: [with_chunks(param) for param in it.params],
    "write items": lambda it: [with_chunks(param).__create_write_items__("p", param) for param in it.params],
    "chunk list": lambda it: [with_chunks(param).__create_chunk_list__() for param in it.params],
    "get": lambda it: it.get(),
    "get, flattened": lambda it: it.get(**FLAT),
    "get, fresh": lambda it: it.get_fresh(),
    "get for a load": lambda it: it.get(for_load=True),
    "get for a load, flattened": lambda it: it.get(for_load=True, **FLAT),
    "get for a load, fresh": lambda it: it.get_fresh(for_load=True),
    "stage": lambda it: ArenaStager(it.optimizer).stage({"model": it.net.state_dict(), "optimizer": it.get()}),
    "plan a save": lambda it: it.plan_a_save(),
    "set": lambda it: it.set(it.get()),
    "set, flattened": lambda it: it.set(it.get(**FLAT)),
    "set, not strict": lambda it: it.set(it.get(**FLAT), strict=False),
    "set into a fresh one": lambda it: it.set_fresh(it.get(**FLAT)),
    "set what was loaded in place": lambda it: it.load_in_place(),
    "set what was loaded in place, plain": lambda it: it.load_in_place(offload=False),
}


LAYOUTS: dict[str, models.ShardNet] = {
    "rows": models.shard_even,
    "columns": models.shard_columns,
    "HSDP": models.shard_hybrid,
    "TP and FSDP": models.shard_tensor_parallel,
}


def look_at(net: Net) -> None:
    """Leaves the root gathered."""
    with torch.no_grad():
        net(batch(9))


# Ranks on their own ---------------------------------------------------------------------------------------------------


class RefusingGroup(dist.ProcessGroup):
    """Does nothing while models are built, and refuses everything within :func:`refusing`."""

    refuses: list[str] | None = None  # what has been refused; None: nothing is

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802  # torch names it so
        return "refusing"

    @classmethod
    def called(cls, name: str) -> Any:
        if cls.refuses is not None:
            cls.refuses.append(name)
            raise AssertionError(f"collective {name} was called")
        done: Future[Any] = Future()
        done.set_result(None)
        return torch._C._distributed_c10d._create_work_from_future(done)


# By the names of torch 2.11 and of 2.13. What is not named here raises always: the base class finds no backend for it.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "send", "recv", "recv_anysource"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
)
for _name in _COLLECTIVES:
    setattr(RefusingGroup, _name, lambda self, *args, _name=_name, **kwargs: self.called(_name))


@contextmanager
def refusing() -> Iterator[list[str]]:
    RefusingGroup.refuses = refused = []
    try:
        yield refused
    finally:
        RefusingGroup.refuses = None


@contextmanager
def alone(rank: int, world_size: int, folder: Path) -> Iterator[None]:
    """In a process group in which nothing ever arrives from the others."""
    dist.destroy_process_group()
    devices = ["cpu", "cuda"]
    dist.Backend.register_backend("refusing", lambda _, number, size, __: RefusingGroup(number, size), devices=devices)
    dist.init_process_group("refusing", store=dist.HashStore(), rank=rank, world_size=world_size)
    yield
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'end'}", rank=rank, world_size=world_size)


def run_refusing(rank: int, world_size: int, folder: Path) -> None:
    with alone(rank, world_size, folder):
        problems = list(refuses_what_people_use())
        for name, shard in LAYOUTS.items():
            problems += [f"{name}: {problem}" for problem in gets_along_without_the_others(shard)]
    found = agree(problems)
    assert not found, "\n".join(found)


def refuses_what_people_use() -> Iterator[str]:
    """Collectives on tensors, on objects, functional ones, and those of DTensor and FSDP2."""
    net = build(models.shard_even)
    ones = torch.ones(1, device=this_device())
    attempts: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(ones),
        "barrier": dist.barrier,
        "all_gather_object": lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
        "functional": lambda: all_reduce(ones, "sum", dist.group.WORLD),
        "full_tensor": net.embed.weight.full_tensor,
        "forward": lambda: look_at(net),
    }
    for name, attempt in attempts.items():
        with refusing() as refused, suppress(Exception):  # torch wraps what a group raises in errors of its own
            attempt()
        if len(refused) != 1:
            yield f"{name} was not refused"


def gets_along_without_the_others(shard: models.ShardNet) -> Iterator[str]:
    net = build(shard)
    with refusing() as refused:
        optimizer = attach(optim.AdamW(decay_groups(net)), model=net, policy=TINY)
        take_step(optimizer, 2)
        for name, action in ACTIONS.items():
            net.reshard()
            subject = Subject(net, optimizer)
            RefusingGroup.refuses = None  # a forward without a backward, of nonsense
            look_at(net)
            RefusingGroup.refuses = refused
            try:
                action(subject)
            except Exception:  # noqa: BLE001  # reported with the others
                yield f"{name}: {traceback.format_exc(limit=-6)}"
        optimizer.synchronize()
        optimizer.offload_report()
        state = {param: local(state["exp_avg"]).clone() for param, state in optimizer.state.items()}
        net.reshard()
        remove_offload(optimizer)
    if refused:
        yield f"{refused} were called"
    if any(local(param).numel() and not moment.any() for param, moment in state.items()):
        yield "there was no training"


@world_sizes(2, 4)
def test_ranks_get_along_without_each_other(world_size: int, tmp_path: Path) -> None:
    spawn(run_refusing, world_size, tmp_path, tmp_path)
