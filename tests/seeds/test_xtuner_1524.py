"""xtuner #1524 (``SwapAdamW``): state on the device only while ``step()`` needs it, in sharded training and in RL.

The bits of its own arithmetic are the axis ``optimizer`` of the conformance suite (``unlisted``), and state that others
put on the device the habit ``replace-state``; ``tests/cpu/test_report.py`` counts what is moved and kept.
"""

from functools import partial
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from fsdp_offload import OffloadPolicy, is_offloaded, offload_model, offload_report, reload_model
from tests.distributed import models
from tests.distributed.launch import spawn_cases
from tests.distributed.same_files import either_resumes_from_either
from tests.overlapping import Loop, same
from tests.tiers import world_sizes

BUCKET_BYTES = 1 << 10


# Checkpoints ---------------------------------------------------------------------------------------------------------


LAYOUTS: dict[int, list[models.ShardNet]] = {
    3: [models.shard_even],
    2: [models.shard_columns, models.shard_bfloat16],
    4: [models.shard_hybrid, models.shard_tensor_parallel],
}


@pytest.mark.distributed
@world_sizes(*LAYOUTS)
def test_dcp_saves_swapped_state_as_the_shards_that_it_is(world_size: int, tmp_path: Path) -> None:
    """Local tensors beside sharded parameters would be taken for replicas: ranks would resume from one rank's.

    Either way between offloaded and plain training; their files have the same bytes.
    """
    cases = {f"{shard.__name__}, {flat}": (shard, flat) for shard in LAYOUTS[world_size] for flat in (False, True)}
    made = {
        name: partial(either_resumes_from_either, tmp_path / name, shard, flat=flat)
        for name, (shard, flat) in cases.items()
    }
    spawn_cases(made, world_size, tmp_path)


# RL ------------------------------------------------------------------------------------------------------------------


def sleep_between(loop: Loop, step: int) -> None:
    """A worker that gives way to generation: the optimizer goes before the model, and comes back after it."""
    loop.backward(step)
    loop.step()
    if is_offloaded(loop.optimizer):
        storages = [param.to_local().untyped_storage() for param in loop.model.parameters()]
        loop.optimizer.offload_states()
        loop.optimizer.release_states()
        offload_model(loop.model)
        report = offload_report(loop.optimizer)
        assert report.memory.kept_state_bytes == report.memory.device_bytes == 0
        assert not any(storage.nbytes() for storage in storages)
        reload_model(loop.model)
        loop.optimizer.reload_states()


@pytest.mark.parametrize("device_bytes", [4 * BUCKET_BYTES, 1 << 20], ids=["streams", "stays"])
def test_rl_offload_and_onload_between_steps_leave_the_bits(mesh: DeviceMesh, device_bytes: int) -> None:
    policy = OffloadPolicy(bucket_bytes=BUCKET_BYTES, device_bytes=device_bytes)
    plain, offloaded = (Loop(mesh, AdamW, one).train(5, sleep_between) for one in (None, policy))
    assert same(plain, offloaded)
