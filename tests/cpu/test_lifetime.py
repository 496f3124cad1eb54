"""The arena goes with the optimizer, at once: nothing of ours keeps it, no cycle waits for the garbage collector."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, offload_optimizer, remove_offload

POLICY = OffloadPolicy(bucket_bytes=2048)


pytestmark = pytest.mark.usefixtures("no_garbage_collection")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))


def train(net: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 16)).sum().backward()
        optimizer.step()


def offloaded(net: nn.Module) -> Optimizer:
    return offload_optimizer(torch.optim.AdamW(net.parameters()), model=net, policy=POLICY)


def mappings(optimizer: Optimizer) -> list["weakref.ref[object]"]:
    """Weak references to the host memory itself."""
    regions = optimizer._offload_engine.engine.plan.regions
    assert regions
    return [weakref.ref(region._owner) for region in regions]


def assert_gone(memory: list["weakref.ref[object]"]) -> None:
    assert [reference() for reference in memory] == [None] * len(memory)


def assert_alive(memory: list["weakref.ref[object]"]) -> None:
    assert all(reference() is not None for reference in memory)


def failed_step(net: nn.Module, optimizer: Optimizer) -> None:
    net[0].weight.grad = torch.zeros(32, 16).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def more_groups(net: nn.Module, optimizer: Optimizer) -> None:
    net.register_parameter("scale", nn.Parameter(torch.ones(100)))
    optimizer.add_param_group({"params": [net.scale]})


Beside = Callable[[nn.Module, Any], object]


def nothing(net: nn.Module, optimizer: Any) -> None: ...


def schedule(net: nn.Module, optimizer: Any) -> object:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


AROUND: dict[str, tuple[Beside, Beside]] = {
    "nothing": (nothing, nothing),
    "captured step": (lambda net, optimizer: optimizer.step, nothing),
    "earlier scheduler": (schedule, nothing),
    "scheduler": (nothing, schedule),
    "step hook": (nothing, lambda net, optimizer: optimizer.register_step_post_hook(lambda *_: None)),
    "state dict": (nothing, lambda net, optimizer: optimizer.state_dict()["param_groups"]),
    "loaded state": (nothing, lambda net, optimizer: optimizer.load_state_dict(optimizer.state_dict())),
    "failed step": (nothing, failed_step),
    "more groups": (nothing, more_groups),
    "report": (nothing, lambda net, optimizer: optimizer.offload_report()),
    "gradients": (nothing, lambda net, optimizer: net(torch.ones(2, 16)).sum().backward()),
}
"""What there is beside an optimizer, made before it is attached and when it has trained."""


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("name", AROUND)
def test_nothing_around_an_optimizer_keeps_its_memory(name: str, removed: bool) -> None:
    """Holders of the optimizer keep it no longer than it exists, or is offloaded."""
    before, after = AROUND[name]
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    earlier = before(net, optimizer)
    offload_optimizer(optimizer, model=net, policy=POLICY)
    train(net, optimizer)
    later = after(net, optimizer)
    memory = mappings(optimizer)
    train(net, optimizer)
    assert_alive(memory)
    if removed:
        remove_offload(optimizer)
        assert_gone(memory)
        train(net, optimizer)
        return
    if "scheduler" in name or "captured" in name:
        del earlier, later
    del optimizer
    assert_gone(memory)


def test_the_optimizer_does_not_keep_the_model() -> None:
    net = model()
    params = list(net.parameters())
    optimizer = offloaded(net)
    reference = weakref.ref(net)
    del net
    assert reference() is None
    assert [param for group in optimizer.param_groups for param in group["params"]] == params


def test_a_state_tensor_keeps_the_memory_and_nothing_else() -> None:
    net = model()
    optimizer = offloaded(net)
    memory = mappings(optimizer)
    train(net, optimizer)
    engine = weakref.ref(optimizer._offload_engine.engine)
    exp_avg: Tensor = optimizer.state[net[0].weight]["exp_avg"]
    del optimizer
    assert engine() is None
    assert_alive(memory)
    assert exp_avg.isfinite().all()
    del exp_avg
    assert_gone(memory)


def test_several_that_are_left_behind_are_told_of() -> None:
    net = model()
    parts = [torch.optim.AdamW(part.parameters()) for part in net]
    for part in parts:
        offload_optimizer(part, policy=POLICY)
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(
        UserWarning, match=r"SGD.step\(\) updates parameters of .*NOTHING IS OFFLOADED.*Attach to"
    ) as told:
        train(net, other, steps=3)
    assert len(told) == 2


def test_nobody_stumbles_over_parameters_without_storage() -> None:
    kept = model()
    optimizer = offloaded(kept)
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    sparse.grad = torch.eye(3).to_sparse()
    torch.optim.SGD([sparse], lr=0.5).step()
    assert torch.equal(sparse.detach().to_dense(), torch.eye(3) / 2)
    train(kept, optimizer)
