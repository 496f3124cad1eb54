"""Experts as Megatron-FSDP leaves them: expert, data and tensor parallelism at once, slices uneven, empty, in mid-row.

Saved fused and split, model and state, and loaded at other sizes of all three, bit by bit. Under names that several
ranks have, none is saved, and an error says so.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_tools import merge_state_dict, preset, split_state_dict
from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import (
    Experts,
    get_optimizer_state_dict,
    load,
    save,
    set_optimizer_state_dict,
    with_parameter_chunks,
)
from tests.distributed.launch import DEVICE_TYPE, mesh, spawn, unless_refused
from tests.distributed.megatron_model import Layout, Module, begin_state, model_state, parameter, wrong_values

pytestmark = pytest.mark.distributed

NUM_EXPERTS = 4
MLP = "module.decoder.layers.0.mlp"
DENSE: dict[str, tuple[tuple[int, ...], int | None]] = {
    f"{MLP}.router.weight": ((5, 4), None),
    f"{MLP}.shared_experts.linear_fc1.weight": ((16, 4), 0),
    f"{MLP}.shared_experts.linear_fc2.weight": ((4, 8), 1),
}
EXPERT: dict[str, tuple[tuple[int, ...], int | None]] = {
    f"{MLP}.experts.linear_fc1.weight": ((16, 4), 0),
    f"{MLP}.experts.linear_fc1.bias": ((16,), 0),
    f"{MLP}.experts.linear_fc2.weight": ((4, 8), 1),
}
SIZES = [  # ep, dp, tp, slices
    (2, 2, 1, "empty first"),
    (1, 3, 1, "uneven"),
    (2, 2, 1, "in mid-row"),
    (4, 1, 1, "even"),
    (1, 2, 2, "one has all"),
    (2, 1, 2, "even"),
]


class Model:
    """Parameters of this rank, their layouts, and what each has to hold."""

    def __init__(self, ep: int, dp: int, tp: int, kind: str, *, zeros: bool, parted: bool) -> None:
        dense = Layout(mesh(ep * dp, tp, names=("dp", "tp")), kind if ep * dp > 1 else "even")
        whole = mesh(ep, dp, tp, names=("ep", "edp", "etp"))
        # As Megatron's: a mesh of this rank's experts alone, whose dimensions are called as those of the others.
        ranks = whole.mesh[whole.get_local_rank("ep")]
        meshes = [
            torch.distributed.device_mesh.DeviceMesh(DEVICE_TYPE, whole.mesh[number], mesh_dim_names=("dp", "tp"))
            for number in range(ep)
        ]
        own = next(one for one in meshes if torch.equal(one.mesh, ranks))
        expert = Layout(own, kind if dp > 1 else "even")
        self.tp, self.parted = tp, parted
        self.experts = Experts.of_rank(whole.get_local_rank("ep"), NUM_EXPERTS // ep)
        self.module = Module()
        self.layouts: dict[str, tuple[Layout, int | None, tuple[int, ...]]] = {
            name: (dense, tp_dim, shape) for name, (shape, tp_dim) in DENSE.items()
        }
        for name, (shape, tp_dim) in EXPERT.items():
            self.layouts |= {f"{name}{number}": (expert, tp_dim, shape) for number in range(self.experts.count)}
        for name, (layout, tp_dim, _) in self.layouts.items():
            value = self.whole(name, 0)
            path, _, last = f"module.{name}".rpartition(".")
            made = parameter(layout, torch.zeros_like(value) if zeros else value, tp_dim, None)
            self.module.at(path).register_parameter(last, made)
        self.params = {name: self.module.get_parameter(f"module.{name}") for name in self.layouts}
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.5)
        offload_optimizer(self.optimizer, policy=OffloadPolicy(bucket_bytes=1024))
        if not zeros:
            begin_state(self.optimizer, self.params, self.own)

    def whole(self, name: str, number: int) -> Tensor:
        """The parameter, or a moment of it: numbers that no other has."""
        generator = torch.Generator().manual_seed(10 * sum(self.experts.global_name(name).encode()) + number)
        whole = torch.randn(self.layouts[name][2], generator=generator)
        if not self.parted or "linear_fc1" not in name:
            return whole
        gate, up = (half.chunk(self.tp) for half in whole.chunk(2))  # each tensor-parallel rank has a part of both
        return torch.cat([part for parts in zip(gate, up, strict=True) for part in parts])

    def own(self, name: str, number: int) -> Tensor:
        layout, tp_dim, _ = self.layouts[name]
        return layout.own(self.whole(name, number), tp_dim)

    def state(self, *, for_load: bool = False) -> tuple[Any, Any]:
        """As Megatron has them, with more of ``module.`` in front of the optimizer's names."""
        options: Any = {"for_load": for_load, "fsdp_dtensor": True, "experts": self.experts}
        found = get_optimizer_state_dict(self.module, self.optimizer, **options)
        optim: Any = {part: {f"module.{name}": values for name, values in of.items()} for part, of in found.items()}
        return with_parameter_chunks(self.module, model_state(self.module), experts=self.experts), optim


@pytest.mark.parametrize("parted", [False, True], ids=["fused", "split"])
def test_experts_go_through_other_sizes(parted: bool, tmp_path: Path) -> None:
    legs = enumerate(SIZES if parted else SIZES[:3])
    for ranks, of_ranks in itertools.groupby(legs, lambda leg: math.prod(leg[1][:3])):
        spawn(run_legs, ranks, tmp_path, tmp_path, [*of_ranks], parted)


def run_legs(
    rank: int, world_size: int, folder: Path, legs: list[tuple[int, tuple[int, int, int, str]]], parted: bool
) -> None:
    for number, sizes in legs:
        run_leg(folder, number, *sizes, parted=parted)


def run_leg(folder: Path, number: int, ep: int, dp: int, tp: int, kind: str, *, parted: bool) -> None:
    model = Model(ep, dp, tp, kind, zeros=number > 0, parted=parted)
    rules, sizes = preset("megatron-swiglu"), {"tp_size": tp}
    if number:
        values, optim = model.state(for_load=True)
        if parted:
            values, optim = split_state_dict(values, optim, rules, values=sizes)
        load({"model": values, "optimizer": optim}, checkpoint_id=folder / str(number - 1))
        if parted:
            _, optim = merge_state_dict(values, optim, rules, values=sizes)
        set_optimizer_state_dict(model.module, model.optimizer, optim, experts=model.experts)
    problems = [*wrong_values(model.optimizer, model.params, model.own), *([] if number else refusals(model))]
    assert not problems, problems
    values, optim = model.state()
    assert {*optim["param_to_group_meta"]} == {f"module.module.{model.experts.global_name(n)}" for n in model.params}
    if parted:
        values, optim = split_state_dict(values, optim, rules, values=sizes)
    save({"model": values, "optimizer": optim}, checkpoint_id=folder / str(number))


def refusals(model: Model) -> Iterator[str]:
    """Before there is a state dict: whatever it would be saved with, it is too late then. To load into, too."""
    get = partial(get_optimizer_state_dict, model.module, model.optimizer)
    flat: dict[str, Any] = {"flatten_optimizer_state_dict": True}
    saved = get(**flat, experts=model.experts)
    unnumbered = [
        lambda: with_parameter_chunks(model.module, model_state(model.module)),
        *(partial(get, **options) for options in ({}, flat, {"fsdp_dtensor": True}, {**flat, "for_load": True})),
        lambda: set_optimizer_state_dict(model.module, model.optimizer, saved),
    ]
    line = "experts=Experts.of_rank(expert_parallel_rank, num_local_experts)"
    for action in unnumbered:
        yield from unless_refused(action, ValueError, "experts.linear_fc1", line)
    yield from unless_refused(lambda: get(experts=model.experts), ValueError, "flatten_optimizer_state_dict=True")
    set_optimizer_state_dict(model.module, model.optimizer, saved, experts=model.experts)
