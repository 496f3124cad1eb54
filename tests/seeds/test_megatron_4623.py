"""Megatron-LM #4623: an optimizer that offloads, over Megatron-FSDP's slices, saved as ``fsdp_dtensor``.

Parameters are those of ``megatron_model.py``: DTensors of which each rank has a flat slice, uneven, empty, in mid-row.
"""

import copy
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs_get
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_offload import OffloadPolicy, offload_states, release_states, reload_states
from fsdp_offload.checkpoint import chunks_of, get_optimizer_state_dict, load, save, set_optimizer_state_dict
from tests.distributed import test_integration_megatron_fsdp as framework
from tests.distributed import test_megatron_fsdp as megatron
from tests.distributed.frameworks import same_scripts
from tests.distributed.launch import mesh, run_cases, spawn
from tests.distributed.megatron_model import (
    ENDS,
    MOMENTS,
    SHAPES,
    Layout,
    Module,
    build,
    model_state,
    optimizer_name,
    own_of,
    wrong_values,
)
from tests.distributed.same_files import digests
from tests.distributed.test_no_collectives import alone, refusing
from tests.fused_adam_reference import FusedAdam
from tests.parity import attach, local, take_step
from tests.proofs import OTHER_RANKS, RESUMES, TRAINS, proves

pytestmark = pytest.mark.distributed

POLICY = OffloadPolicy(bucket_bytes=1 << 10)


def layout_of(kind: str, tp: int = 1) -> Layout:
    return Layout(mesh(dist.get_world_size() // tp, tp, names=("dp", "tp")), kind)


def give_gradients(model: Module, step: int) -> None:
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank())
        made = torch.randn(local(param).shape, generator=generator)
        param.grad = DTensor.from_local(
            made, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )


def trained(kind: str, policy: OffloadPolicy | None, steps: int = 3, **options: Any) -> tuple[Module, Any]:
    """A model and its AdamW after so many steps, with the phases between them."""
    model = build(layout_of(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    if policy is not None:
        attach(optimizer, policy=policy)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        give_gradients(model, step)
        optimizer.step()
        if hasattr(optimizer, "offload_states"):
            for phase in (offload_states, release_states, reload_states):
                phase(optimizer)


def twin_of(kind: str, steps: int, **options: Any) -> tuple[list[Tensor], Any]:
    """The same steps of a plain AdamW on ordinary tensors, which hold what this rank has of each parameter."""
    model = build(layout_of(kind))
    shards = [torch.nn.Parameter(local(param).detach().clone()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(shards, lr=0.1, **options)
    for step in range(steps):
        give_gradients(model, step)
        for shard, param in zip(shards, model.parameters(), strict=True):
            shard.grad = local(param.grad).clone()
        optimizer.step()
    return shards, optimizer


def different(model: Module, optimizer: Any, shards: list[Tensor], twin: Any) -> Iterator[str]:
    for (name, param), shard in zip(model.named_parameters(), shards, strict=True):
        if not torch.equal(local(param), shard):
            yield f"{name} is another"
        state, expected = optimizer.state[param], twin.state[shard]
        if state.keys() != expected.keys():
            yield f"{name} has {[*state]}"
        yield from (f"{key} of {name}" for key in expected if not torch.equal(local(state[key]), expected[key]))


# Local shards --------------------------------------------------------------------------------------------------------


def run_shards(rank: int, world_size: int, fractions: tuple[float, ...]) -> None:
    options = {"fused": True} if any(fractions) else {}

    def case(kind: str, fraction: float) -> Iterator[str]:
        policy = OffloadPolicy(bucket_bytes=1 << 10, host_fraction=fraction)
        yield from different(*trained(kind, policy, **options), *twin_of(kind, 3, **options))

    run_cases({f"{kind}, {part}": partial(case, kind, part) for kind in ENDS for part in fractions})


@pytest.mark.parametrize(("ranks", "fractions"), [(3, (0.0,)), (2, (0.5, 1.0))], ids=["device", "CPU"])
def test_local_shards_are_updated_where_they_are_uneven_empty_and_flat_slices(
    ranks: int, fractions: tuple[float, ...], tmp_path: Path
) -> None:
    """On the device, and on the CPU by a half of the state and by all of it."""
    spawn(run_shards, ranks, tmp_path, fractions)


# Deterministic DTensors ----------------------------------------------------------------------------------------------


def run_files(rank: int, world_size: int, folder: Path) -> None:
    def case(kind: str) -> Iterator[str]:
        layout = layout_of(kind)
        for name, policy in {"plain": None, "first": POLICY}.items():
            model, optimizer = trained(kind, policy)
            # Megatron packs the state of an optimizer as it is; of its slices only the parameters know.
            packed = megatron.packed_by_megatron(model, optimizer) if policy is None else None
            for again in [name] if policy is None else ["first", "second"]:
                values, optim = (model_state(model), packed) if packed else megatron.live(model, optimizer)
                values, optim = megatron.split(layout, model, values, optim)
                save({"model": values, "optimizer": optim}, checkpoint_id=folder / kind / again)
        yield from compared(folder / kind)

    run_cases({kind: partial(case, kind) for kind in ("uneven", "empty first", "in mid-row")})


def compared(folder: Path) -> Iterator[str]:
    plain, first, second = (digests(folder / name) for name in ("plain", "first", "second"))
    assert len(plain) == dist.get_world_size()
    yield from () if first == second else ["two saves of the same state differ"]
    yield from () if first == plain else ["the files are not those of a run without offload"]


def test_files_are_byte_equal_over_two_saves_and_to_those_without_offload(tmp_path: Path) -> None:
    spawn(run_files, 2, tmp_path, tmp_path)


def run_duplicates(rank: int, world_size: int) -> None:
    """fp32 parameters, of which FusedAdam keeps masters that nobody reads; bf16 ones need theirs."""

    def case(dtype: torch.dtype) -> Iterator[str]:
        made = []
        for offload in (False, True):
            net = torch.nn.Sequential(torch.nn.Linear(8, 6, dtype=dtype))
            net = fully_shard(net, mesh=mesh(world_size))
            optimizer = FusedAdam(net.parameters(), lr=0.1, master_weights=True)
            if offload:
                attach(optimizer, model=net, policy=POLICY)
            take_step(optimizer)
            made.append((net, optimizer))
        (plain_net, plain), (net, optimizer) = made
        needed = {"master_param"} if dtype is torch.bfloat16 else set()
        state = get_optimizer_state_dict(net, optimizer, fsdp_dtensor=True)["state"]
        for name, values in state.items():
            if {*values} != {*MOMENTS, *needed}:
                yield f"saved of {name}: {[*values]}"
        theirs = copy.deepcopy(torchs_get(plain_net, plain))
        assert all("master_param" in values for values in theirs["state"].values())
        set_optimizer_state_dict(net, optimizer, theirs)  # what others have written with it is read
        for param, one in zip(net.parameters(), plain_net.parameters(), strict=True):
            for key in {*MOMENTS, *needed}:
                if not torch.equal(local(optimizer.state[param][key]), local(plain.state[one][key])):
                    yield f"{key} was loaded otherwise"

    run_cases({str(dtype): partial(case, dtype) for dtype in (torch.float32, torch.bfloat16)})


def test_a_master_param_that_repeats_the_parameter_is_neither_saved_nor_needed(tmp_path: Path) -> None:
    spawn(run_duplicates, 2, tmp_path)


# Chunks and parts ----------------------------------------------------------------------------------------------------


def run_refusing(rank: int, world_size: int, folder: Path) -> None:
    """Ranks that never hear of each other: whatever is called of the process group raises."""

    def case(kind: str) -> None:
        layout = layout_of(kind, tp=2)
        with refusing() as refused:
            model, optimizer = megatron.offloaded(layout)
            for param in model.parameters():
                chunks_of(param)
            values, saved = megatron.live(model, optimizer)
            values, _ = megatron.split(layout, model, values, saved)
            for key, value in values.items():
                assert isinstance(value, DTensor)
                value.__create_write_items__(key, value)
                value.__create_chunk_list__()
            other, loader = megatron.offloaded(layout, zeros=True)
            parts = megatron.split(layout, other, *megatron.live(other, loader, for_load=True))
            megatron.merge(layout, *parts)
            set_optimizer_state_dict(other, loader, saved)
        assert not refused, (kind, refused)
        assert all(map(torch.equal, megatron.moments(optimizer), megatron.moments(loader)))

    with alone(rank, world_size, folder):
        for kind in ENDS:
            case(kind)


def test_chunks_and_splits_and_state_dicts_come_without_a_collective(tmp_path: Path) -> None:
    spawn(run_refusing, 4, tmp_path, tmp_path)


def test_swiglu_and_gdn_are_split_by_what_parameters_know_as_megatron_splits_them(tmp_path: Path) -> None:
    """Keys, sizes, chunks and values of model and state are what Megatron's own functions gave, for every rank."""
    spawn(megatron.run_against_the_fixture, 4, tmp_path, 2, 2)


def run_back(rank: int, world_size: int, folder: Path) -> None:
    def case(kind: str, other: str) -> Iterator[str]:
        """Save split, load into other slices, merge: state is in the memory that it has had before the load."""
        layout, path = layout_of(kind), folder / kind
        model, optimizer = megatron.offloaded(layout)
        parts, part_optim = megatron.split(layout, model, *megatron.live(model, optimizer))
        save({"model": parts, "optimizer": part_optim}, checkpoint_id=path)
        layout = layout_of(other)
        model, optimizer = megatron.offloaded(layout, zeros=True)
        values, optim = megatron.live(model, optimizer, for_load=True)
        parts, part_optim = megatron.split(layout, model, values, optim)
        load({"model": parts, "optimizer": part_optim}, checkpoint_id=path)
        _, merged = megatron.merge(layout, parts, part_optim)
        set_optimizer_state_dict(model, optimizer, merged)
        yield from wrong_values(optimizer, megatron.params_of(model), own_of(layout))
        for value in megatron.moments(optimizer):
            if type(value) is not Tensor or value.device.type != "cpu":
                yield f"state is a {type(value).__name__} on {value.device}"

    def flat() -> Iterator[str]:
        """State in one dimension, of which a DTensor has just this rank's elements, as that pull request writes it."""
        layout = layout_of("uneven")
        model, optimizer = megatron.offloaded(layout)
        _, optim = megatron.live(model, optimizer)
        state = {}
        for name in SHAPES:
            saved = optim["state"][optimizer_name(name)]
            ones = {key: (saved[key], local(saved[key])) for key in MOMENTS}
            state[optimizer_name(name)] = {
                "step": saved["step"].clone(),
                **{key: flat_of(value, getattr(part, "local", part)) for key, (value, part) in ones.items()},
            }
        other, loader = megatron.offloaded(layout, zeros=True)
        set_optimizer_state_dict(other, loader, {**optim, "state": state})
        for one, same in zip(megatron.moments(optimizer), megatron.moments(loader), strict=True):
            if not torch.equal(one, same):
                yield "flat state was loaded otherwise"

    others = itertools.pairwise(("uneven", "in mid-row", "empty first", "one has all", "uneven"))
    run_cases({**{f"{one} to {other}": partial(case, one, other) for one, other in others}, "flat": flat})


def flat_of(value: DTensor, part: Tensor) -> DTensor:
    size, given = torch.Size([value.numel()]), part.flatten().clone()
    return DTensor.from_local(given, value.device_mesh, value.placements, run_check=False, shape=size, stride=(1,))


def test_loaded_dtensors_become_local_state_again(tmp_path: Path) -> None:
    spawn(run_back, 2, tmp_path, tmp_path)


# Megatron-FSDP's own optimizer ---------------------------------------------------------------------------------------


@proves("Megatron-FSDP's optimizer", "megatron-fsdp", TRAINS, RESUMES, OTHER_RANKS)
def test_megatron_fsdps_training_save_and_load_with_and_without_offload(tmp_path: Path) -> None:
    """Its ``fully_shard_optimizer``; each loads what the other has saved, and goes on with the same losses and bits."""
    same_scripts(framework.script, tmp_path, 2, {way: {"way": way} for way in framework.WAYS})
    ways = list(itertools.product(framework.WAYS, ("plain", "before", "after")))
    for ranks in (2, 1):
        later = {f"{way} from {saved}": {"way": way, "load": saved} for way, saved in ways}
        same_scripts(framework.script, tmp_path, ranks, later)
