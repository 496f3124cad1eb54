"""``policy="auto"`` on several ranks with uneven shards: the same policy on each, whatever each holds."""

from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_offload import offload_optimizer
from fsdp_offload.api.attachment import engine_of
from fsdp_offload.planning import choices
from tests.distributed.launch import mesh, spawn
from tests.overlapping import Loop, adamw, same

pytestmark = pytest.mark.distributed


def run_auto(rank: int, world_size: int, loop: choices.Loop) -> None:
    device_mesh = mesh(world_size)
    plain, offloaded = (Loop(device_mesh, adamw, None) for _ in range(2))
    local_bytes = sum(8 * param.to_local().numel() for param in offloaded.model.parameters())
    most_bytes = sum(8 * -(-param.shape[0] // world_size) * param[:1].numel() for param in offloaded.model.parameters())
    seen = [0] * world_size
    dist.all_gather_object(seen, local_bytes)
    assert min(seen) < max(seen) <= most_bytes  # so that what a rank sees of its own would not do
    choices._LARGE_BYTES = max(seen)  # a limit that some ranks' own state is under, and that of others is not
    choices._SMALL_STATE_BYTES = 0  # models of tests have little state for each parameter
    offload_optimizer(offloaded.optimizer, model=offloaded.model, policy="auto", loop=loop)
    policies = [None] * world_size
    dist.all_gather_object(
        policies, (engine_of(offloaded.optimizer).policy, offloaded.optimizer.offload_report().tuning)
    )
    assert policies == [policies[0]] * world_size
    assert same(plain.train(6), offloaded.train(6))


@pytest.mark.parametrize("loop", ["any", "no_clipping"])
def test_every_rank_chooses_the_same(loop: choices.Loop, tmp_path: Path) -> None:
    spawn(run_auto, 3, tmp_path, loop)
