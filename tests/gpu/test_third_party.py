"""Optimizers from other packages on a device, as their own users use them. Each package is optional."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.state.layout import leaves_of

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def bitsandbytes(name: str, **options) -> Make:
    module = pytest.importorskip("bitsandbytes")
    return lambda params: getattr(module.optim, name)(params, lr=1e-3, **options)


def torchao(name: str) -> Make:
    module = pytest.importorskip("torchao.optim")
    return lambda params: getattr(module, name)(params, lr=1e-3)


def schedulefree(**options) -> Make:
    module = pytest.importorskip("schedulefree")
    return lambda params: module.AdamWScheduleFree(params, lr=1e-3, **options)


def build(make: Make, device: torch.device) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    shapes = [(256, 512), (512,), (96, 128), (4096,), (1024, 300)]
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    return params, make(params)


def compare(make: Make, device: torch.device, *, steps: int = 10) -> torch.optim.Optimizer:
    params, plain = build(make, device)
    twins, offloaded = build(make, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        offload_optimizer(offloaded, policy=OffloadPolicy(bucket_bytes=1 << 20))
    for optimizer in (plain, offloaded):
        if hasattr(optimizer, "train"):
            optimizer.train()
    for step in range(steps):
        generator = torch.Generator(device).manual_seed(step)
        for param, twin in zip(params, twins, strict=True):
            param.grad = torch.randn(param.shape, device=device, generator=generator)
            twin.grad = param.grad.clone()
        plain.step()
        offloaded.step()
        for param, twin in zip(params, twins, strict=True):
            assert torch.equal(param, twin)
            assert_same_state(plain.state[param], offloaded.state[twin])
    return offloaded


def assert_same_state(one: dict, other: dict) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            pairs = zip(leaves_of(value), leaves_of(other[name]), strict=True)
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit", "AdamW", "Lion8bit"])
def test_bitsandbytes(device, name):
    offloaded = compare(bitsandbytes(name), device)
    assert offloaded.offload_report().memory.host_state_bytes > 0


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(device, name):
    offloaded = compare(torchao(name), device, steps=5)
    assert offloaded.offload_report().memory.host_state_bytes > 0


@pytest.mark.parametrize("foreach", [True, False])
def test_schedulefree(device, foreach):
    offloaded = compare(schedulefree(foreach=foreach), device)
    offloaded.eval()
    offloaded.train()
