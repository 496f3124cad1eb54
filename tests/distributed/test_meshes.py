"""One key on several meshes: replicas are saved as ever, other tensors are refused, on all ranks and before a byte.

Random programs over meshes whose ranks have the same or other bits under one key, and what people have: stacked
experts, replicas by hand, FSDP beside tensor parallelism, state of this rank's rows that is no DTensor.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from fsdp_offload.checkpoint import ArenaStager, SavePlanner, get_optimizer_state_dict, load, save
from tests.distributed import models
from tests.distributed.launch import mesh, spawn, spawn_cases, this_device, unless_refused
from tests.distributed.models import Net, batch, build
from tests.parity import attach, local, take_step

pytestmark = pytest.mark.distributed

RANKS = 4
PROGRAMS = 40


def refusal(action: Callable[[], Any], folder: Path) -> str:
    """The coordinator's error with which a save fails in planning, on all ranks; "" if it does not."""
    try:
        action()
    except CheckpointException as error:
        found = {str(cause) for cause, _ in error.failures.values()}
    except ValueError as error:  # of ours: that of all ranks, or it would name them
        found = {str(error).partition(f"save: {folder}: ")[2]}
    else:
        return ""
    assert len(found) == 1, found
    assert min(found).startswith("nothing has been written")
    assert not (folder / ".metadata").exists()
    return min(found)


# Random programs ------------------------------------------------------------------------------------------------------


def random_program(rng: random.Random, folder: Path) -> Iterator[str]:
    """Save some tensors that have the same bits on all meshes or not, and read back those that are saved."""
    whole = mesh(2, 2, names=("a", "b"))
    meshes = [whole["a"], whole["b"], mesh(RANKS), whole, None]  # of 2 ranks, of all, and none: a plain tensor
    rank = dist.get_rank()
    state_dict: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}
    expected, mixed = {}, set()
    for number in range(rng.randint(1, 6)):
        one = rng.choice(meshes)
        shape = tuple(rng.choice([1, 2, 3, 5, 8, 37]) for _ in range(rng.randint(1, 3)))
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int8, torch.bool])
        in_state = one is None or rng.random() < 0.5
        seed, changed = rng.randrange(1 << 30), rng.random() < 0.3
        sampled = [rng.randrange(10**6) for _ in shape]
        values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        if changed and (one is None or one.size() < RANKS):
            group = rank if one is None else one.mesh.min().item()  # equal on each rank of a mesh
            if values.numel() <= 1024 and rng.random() < 0.5:  # one element alone, on one mesh alone
                at = tuple(place % size for place, size in zip(sampled, shape, strict=True))
                values[at] = values[at] == 0 if group == 0 else values[at]
            else:
                values = values if group == 0 else (values == 0).to(dtype)
            mixed.add(number)
        placements = [
            rng.choice([Shard(rng.randrange(len(shape))), Replicate()]) for _ in range(one.ndim if one else 0)
        ]
        if one is whole and len({str(p) for p in placements}) == 1:
            placements[1] = Replicate()
        value = values if one is None else distribute_tensor(values, one, placements, src_data_rank=None)
        if in_state:
            state_dict["optimizer"]["state"][f"w{number}"] = {"moment": value}
        else:
            state_dict["model"][f"w{number}"] = value
        expected[number] = f"{'optimizer.state' if in_state else 'model'}.w{number}", local(value).clone()
    found = refusal(lambda: save(state_dict, checkpoint_id=folder), folder)
    named = {
        number for number, (key, _) in expected.items() if f"{key} (ranks" in found or f"{key}.moment (ranks" in found
    }
    if named != mixed and (len(mixed) <= 4 or not found):  # more are not listed
        yield f"{named} are refused, and {mixed} are not the same"
    if not mixed:
        for _, value in tensors_of(state_dict):
            local(value).zero_()
        load(state_dict, checkpoint_id=folder)
        for key, value in tensors_of(state_dict):
            if not torch.equal(local(value), expected[int(key[1:])][1]):
                yield f"{key} is not what was saved"


def tensors_of(state_dict: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    yield from state_dict["model"].items()
    yield from ((key, values["moment"]) for key, values in state_dict["optimizer"]["state"].items())


def run_programs(rank: int, world_size: int, folder: Path) -> None:
    for seed in range(PROGRAMS):
        problems = [*random_program(random.Random(seed), folder / str(seed))]
        assert not problems, f"program {seed}: {problems}"


def test_random_programs(tmp_path: Path) -> None:
    spawn(run_programs, RANKS, tmp_path, tmp_path)


# What people have -----------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """A dense layer, and two experts of this rank in one tensor, as transformers and Megatron stack them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(6, 6)
        torch.manual_seed(seed)
        self.experts = nn.Module()
        self.experts.w_in = nn.Parameter(torch.randn(2, 40, 30))  # of which a digest is a sample


def of_experts(ep_mesh: DeviceMesh, dp_mesh: DeviceMesh) -> tuple[Router, Optimizer]:
    """Trained for two steps: experts on the data-parallel mesh of their ranks, the rest on all ranks."""
    model = Router(1 + ep_mesh.get_local_rank()).to(this_device())
    fully_shard(model.experts, mesh=dp_mesh)
    fully_shard(model, mesh=mesh(RANKS))
    optimizer = attach(torch.optim.AdamW(model.parameters(), lr=0.1), model=model)
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
            local(param.grad).normal_()
        optimizer.step()
    return model, optimizer


def stacked_experts(folder: Path) -> Iterator[str]:
    whole = mesh(2, 2, names=("ep", "dp"))
    model, optimizer = of_experts(whole["ep"], whole["dp"])
    group = dist.new_group(backend="gloo")
    stager = ArenaStager(optimizer)
    states: dict[str, Callable[[], Any]] = {
        "nested": lambda: {"optimizer": get_optimizer_state_dict(model, optimizer)},
        "flat": lambda: get_optimizer_state_dict(model, optimizer, flatten_optimizer_state_dict=True),
        "model": lambda: {"model": model.state_dict(), "step": 2},
    }
    savers: dict[str, Callable[..., Any]] = {
        "save": save,
        "dcp.save": partial(dcp.save, planner=SavePlanner()),
        "arena": lambda *args, **options: dcp.async_save(
            *args, planner=SavePlanner(), async_stager=stager, process_group=group, **options
        ).result(),  # type: ignore[union-attr]
        "torch's stager": lambda *args, **options: dcp.async_save(
            *args, planner=SavePlanner(), process_group=group, **options
        ).result(),  # type: ignore[union-attr]
    }
    for (form, state), (name, saver) in itertools.product(states.items(), savers.items()):
        place = folder / f"{form}-{name}"
        found = refusal(lambda saver=saver, state=state, place=place: saver(state(), checkpoint_id=place), place)
        if "experts.w_in" not in found or "gate" in found or "ranks [0, 1] and [2, 3]" not in found:
            yield f"{form}, {name}: {found or 'saved'}"
    stager.close()
    # As the error says: each mesh by itself.
    before = model.state_dict()
    place = folder / str(whole["ep"].get_local_rank())
    own = {"model": {"w": before["experts.w_in"]}, "optimizer": {"w": optimizer.state[model.experts.w_in]["exp_avg"]}}
    save(own, checkpoint_id=place, process_group=whole["dp"].get_group())
    kept = {key: local(value["w"]).clone() for key, value in own.items()}
    for value in own.values():
        local(value["w"]).zero_()
    load(own, checkpoint_id=place, process_group=whole["dp"].get_group())
    yield from (f"{key} is not what was saved" for key in own if not torch.equal(local(own[key]["w"]), kept[key]))


def replicas(folder: Path, shard: Callable[[Net], Any], *, by_hand: bool) -> Iterator[str]:
    """Parameters on disjoint meshes that have the same gradients: nothing is refused, and each rank finds its own."""
    net = build(shard)
    optimizer = attach(torch.optim.AdamW(net.parameters(), lr=0.1), model=net)
    for step in range(2):
        net(batch(10 * step + (0 if not by_hand else dist.get_rank()))).backward()
        for param in net.parameters() if by_hand else ():
            dist.all_reduce(local(param.grad), group=REPLICATES[dist.get_rank() % 2])
        optimizer.step()
        optimizer.zero_grad()
    sizes = {param.device_mesh.size() for param in net.parameters()}
    if RANKS // 2 not in sizes:
        yield f"meshes of {sizes} ranks"
    state: dict[str, Any] = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    # Not of an optimizer: each rank has its own, as before.
    others = {"random": {"state": {"generator": torch.full((5,), dist.get_rank())}}}
    if found := refusal(lambda: save(state | others, checkpoint_id=folder), folder):
        yield found
        return
    kept = {key: local(value).clone() for key, value in state["model"].items()}
    moments = {fqn: local(values["exp_avg"]).clone() for fqn, values in state["optimizer"]["state"].items()}
    load(state, checkpoint_id=folder)
    yield from (key for key, value in state["model"].items() if not torch.equal(local(value), kept[key]))
    now = state["optimizer"]["state"]
    yield from (f"moment of {fqn}" for fqn in moments if not torch.equal(local(now[fqn]["exp_avg"]), moments[fqn]))


REPLICATES: list[Any] = []


def hybrid_by_hand(net: Net) -> None:
    whole = mesh(2, 2, names=("replicate", "shard"))
    REPLICATES[:] = [dist.new_group([number, number + 2]) for number in range(2)]
    models.shard_groups(net, mesh=whole["shard"])


def cached_plans(folder: Path) -> Iterator[str]:
    """A plan that has not changed is not sent again, its digests are."""

    class Cached(SavePlanner):
        pass

    def saved(number: int, seed: int) -> str:
        torch.manual_seed(seed)
        whole = torch.rand(4, 3)
        state = {"w": distribute_tensor(whole, mesh(2, 2, names=("a", "b"))["b"], [Shard(0)], src_data_rank=None)}
        place = folder / str(number)
        return refusal(lambda: dcp.save(state, checkpoint_id=place, planner=Cached(enable_plan_caching=True)), place)

    found = [bool(saved(number, seed * dist.get_rank())) for number, seed in enumerate([0, 0, 1])]
    if found != [False, False, True]:
        yield f"refused: {found}"


def replicas_within_one_mesh(folder: Path) -> Iterator[str]:
    """As on a mesh of all ranks, they may have drifted apart: pipeline stages, each with names of its own."""
    stages = mesh(2, 2, names=("pp", "tp"))
    norm = DTensor.from_local(torch.full((3,), 1.0 + dist.get_rank()), stages["tp"], [Replicate()], run_check=False)
    state = {f"norm{stages['pp'].get_local_rank()}": norm}
    if found := refusal(lambda: save(state, checkpoint_id=folder), folder):
        yield found


CASES: dict[str, Callable[[Path], Iterator[str]]] = {
    "replicas within one mesh": replicas_within_one_mesh,
    "stacked experts": stacked_experts,
    "HSDP by hand": partial(replicas, shard=hybrid_by_hand, by_hand=True),
    "FSDP and TP": partial(replicas, shard=models.shard_tensor_parallel, by_hand=False),
    "cached plans": cached_plans,
}


def test_meshes_of_some_ranks(tmp_path: Path) -> None:
    spawn_cases({name: partial(case, tmp_path / name) for name, case in CASES.items()}, RANKS, tmp_path)


# Plain state of sharded parameters ------------------------------------------------------------------------------------


class Rows(Optimizer):
    """Scales each row of this rank's part, without knowing of DTensors; ``kept`` makes what it keeps."""

    def __init__(self, params: Any, kept: Callable[[Tensor], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kept = kept

    @torch.no_grad()
    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            state, grad = self.state[param], local(param.grad)
            if not state:
                state |= {"moment": torch.zeros_like(param), "plain": self.kept(local(param))}
            state["moment"].lerp_(param.grad, 0.1)
            local(param).sub_(local(state["moment"]) * grad.abs().mean(), alpha=self.param_groups[0]["lr"])


def rows(part: Tensor) -> Tensor:
    return part.flatten(1).mean(1) if part.dim() > 1 else part.clone()


def plain_state(folder: Path, name: str) -> Iterator[str]:
    """Refused by the getter, which sees this rank alone, by ``save``, which compares the ranks, or by neither."""
    kept, (first, second), seen_by = PLAIN[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, first), nn.Linear(first, second))
    fully_shard(net, mesh=mesh(dist.get_world_size()))
    optimizer = attach(Rows(net.parameters(), kept), model=net)
    take_step(optimizer, 2)
    if seen_by == "get":
        for options in ({}, {"flatten_optimizer_state_dict": True}, {"for_load": True}, {"cpu_offload": True}):
            get = partial(get_optimizer_state_dict, net, optimizer, **options)
            yield from unless_refused(get, ValueError, "'plain' of 0.weight", "a plain tensor", "DTensor")
        return
    state = {"optimizer": get_optimizer_state_dict(net, optimizer)}
    found = refusal(lambda: save(state, checkpoint_id=folder), folder)
    if bool(found) != (seen_by == "save") or (found and "state.0.weight.plain" not in found):
        yield found or "saved"


UNEVEN, NONE_ON_THE_LAST, ALL_ON_THE_FIRST = (8, 12), (4, 4), (8, 1)  # rows of two layers
PLAIN: dict[str, tuple[Callable[[Tensor], Any], tuple[int, int], str]] = {
    "a scale for each row": (rows, UNEVEN, "get"),
    "a scale for each row, of which one rank has none": (rows, NONE_ON_THE_LAST, "get"),
    "a scale for each row, of which one rank has all": (rows, ALL_ON_THE_FIRST, "get"),
    "of the shape of the part": (torch.clone, UNEVEN, "get"),
    "in one dimension": (lambda part: part.flatten().clone(), UNEVEN, "get"),
    "in a list": (lambda part: [torch.ones(3), rows(part)], UNEVEN, "get"),
    "a scale for each block": (lambda part: part.flatten()[::5].contiguous(), UNEVEN, "save"),
    "one table, other content on each rank": (lambda _: torch.full((7,), float(dist.get_rank())), UNEVEN, "save"),
    "one table": (lambda _: torch.arange(7.0), UNEVEN, ""),
    "one table, as long as some parts": (lambda _: torch.arange(4.0), UNEVEN, ""),
    "one table, as long as all parts": (lambda _: torch.arange(2.0), NONE_ON_THE_LAST, ""),
    "tables of the parameters": (lambda part: torch.arange(float(2 + part.dim())), UNEVEN, ""),
    "a counter": (lambda _: torch.tensor(float(dist.get_rank())), UNEVEN, ""),
}


def test_plain_state_of_sharded_parameters(tmp_path: Path) -> None:
    spawn_cases({name: partial(plain_state, tmp_path / name, name) for name in PLAIN}, 3, tmp_path)
