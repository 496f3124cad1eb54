"""A checkpoint's writer reads state and parameters in their homes while training goes on."""

from functools import partial
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict
from tests.async_writers import Waits, copied, loaded, not_the_same
from tests.core.test_whole import OPTIMIZERS
from tests.overlapping import Loop, Net, same

ALL = 1 << 20


policy_of = partial(OffloadPolicy, parameters=True, bucket_bytes=2048)
ROWS = [
    *(("adamw", policy_of(parameters=False, **one)) for one in ({}, {"snapshot_bytes": 6000}, {"snapshot_bytes": ALL})),
    ("adamw", policy_of(parameters=False, device_bytes=1 << 20, snapshot_bytes=ALL)),
    ("adamw", policy_of()),
    ("adamw", policy_of(overlap="iteration", device_bytes=6000)),
    ("adamw", policy_of(overlap="forward", device_bytes=6000, snapshot_bytes=6000)),
    ("adamw", policy_of(device_bytes=6000, snapshot_bytes=ALL)),
    ("adamw", policy_of(overlap="forward", snapshot_bytes=ALL)),
    ("adamw", policy_of(overlap="iteration", snapshot_bytes=ALL)),
    # As a whole, also where each step makes new tensors, and gives old ones another name.
    *((kind, policy_of(parameters=False, snapshot_bytes=one)) for kind in ("coupled", "replacing") for one in (0, ALL)),
]


@pytest.mark.parametrize(("kind", "policy"), ROWS)
def test_a_save_holds_what_was_there_at_the_call(
    mesh: DeviceMesh, tmp_path: Path, waits: Waits, kind: str, policy: OffloadPolicy
) -> None:
    make = OPTIMIZERS[kind]
    frozen = {"prepare": lambda model: model.blocks[1].down.bias.requires_grad_(False)}
    plain, ours = (Loop(mesh, make, one, net=partial(Net, 16, 2), **frozen) for one in (None, policy))
    stager = ArenaStager(ours.optimizer)
    for number in range(3):
        for loop in (plain, ours):
            loop.train(3, first=5 * number)
        state = {
            "model": get_model_state_dict(ours.model),
            "optimizer": get_optimizer_state_dict(ours.model, ours.optimizer),
        }
        expected, path = copied(state), tmp_path / str(number)
        writer = waits.hold(path)
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        writer.in_use = True
        assert not policy.parameters or stager._buffer.nbytes < 4096, "only counters are copied"
        for loop in (plain, ours):
            loop.train(2, first=5 * number + 3)
        assert bool(waits.count) == (policy.snapshot_bytes < ALL), "who has spare homes for everything waits for nobody"
        waits.let_go()
        waits.count = 0
        future.result()
        assert not list(not_the_same(expected, loaded(path, expected)))
    stager.close()
    assert same(plain, ours)


def test_a_model_is_loaded_once_its_parameters_have_been_read(mesh: DeviceMesh, tmp_path: Path, waits: Waits) -> None:
    loop = Loop(mesh, OPTIMIZERS["adamw"], policy_of(), net=partial(Net, 16, 2)).train(2)
    state = {"model": get_model_state_dict(loop.model)}
    expected, zeros = copied(state), {name: value * 0 for name, value in loop.model.state_dict().items()}
    writer = waits.hold(tmp_path)
    future = dcp.async_save(state, storage_writer=writer, async_stager=ArenaStager(loop.optimizer))
    writer.in_use = True
    loop.model.load_state_dict(zeros)
    assert waits.count
    future.result()
    assert not list(not_the_same(expected, loaded(tmp_path, expected)))
    loop.train(1, first=2)
