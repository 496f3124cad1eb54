"""Megatron's HybridDeviceOptimizer: the CPU updates a share of the parameters. The 96 cases of its tests, bit by bit.

``tests/gpu/test_megatron_hybrid.py`` runs the same cases on a device.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from fsdp_offload import OffloadPolicy
from fsdp_offload.engine.engine import engine_of
from tests.parity import attach, same_value

RATE = 1e-3
WIDTHS = {"small": (120, 84, 10), "big": (512, 1024, 512, 100)}
OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam}

AXES: dict[str, tuple[Any, ...]] = {
    "net": tuple(WIDTHS),
    "groups": (False, True),
    "optimizer": tuple(OPTIMIZERS),
    "fraction": (0.0, 0.5, 1.0),
    "overlap": (False, True),
    "steps": (1, 10),
}


def id_of(case: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in case.items())


EVERY_CASE = pytest.mark.parametrize(
    "case", [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())], ids=id_of
)


def net_of(widths: tuple[int, ...]) -> nn.Module:
    """Two convolutions of images of 32 x 32, and linear layers."""
    torch.manual_seed(42)
    layers: list[nn.Module] = []
    for channels in ((3, 6), (6, 16)):
        layers += [nn.Conv2d(*channels, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for sizes in itertools.pairwise((400, *widths)):
        layers += [nn.Linear(*sizes), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def grouped(params: list[nn.Parameter], groups: bool) -> list[Any]:
    """All in one group, or the halves in two with entries of Megatron's."""
    half = len(params) // 2
    if not groups:
        return params
    return [
        {"params": params[:half], "wd_mult": 1.0, "lr_mult": 1e-4},
        {"params": params[half:], "wd_mult": 0.0, "lr_mult": 2e-4},
    ]


class Twin:
    """The net with two plain optimizers: one for all that the device updates, one for CPU copies of the rest."""

    def __init__(self, net: nn.Module, cls: type[Optimizer], groups: bool, on_cpu: set[str]) -> None:
        self.net, self.on_cpu = net, on_cpu
        self.copies = {name: nn.Parameter(param.detach().cpu()) for name, param in net.named_parameters()}
        self.of_device = cls(grouped(list(net.parameters()), groups), lr=RATE)
        self.of_cpu = cls(grouped(list(self.copies.values()), groups), lr=RATE, fused=True)

    def step(self) -> None:
        grads = {name: param.grad for name, param in self.net.named_parameters()}
        for name in self.on_cpu:
            grad = grads[name]
            assert grad is not None
            self.copies[name].grad, self.net.get_parameter(name).grad = grad.cpu(), None
        self.of_cpu.step()
        self.of_device.step()
        with torch.no_grad():
            for name in self.on_cpu:
                param = self.net.get_parameter(name)
                param.copy_(self.copies[name])
                param.grad = grads[name]

    def state(self, name: str) -> dict[str, Any]:
        if name in self.on_cpu:
            return self.of_cpu.state[self.copies[name]]
        return self.of_device.state.get(self.net.get_parameter(name), {})


def run(case: dict[str, Any], device: torch.device) -> None:
    """As in Megatron's tests, gradients add up from step to step."""
    cls, groups = OPTIMIZERS[case["optimizer"]], case["groups"]
    net, same = (net_of(WIDTHS[case["net"]]).to(device) for _ in range(2))
    policy = OffloadPolicy(host_fraction=case["fraction"], serial=not case["overlap"], bucket_bytes=1 << 16)
    optimizer = attach(cls(grouped(list(net.parameters()), groups), lr=RATE), model=net, policy=policy)
    engine = engine_of(optimizer)
    assert engine is not None
    keeps_state = cls is Adam
    on_cpu = {shard.name for shard in engine.plan.host_shards()}
    names = dict(net.named_parameters()).keys()
    assert bool(on_cpu) == (keeps_state and case["fraction"] > 0)
    assert (on_cpu == names) == (keeps_state and case["fraction"] == 1)
    twin = Twin(same, cls, groups, on_cpu)
    assert not optimizer.state_dict()["state"]
    for _ in range(case["steps"]):
        images = torch.randn(1, 3, 32, 32).to(device)
        for one in (net, same):
            one(images).sum().backward()
        optimizer.step()
        twin.step()
    for name, param in net.named_parameters():
        assert torch.equal(param, same.get_parameter(name)), name
        state: dict[str, Tensor] = optimizer.state[param]
        expected = {key: value for key, value in twin.state(name).items() if value is not None}
        assert state.keys() >= expected.keys() >= ({"exp_avg", "exp_avg_sq"} if keeps_state else set())
        for key, value in expected.items():
            assert state[key].device.type == "cpu"
            assert same_value(state[key], value.cpu()), (name, key)


@EVERY_CASE
def test_each_case_is_bitwise_that_of_plain_optimizers(case: dict[str, Any]) -> None:
    run(case, torch.device("cpu"))
