"""FSDP1, whose parameters are flat or views of flat ones: state moves under ``"step"``, with the same bits."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_offload import OffloadPolicy
from tests.distributed.launch import spawn, this_device
from tests.parity import attach, same_bits

pytestmark = pytest.mark.distributed


def train(rank: int, policy: OffloadPolicy | None, use_orig_params: bool) -> list[Tensor]:
    """Train six steps, with clipping; return losses, parameters and state."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(33, 33) for _ in range(4)), nn.LayerNorm(33)).to(this_device())
    wrap: Any = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "use_orig_params": use_orig_params}
    model = FullyShardedDataParallel(net, device_id=this_device(), **wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if policy is not None:
        attach(optimizer, model=model, policy=policy)
    seen = []
    for step in range(6):
        x = torch.randn(4, 33, generator=torch.Generator().manual_seed(10 * step + rank)).to(this_device())
        loss = model(x).square().mean()
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    state = [value for param in model.parameters() for value in optimizer.state[param].values()]
    return [*seen, *(param.detach() for param in model.parameters()), *state]


def run_both(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")  # of FSDP1, that it is old
    for use_orig_params in (False, True):
        plain, ours = (
            train(rank, policy, use_orig_params)
            for policy in (None, OffloadPolicy(bucket_bytes=1024, device_bytes=5 * 1024))
        )
        assert len(plain) > 16
        assert all(same_bits(one.cpu(), other.cpu()) for one, other in zip(plain, ours, strict=True))
        with pytest.raises(ValueError, match="none of the optimizer's parameters is sharded by it"):
            train(rank, OffloadPolicy(overlap="forward"), use_orig_params)


def test_state_of_fsdp1_moves_in_the_step(tmp_path: Path) -> None:
    spawn(run_both, 2, tmp_path)
