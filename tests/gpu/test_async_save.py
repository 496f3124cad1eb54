"""Asynchronous saves on a device: where bytes are, and how many. What files hold: ``test_conformance``."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._pytree import tree_map

from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict, set_optimizer_state_dict
from tests.async_writers import loaded, not_the_same
from tests.gpu.streams import MIB, make, policy_of, train
from tests.parity import host_copy
from tests.process_groups import process_group

ALL = 1 << 40


@pytest.fixture(scope="module", autouse=True)
def of_one_rank() -> Iterator[None]:
    with process_group():
        yield


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def on_host(values: Any) -> Any:
    return tree_map(host_copy, values)


def test_the_copy_of_the_model_is_waited_for(device: torch.device, tmp_path: Path) -> None:
    """It has arrived when ``async_save`` returns; training may write the parameters from then on."""
    model, optimizer = make(policy_of(snapshot_bytes=ALL))
    train((model, optimizer), steps=[0])
    state = on_host(state_of(model, optimizer))
    stager = ArenaStager(optimizer)
    stager.stage(state_of(model, optimizer))  # the buffer is there, with old bytes in it
    stager._buffer.bytes.zero_()
    torch.cuda._sleep(200_000_000)  # 0.1 s
    staged = stager.stage(state_of(model, optimizer))
    now = {name: tensor.clone() for name, tensor in staged["model"].items()}  # at once, by the host
    assert not [*not_the_same(state["model"], now)]


def test_what_is_staged_is_pinned_and_the_memory_is_used_again(device: torch.device) -> None:
    model, optimizer = make(policy_of(snapshot_bytes=ALL))
    train((model, optimizer), steps=[0])
    stager, addresses, host = ArenaStager(optimizer), set(), set()
    for step in range(4):
        staged = stager.stage(state_of(model, optimizer))
        tensors = [*staged["model"].values()]
        tensors += [value for state in staged["optimizer"]["state"].values() for value in state.values()]
        assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors)
        addresses.add(tuple(tensor.data_ptr() for tensor in staged["model"].values()))
        host.add(torch.cuda.host_memory_stats()["num_host_alloc"])
        del staged, tensors
        train((model, optimizer), steps=[step + 1])
    assert len(addresses) == 1
    assert len(host) == 1


def growth_of(action: Callable[[], Any]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_neither_saving_nor_loading_takes_device_memory(device: torch.device, tmp_path: Path) -> None:
    """With 14 MiB of state; also where the optimizer that loads has none yet."""
    model, optimizer = make(policy_of(snapshot_bytes=ALL))
    train((model, optimizer), steps=[0])
    saved, stager = on_host(state_of(model, optimizer)), ArenaStager(optimizer)
    held: list[Any] = []
    growth = {
        "state dict": growth_of(lambda: held.append(get_optimizer_state_dict(model, optimizer))),
        "stage": growth_of(lambda: stager.stage(state_of(model, optimizer))),
        "save": growth_of(lambda: dcp.save({"optimizer": held[0]}, checkpoint_id=tmp_path / "sync")),
        "async_save": growth_of(
            lambda: dcp.async_save(
                state_of(model, optimizer), checkpoint_id=tmp_path / "async", async_stager=stager
            ).result()
        ),
    }
    other_model, other = make(policy_of())
    template: dict[str, Any] = {}
    growth |= {
        "template": growth_of(
            lambda: template.update(optimizer=get_optimizer_state_dict(other_model, other, for_load=True))
        ),
        "load": growth_of(lambda: dcp.load(template, checkpoint_id=tmp_path / "async")),
        "set": growth_of(lambda: set_optimizer_state_dict(other_model, other, template["optimizer"])),
    }
    assert {name: nbytes for name, nbytes in growth.items() if nbytes >= MIB} == {}
    assert growth_of(lambda: train((model, optimizer), steps=[1])) > 4 * MIB  # what is measured can be seen
    now = on_host(get_optimizer_state_dict(other_model, other))
    assert not [*not_the_same(saved["optimizer"]["state"], now["state"])]
    assert not [*not_the_same(saved, loaded(tmp_path / "async", saved))]
