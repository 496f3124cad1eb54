"""Random models, shardings, policies and step patterns, against the plain optimizer.

All ranks are simulated in this process, one after the other, under torch's fake process group: sharding needs no
communication, and gradients are made locally. Optimizers that communicate in their step are tested elsewhere.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_offload import OffloadPolicy, remove_offload
from tests.distributed.launch import DEVICE_TYPE
from tests.parity import Pair, Run, assert_at_home, attach, differences, local
from tests.policies import with_share

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Training:
    """One drawn case. ``gradients[step][i]`` says whether parameter ``i`` has a gradient in that step."""

    mesh_shape: tuple[int, ...]
    shapes: list[tuple[int, ...]]
    columns: bool
    dtype: torch.dtype
    optimizer: str
    options: dict[str, Any]
    group_of: list[int]
    policy: OffloadPolicy
    gradients: list[list[bool]]
    attach_at: int
    remove_at: int


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {}),
    "AdamW amsgrad": (optim.AdamW, {"amsgrad": True}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9}),
    "SGD": (optim.SGD, {}),
    "Adagrad": (optim.Adagrad, {}),
    "Adamax": (optim.Adamax, {}),
    "Adadelta": (optim.Adadelta, {}),
    "ASGD": (optim.ASGD, {}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
}


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    mesh_shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (2, 2), (2, 3)]))
    rows, columns = st.integers(1, 24), st.integers(1, 60)
    vector = st.tuples(st.one_of(st.integers(1, 12), st.integers(1, 1500)))
    shape = st.one_of(vector, st.tuples(rows, columns), st.tuples(rows, st.integers(1, 5), columns))
    shapes = draw(st.lists(shape, min_size=1, max_size=5))
    name = draw(st.sampled_from(list(OPTIMIZERS)))
    can_be_fused = name.startswith(("Adam ", "AdamW")) or name == "Adam"
    implementations = [{}, {"foreach": True}, {"foreach": False}, *([{"fused": True}] * can_be_fused)]
    bucket_bytes = draw(st.sampled_from([1024, 1500, 4096]))
    steps = draw(st.integers(2, 6))
    pattern = st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes))
    return Training(
        mesh_shape,
        shapes,
        draw(st.booleans()),
        draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])),
        name,
        draw(st.sampled_from(implementations)),
        draw(st.lists(st.integers(0, 1), min_size=len(shapes), max_size=len(shapes))),
        with_share(
            bucket_bytes=bucket_bytes,
            passing=bucket_bytes * draw(st.integers(2, 6)),
            staying=draw(st.sampled_from([0, 0, 700, 5000])),
        ),
        draw(st.lists(st.one_of(st.just([True] * len(shapes)), pattern), min_size=steps, max_size=steps)),
        draw(st.integers(0, 2)),
        draw(st.integers(2, 9)),
    )


@contextlib.contextmanager
def pretend_rank(rank: int, mesh_shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """A process group in which this process is ``rank`` and nobody else exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
    try:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        yield init_device_mesh(DEVICE_TYPE, mesh_shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def make_run(training: Training, mesh: DeviceMesh) -> Run:
    model = nn.Module()
    generator = torch.Generator().manual_seed(0)
    for number, shape in enumerate(training.shapes):
        values = torch.randn(shape, generator=generator).to(DEVICE_TYPE, training.dtype)
        model.register_parameter(f"p{number}", nn.Parameter(values))
    ranks = mesh.shape[-1]

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if training.columns and param.dim() > 1 and param.shape[1] % ranks == 0 else None

    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    cls, options = OPTIMIZERS[training.optimizer]
    groups = [{"params": [], "lr": 1e-2}, {"params": [], "lr": 3e-3}]
    for param, group in zip(model.parameters(), training.group_of, strict=True):
        groups[group]["params"].append(param)
    optimizer = cls([group for group in groups if group["params"]], **options, **training.options)
    return Run(model, optimizer, torch.device(DEVICE_TYPE), training.dtype)


def set_gradients(run: Run, training: Training, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for param, has_gradient in zip(run.model.parameters(), training.gradients[step], strict=True):
        values = torch.randn(local(param).shape, generator=generator).to(DEVICE_TYPE, training.dtype)
        param.grad = like(param, values) if has_gradient else None


def like(param: Tensor, values: Tensor) -> DTensor:
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def train_rank(training: Training, rank: int, mesh: DeviceMesh) -> list[str]:
    """What differs on this rank; else the names of its parameters with state, in order."""
    pair = Pair(make_run(training, mesh), make_run(training, mesh))
    for step in range(len(training.gradients)):
        if step == training.attach_at:
            attach(pair.offloaded.optimizer, model=pair.offloaded.model, policy=training.policy)
        if step == training.remove_at and pair.offloaded.is_offloaded:
            remove_offload(pair.offloaded.optimizer)
        for run in pair:
            set_gradients(run, training, step, rank)
            run.optimizer.step()
        found = list(differences(*pair))
        assert not found, f"rank {rank}, step {step}: {found[:3]}"
        if pair.offloaded.is_offloaded:
            assert_at_home(pair.offloaded.optimizer)
    names = {param: name for name, param in pair.offloaded.model.named_parameters()}
    return [names[param] for param in pair.offloaded.optimizer.state]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(trainings())
def test_random_trainings_are_the_same_with_and_without_offload(training: Training) -> None:
    note(f"{training}")
    orders = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        for rank in range(math.prod(training.mesh_shape)):
            with pretend_rank(rank, training.mesh_shape) as mesh:
                orders.append(train_rank(training, rank, mesh))
    assert all(order == orders[0] for order in orders), f"ranks have state in different orders: {orders}"
