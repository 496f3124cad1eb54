"""Asynchronous saves on real streams: files hold the state of their call, and nothing of it passes through the device.

As in ``test_streams``, each lane is slowed down in turn, so that whatever should have waited for it reads old bytes.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._pytree import tree_map

from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict, set_optimizer_state_dict
from fsdp_offload.checkpoint.writer_loan import Loan
from tests.async_writers import HeldWriter, loaded, not_the_same
from tests.gpu.streams import MIB, Slow, make, policy_of, train
from tests.parity import host_copy

SLEEP_CYCLES = 4_000_000  # about 2 ms: longer than a copy of any bucket here
ALL = 1 << 40


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def on_host(values: Any) -> Any:
    return tree_map(host_copy, values)


CASES = {
    "all": policy_of(snapshot_bytes=ALL),
    "half": policy_of(snapshot_bytes=6 * MIB),
    "none": policy_of(),
    "some kept": policy_of(snapshot_bytes=ALL, device_bytes=9 * MIB),
}


@pytest.mark.parametrize("kind", ["none", "L", "U", "S"])
@pytest.mark.parametrize("name", CASES)
def test_saves_that_overlap_with_steps_hold_the_state_of_their_call(
    device: torch.device, slow: Slow, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers stand still until somebody waits for them: the next save, or a step without spare homes."""
    slow(kind, SLEEP_CYCLES)
    plain, run = make(None), make(CASES[name])
    stager, in_flight, expected = ArenaStager(run[1]), [], []
    wait = Loan.wait

    def let_go_and_wait(loan: Loan) -> None:
        for writer in in_flight:
            writer.let_go()
        wait(loan)

    monkeypatch.setattr(Loan, "wait", let_go_and_wait)
    for step in range(5):
        train(plain, run, steps=[step])
        # The copy of the model is issued at once, while the last step's kernels sleep. What it has to be is known from
        # the other side, without a synchronization that would hide a missing wait here.
        writer = HeldWriter(tmp_path / str(step))
        dcp.async_save(state_of(*run), storage_writer=writer, async_stager=stager)
        in_flight.append(writer)
        expected.append(on_host({"model": plain[0].state_dict(), "state": list(plain[1].state.values())}))
    stager.close()
    for number, state in enumerate(expected):
        found = loaded(tmp_path / str(number), on_host(state_of(*run)))
        found = {"model": found["model"], "state": list(found["optimizer"]["state"].values())}
        assert not [*not_the_same(state, found)], f"save {number}"
    assert all(torch.equal(a, b) for a, b in zip(plain[0].parameters(), run[0].parameters(), strict=True))


def test_the_copy_of_the_model_is_waited_for(device: torch.device, tmp_path: Path) -> None:
    """It has arrived when ``async_save`` returns; training may write the parameters from then on."""
    model, optimizer = make(policy_of(snapshot_bytes=ALL))
    train((model, optimizer), steps=[0])
    state = on_host(state_of(model, optimizer))
    stager = ArenaStager(optimizer)
    stager.stage(state_of(model, optimizer))  # the buffer is there, with old bytes in it
    stager._buffer.bytes.zero_()
    torch.cuda._sleep(50 * SLEEP_CYCLES)  # 0.1 s
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
