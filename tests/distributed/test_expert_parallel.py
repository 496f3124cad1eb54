"""Expert parallelism: local experts have the same names on every rank; all are saved, or none and an error says so."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import (
    Experts,
    SavePlanner,
    get_optimizer_state_dict,
    load,
    save,
    set_optimizer_state_dict,
    with_chunks,
    with_parameter_chunks,
)
from tests.distributed.launch import agree, mesh, run_cases, spawn, this_device

pytestmark = pytest.mark.distributed

NUM_EXPERTS = 4
LAYER = "decoder.layers.0.mlp"
POLICY = OffloadPolicy(bucket_bytes=1 << 12)


def values_of(name: str) -> Tensor:
    """What a parameter of that global name holds: everywhere something else."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(*((6, 4) if "weight" in name else (6,)), generator=generator)


class Layer(nn.Module):
    """A router and this rank's experts, grouped or one module for each, over a mesh of data and expert parallelism."""

    def __init__(self, ep: int, *, grouped: bool, mesh_name: str) -> None:
        super().__init__()
        dp = dist.get_world_size() // ep
        self.name = mesh_name
        self.mesh = mesh(dp, ep, names=(f"dp_{mesh_name}", f"ep_{mesh_name}"))
        self.experts = Experts.of_rank(self.mesh.get_local_rank(1), NUM_EXPERTS // ep)
        numbers = range(self.experts.count)
        names = [f"{LAYER}.router.weight"]
        for number in numbers:
            for kind in ("weight", "bias"):
                one = f"linear_fc1.{kind}{number}" if grouped else f"local_experts.{number}.linear_fc1.{kind}"
                names.append(f"{LAYER}.experts.{one}")
        for name in names:
            self._add(name, values_of(self.experts.global_name(name)), is_expert="experts" in name)

    def _add(self, name: str, whole: Tensor, *, is_expert: bool) -> None:
        # As in Megatron: an expert is sharded over the data-parallel ranks that have it.
        over = self.mesh[self.mesh.mesh_dim_names[0]] if is_expert else self.mesh
        placements = [Shard(0)] if is_expert else [Shard(0), Replicate()]
        made = nn.Parameter(distribute_tensor(whole.to(this_device()), over, placements, src_data_rank=None))
        *path, last = name.split(".")
        holder: nn.Module = self
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = getattr(holder, part)
        holder.register_parameter(last, made)


def trained(ep: int, *, grouped: bool, mesh_name: str, steps: int) -> tuple[Layer, torch.optim.Optimizer]:
    model = Layer(ep, grouped=grouped, mesh_name=mesh_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    for step in range(steps):
        for param in model.parameters():
            param.grad = param.detach() * (step + 1)
        optimizer.step()
    return model, optimizer


def state_of(model: Layer, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    # Nested, the groups would be lists of names that are different on each rank.
    state = get_optimizer_state_dict(model, optimizer, flatten_optimizer_state_dict=True, **options)
    return {"model": model.state_dict(), "optimizer": state}


@pytest.mark.parametrize(
    ("world_size", "ep"),
    [(4, 2), pytest.param(2, 2, marks=pytest.mark.long), pytest.param(4, 4, marks=pytest.mark.long)],
)
def test_all_experts_are_saved_or_none(world_size: int, ep: int, tmp_path: Path) -> None:
    spawn(run_all_or_none, world_size, tmp_path, tmp_path, ep)


def run_all_or_none(rank: int, world_size: int, folder: Path, ep: int) -> None:
    del rank, world_size
    run_cases(
        {
            f"{what}, grouped={grouped}": lambda c=case, g=grouped, w=what: c(folder / f"{w}{g}", ep, g)
            for grouped in (True, False)
            for what, case in {
                "numbered": numbered,
                "local names": refused,
                "plainly saved": plainly_refused,
                "step beside": refused_counter,
            }.items()
        }
    )


def numbered(folder: Path, ep: int, grouped: bool) -> Iterator[str]:
    model, optimizer = trained(ep, grouped=grouped, mesh_name=f"a{ep}{grouped}", steps=2)
    save(model.experts.number(state_of(model, optimizer)), checkpoint_id=folder)
    # In one process, without expert parallelism: all of them are there, model and state.
    stored = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(stored, checkpoint_id=folder, no_dist=True)
    fused = [f"experts.linear_fc1.{{}}{n}" for n in range(NUM_EXPERTS)]
    single = [f"experts.local_experts.{n}.linear_fc1.{{}}" for n in range(NUM_EXPERTS)]
    names = [f"{LAYER}.{n.format(kind)}" for n in (fused if grouped else single) for kind in ("weight", "bias")]
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


def refused(folder: Path, ep: int, grouped: bool) -> Iterator[str]:
    model, optimizer = trained(ep, grouped=grouped, mesh_name=f"b{ep}{grouped}", steps=1)
    nested = get_optimizer_state_dict(model, optimizer)
    renumber = "Experts have local numbers"
    for what, (state, hint) in {
        "model": ({"model": model.state_dict()}, renumber),
        "state": ({"optimizer": nested}, renumber),
        "flattened": ({"optimizer": state_of(model, optimizer)["optimizer"]}, renumber),
        "different groups": ({"optimizer": model.experts.number(nested)}, "flatten_optimizer_state_dict=True"),
    }.items():
        try:
            save(state, checkpoint_id=folder / what)
        except CheckpointException as error:
            message = str(error.failures[0])
            if hint not in message or "router" in message:
                yield f"{what}: {message}"
        else:
            yield f"{what}: saved, with the experts of one rank"
        if (folder / what / ".metadata").exists() or list((folder / what).glob("*.distcp")):
            yield f"{what}: something was written"


def plainly_refused(folder: Path, ep: int, grouped: bool) -> Iterator[str]:
    """torch's own save, with its own planner: state, and a model's values that carry their chunks."""
    model, optimizer = trained(ep, grouped=grouped, mesh_name=f"p{ep}{grouped}", steps=1)
    state = state_of(model, optimizer)
    carrying = with_parameter_chunks(model, state["model"])
    for what, values in {
        "model": {"model": carrying},
        "nested": {"optimizer": get_optimizer_state_dict(model, optimizer)["state"]},
        "flattened": {"optimizer": state["optimizer"]},
        "fsdp_dtensor": {"optimizer": get_optimizer_state_dict(model, optimizer, fsdp_dtensor=True)["state"]},
        "all": {**state, "model": carrying},
    }.items():
        try:
            dcp.save(values, checkpoint_id=folder / what)
        except CheckpointException as error:
            message = str(error.failures[0])
            if "fsdp_offload.checkpoint.Experts" not in message or f"{LAYER}.experts." not in message:
                yield f"{what}: {message}"
        else:
            yield f"{what}: saved, with the experts of one rank"
        if (folder / what / ".metadata").exists() or list((folder / what).glob("*.distcp")):
            yield f"{what}: something was written"
    names = {"model": carrying, "optimizer": state["optimizer"]}
    dcp.save(names, checkpoint_id=folder / "on purpose", planner=SavePlanner(allow_different=True))
    dcp.save(model.experts.number(names), checkpoint_id=folder / "plain")
    save(model.experts.number(names), checkpoint_id=folder / "ours")
    plain, ours = (dcp.FileSystemReader(folder / which).read_metadata() for which in ("plain", "ours"))
    if plain.state_dict_metadata != ours.state_dict_metadata:
        yield "the files say something else"
    if {type(index) for index in plain.storage_data} != {MetadataIndex}:
        yield "what finds collisions got into the file"
    # What is replicated over meshes is found to be, and saved once.
    same = {
        "experts.linear_fc1.weight0": with_chunks(distribute_tensor(torch.ones(6, 4), model.mesh["dp_" + model.name]))
    }
    dcp.save(same, checkpoint_id=folder / "same")


def refused_counter(folder: Path, ep: int, grouped: bool) -> Iterator[str]:
    """A plain tensor of which one rank's would be kept; on purpose, it may."""
    del ep, grouped
    state = {"seen": torch.tensor([dist.get_rank()])}
    try:
        save(state, checkpoint_id=folder / "no")
        yield "a plain tensor of one rank was saved"
    except CheckpointException as error:
        if "ranks 0 and 1 have different values" not in str(error):
            yield str(error)
    save(state, checkpoint_id=folder / "yes", planner=SavePlanner(allow_different=["se*"]))


@pytest.mark.parametrize("grouped", [True, False])
def test_a_checkpoint_goes_from_one_expert_parallel_size_to_others(grouped: bool, tmp_path: Path) -> None:
    """ep 2 → 1 → 4 → 2, bit by bit."""
    spawn(run_resized, 4, tmp_path, tmp_path, grouped)


def run_resized(rank: int, world_size: int, folder: Path, grouped: bool) -> None:
    del rank, world_size
    first = trained(2, grouped=grouped, mesh_name="first", steps=2)
    save(first[0].experts.number(state_of(*first)), checkpoint_id=folder / "0")
    for number, ep in enumerate((1, 4, 2)):
        model, optimizer = trained(ep, grouped=grouped, mesh_name=f"m{number}", steps=0)
        for param in model.parameters():
            param.data.zero_()
        state = model.experts.number(state_of(model, optimizer, for_load=True))
        load(state, checkpoint_id=folder / str(number))
        set_optimizer_state_dict(model, optimizer, model.experts.localize(state["optimizer"]))
        save(model.experts.number(state_of(model, optimizer)), checkpoint_id=folder / str(number + 1))
    problems = []
    for one, other in zip(first[0].parameters(), model.parameters(), strict=True):
        same = torch.equal(one.to_local(), other.to_local())
        for key in ("exp_avg", "exp_avg_sq"):
            same &= torch.equal(first[1].state[one][key].to_local(), optimizer.state[other][key].to_local())
        problems += [] if same and first[1].state[one]["step"] == optimizer.state[other]["step"] else ["changed"]
    found = agree(problems)
    assert not found, found


def test_the_guard_takes_replicas_for_replicas_and_adds_no_collective(tmp_path: Path) -> None:
    spawn(run_replicas, 4, tmp_path, tmp_path)


def run_replicas(rank: int, world_size: int, folder: Path) -> None:
    """Copies of a norm on tensor-parallel ranks: another mesh on each, the same bits; at other places in memory."""
    device_mesh = mesh(2, 2, names=("dp", "tp"))
    whole = torch.arange(40_000.0, dtype=torch.float64).view(200, 200).bfloat16()
    buffer = torch.zeros(whole.numel() + 8, dtype=torch.bfloat16)
    begin = rank % 2  # aligned on one rank, not on the other
    local = buffer[begin : begin + whole.numel() // 2].view(100, 200)
    norm = distribute_tensor(whole, device_mesh["dp"], [Shard(0)], src_data_rank=None)
    local.copy_(norm.to_local())
    norm._local_tensor = local
    values = {"norm": norm, "step": torch.tensor(3.0), "whole": distribute_tensor(whole, device_mesh, [Shard(0)] * 2)}
    counts = []
    for number, planner in enumerate((dcp.DefaultSavePlanner(), SavePlanner())):
        with CommDebugMode() as collectives:
            dcp.save(values, checkpoint_id=folder / str(number), planner=planner)
        counts.append(collectives.get_total_counts())
    assert counts[0] == counts[1] > 0, counts
    dcp.async_save(values, checkpoint_id=folder / "async", planner=SavePlanner()).result()
    dist.barrier()
    loaded = {key: torch.zeros_like(value) for key, value in values.items()}
    load(loaded, checkpoint_id=folder / "async")
    assert torch.equal(loaded["norm"].to_local(), local)
    assert world_size == 4


# Names that are not Megatron's, and meshes of one rank ----------------------------------------------------------------


def test_plain_saves_compare_what_ranks_outside_the_mesh_may_have(tmp_path: Path) -> None:
    """Nothing but the size of the mesh tells that another rank may have another tensor of that name."""
    spawn(run_meshes_of_one, 2, tmp_path, tmp_path)


def run_meshes_of_one(rank: int, world_size: int, folder: Path) -> None:
    over = mesh(world_size, 1, names=("ep", "dp"))["dp"]
    for is_replica in (False, True):
        model = nn.Module()
        value = torch.full((4, 5), 0.0 if is_replica else float(rank), device=this_device())
        model.up = nn.Parameter(distribute_tensor(value, over, [Shard(0)], src_data_rank=None))
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.0, 0.0))
        offload_optimizer(optimizer, model=model, policy=POLICY)
        model.up.grad = model.up.detach() + 1
        optimizer.step()
        optimizer_state = get_optimizer_state_dict(model, optimizer)
        average = with_parameter_chunks(model, {"average": model.up.detach()})
        for name, values in {"state": optimizer_state, "average": average}.items():
            if is_replica:
                dcp.save(values, checkpoint_id=folder / name)
            else:
                with pytest.raises(CheckpointException, match="two ranks would save different values under"):
                    dcp.save(values, checkpoint_id=folder / f"no {name}")
                assert not list((folder / f"no {name}").glob("*.distcp"))
    found = {"state.up.exp_avg": torch.zeros(4, 5)}
    dcp.load(found, checkpoint_id=folder / "state", no_dist=True)
    assert torch.equal(found["state.up.exp_avg"], torch.ones(4, 5))
