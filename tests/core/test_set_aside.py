"""State that is set aside and put back is what it was: a step that makes new state leaves it alone."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, clip_grad_norm_, offload_optimizer


def trained(mesh: DeviceMesh, policy: OffloadPolicy | None, *, clips: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    for module in (*net, net):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    if policy is not None:
        offload_optimizer(optimizer, model=net, policy=policy)
    for at in range(9):
        net(torch.randn(4, 16)).square().mean().backward()
        if clips:
            clip_grad_norm_(optimizer, 1e9)
        optimizer.step()
        optimizer.zero_grad()
        if at == 4:
            aside = dict(optimizer.state)
            optimizer.state.clear()
        if at == 6:
            optimizer.state.clear()
            optimizer.state.update(aside)
    return [param.full_tensor().detach() for param in net.parameters()]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
@pytest.mark.parametrize("more", [{}, {"parameters": True}, {"host_fraction": 1.0}], ids=str)
def test_state_that_is_set_aside(mesh: DeviceMesh, overlap: str, more: dict[str, object], *, clips: bool) -> None:
    policy = OffloadPolicy(overlap=overlap, bucket_bytes=4096, **more)  # type: ignore[arg-type]
    plain, ours = (trained(mesh, one, clips=clips) for one in (None, policy))
    assert all(map(torch.equal, plain, ours))
