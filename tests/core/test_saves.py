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
from tests.overlapping import Loop, Net, adamw, same

ALL = 1 << 20


@pytest.mark.parametrize(
    ("overlap", "device_bytes", "spare"),
    [
        ("step", "auto", 0),
        ("iteration", 6000, 0),
        ("forward", 6000, 6000),
        ("step", 6000, ALL),
        ("forward", "auto", ALL),
        ("iteration", "auto", ALL),
    ],
)
def test_a_save_holds_what_was_there_at_the_call(
    mesh: DeviceMesh, tmp_path: Path, waits: Waits, overlap: str, device_bytes: int, spare: int
) -> None:
    policy = OffloadPolicy(
        parameters=True, overlap=overlap, device_bytes=device_bytes, bucket_bytes=2048, snapshot_bytes=spare
    )
    frozen = {"prepare": lambda model: model.blocks[1].down.bias.requires_grad_(False)}
    plain, ours = (Loop(mesh, adamw, one, net=partial(Net, 16, 2), **frozen) for one in (None, policy))
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
        assert stager._buffer.nbytes < 4096, "only counters are copied"
        for loop in (plain, ours):
            loop.train(2, first=5 * number + 3)
        assert bool(waits.count) == (spare < ALL), "who has spare homes for everything waits for nobody"
        waits.let_go()
        waits.count = 0
        future.result()
        assert not list(not_the_same(expected, loaded(path, expected)))
    stager.close()
    assert same(plain, ours)
