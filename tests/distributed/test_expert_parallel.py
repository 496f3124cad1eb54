"""Expert parallelism: local experts have the same names on every rank; all are saved, or none and an error says so."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import (
    Experts,
    get_optimizer_state_dict,
    load,
    save,
    set_optimizer_state_dict,
    with_parameter_chunks,
)
from tests.async_writers import read_checkpoint
from tests.distributed.launch import mesh, spawn_cases, this_device
from tests.distributed.megatron_model import Module
from tests.parity import same_value

pytestmark = pytest.mark.distributed

NUM_EXPERTS = 4
LAYER = "decoder.layers.0.mlp"
POLICY = OffloadPolicy(bucket_bytes=1 << 12)
KINDS = {
    "grouped": "experts.linear_fc1.{1}{0}",
    "sequential": "experts.local_experts.{0}.linear_fc1.{1}",
    "a list": "experts.{0}.up_proj.{1}",
}


def values_of(name: str) -> Tensor:
    """What a parameter of that global name holds: everywhere something else."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(*((6, 4) if "weight" in name else (6,)), generator=generator)


class Layer(Module):
    """A router and this rank's experts, grouped or one module for each, over a mesh of data and expert parallelism."""

    def __init__(self, ep: int, kind: str, *, mesh_name: str) -> None:
        super().__init__()
        dp = dist.get_world_size() // ep
        self.mesh = mesh(dp, ep, names=(f"dp_{mesh_name}", f"ep_{mesh_name}"))
        self.experts = Experts.of_rank(self.mesh.get_local_rank(1), NUM_EXPERTS // ep)
        local = [
            KINDS[kind].format(number, part) for number in range(self.experts.count) for part in ("weight", "bias")
        ]
        for name in (f"{LAYER}.{one}" for one in ("router.weight", *local)):
            self._add(name, values_of(self.experts.global_name(name)), is_expert="experts" in name)

    def _add(self, name: str, whole: Tensor, *, is_expert: bool) -> None:
        # As in Megatron: an expert is sharded over the data-parallel ranks that have it.
        over = self.mesh[self.mesh.mesh_dim_names[0]] if is_expert else self.mesh
        placements = [Shard(0)] if is_expert else [Shard(0), Replicate()]
        made = nn.Parameter(distribute_tensor(whole.to(this_device()), over, placements, src_data_rank=None))
        path, _, last = name.rpartition(".")
        self.at(path).register_parameter(last, made)


def trained(ep: int, kind: str, *, mesh_name: str, steps: int) -> tuple[Layer, torch.optim.Optimizer]:
    model = Layer(ep, kind, mesh_name=mesh_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    for step in range(steps):
        for param in model.parameters():
            param.grad = param.detach() * (step + 1)
        optimizer.step()
    return model, optimizer


def state_of(model: Layer, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    state = get_optimizer_state_dict(
        model, optimizer, flatten_optimizer_state_dict=True, experts=model.experts, **options
    )
    return {"model": with_parameter_chunks(model, model.state_dict(), experts=model.experts), "optimizer": state}


@pytest.mark.parametrize(
    ("world_size", "ep"),
    [(4, 2), pytest.param(2, 2, marks=pytest.mark.long), pytest.param(4, 4, marks=pytest.mark.long)],
)
def test_all_experts_are_saved_or_none(world_size: int, ep: int, tmp_path: Path) -> None:
    both = {"numbered": numbered, "local names": refused}.items()
    cases = {
        f"{what}, {kind}": partial(case, tmp_path / f"{what}{kind}", ep, kind) for kind in KINDS for what, case in both
    }
    spawn_cases(cases, world_size, tmp_path)


def numbered(folder: Path, ep: int, kind: str) -> Iterator[str]:
    model, optimizer = trained(ep, kind, mesh_name=f"a{ep}{kind}", steps=2)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    # In one process, without expert parallelism: all of them are there, model and state.
    stored = read_checkpoint(folder)
    names = [f"{LAYER}.{KINDS[kind].format(n, part)}" for n in range(NUM_EXPERTS) for part in ("weight", "bias")]
    for name in [*names, f"{LAYER}.router.weight"]:
        param = nn.Parameter(values_of(name).to(this_device()))
        plain = torch.optim.AdamW([param], lr=0.1, foreach=False)
        for step in range(2):
            param.grad = param.detach() * (step + 1)
            plain.step()
        if not torch.equal(stored[f"model.{name}"], param.detach().cpu()):
            yield f"{name} was saved wrongly"
        for key in ("exp_avg", "exp_avg_sq"):
            if not torch.equal(stored[f"optimizer.state.{name}.{key}"], plain.state[param][key].cpu()):
                yield f"{key} of {name} was saved wrongly"
    # Through other sizes of expert parallelism, and all of it is what it was.
    sizes = [size for size in (1, 4, 2) if dist.get_world_size() % size == 0]
    for number, other in enumerate(sizes):
        model, optimizer = trained(other, kind, mesh_name=f"m{number}{ep}{kind}", steps=0)
        for param in model.parameters():
            param.data.zero_()
        state = state_of(model, optimizer, for_load=True)
        load(state, checkpoint_id=folder if number == 0 else folder / str(number - 1))
        set_optimizer_state_dict(model, optimizer, state["optimizer"], experts=model.experts)
        save(state_of(model, optimizer), checkpoint_id=folder / str(number))
        again = read_checkpoint(folder / str(number))
        yield from (f"ep {other}: {key}" for key in stored if not same_value(stored[key], again[key]))


def refused(folder: Path, ep: int, kind: str) -> Iterator[str]:
    """Before there is a state dict: whatever it would be saved with, it is too late then. To load into, too."""
    model, optimizer = trained(ep, kind, mesh_name=f"b{ep}{kind}", steps=1)
    flat: dict[str, Any] = {"flatten_optimizer_state_dict": True}
    saved = get_optimizer_state_dict(model, optimizer, **flat, experts=model.experts)
    line = r"experts=Experts.of_rank(expert_parallel_rank, num_local_experts)"
    for what, (make, hint) in {
        "model": (lambda: with_parameter_chunks(model, model.state_dict()), line),
        "nested": (lambda: get_optimizer_state_dict(model, optimizer), line),
        "flattened": (lambda: get_optimizer_state_dict(model, optimizer, **flat), line),
        "fsdp_dtensor": (lambda: get_optimizer_state_dict(model, optimizer, fsdp_dtensor=True), line),
        "for_load": (lambda: get_optimizer_state_dict(model, optimizer, **flat, for_load=True), line),
        "set": (lambda: set_optimizer_state_dict(model, optimizer, saved), line),
        "groups": (
            lambda: get_optimizer_state_dict(model, optimizer, experts=model.experts),
            "flatten_optimizer_state_dict=True",
        ),
    }.items():
        try:
            make()
            yield f"{what}: not refused"
        except ValueError as error:
            if hint not in str(error) or "router" in str(error):
                yield f"{what}: {error}"
    set_optimizer_state_dict(model, optimizer, saved, experts=model.experts)
