"""Every combination of a policy's fields is exact, and keeps to ``device_bytes``."""

import functools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.engine.engine import Engine, engine_of
from tests.overlapping import Loop, Net, adamw, evaluate
from tests.parity import attach, same_bits
from tests.tiers import spread

BUCKET_BYTES = 2048
DEVICE_BYTES = {"auto": "auto", "small": 2 * BUCKET_BYTES, "large": 16 * BUCKET_BYTES}
STEPS = 7  # of which the second and the fifth are measured, where something is learnt


def small_net(master_weights: str) -> Net:
    net = Net(width=16, layers=2)
    return net if master_weights == "none" else net.bfloat16()


def trained(mesh: DeviceMesh, policy: OffloadPolicy | None, master_weights: str, *, with_model: bool) -> Loop:
    loop = Loop(mesh, adamw, None, net=functools.partial(small_net, master_weights))
    if policy is not None:
        attach(loop.optimizer, model=loop.model if with_model else None, policy=policy)
    return loop.train(STEPS, evaluate)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[torch.Tensor]]:
    """By ``master_weights``: what every combination has to give. Filled by the first that asks."""
    return {}


def what_is_expected(
    mesh: DeviceMesh, master_weights: Any, expected: dict[str, list[torch.Tensor]]
) -> list[torch.Tensor]:
    """Of the plain optimizer; with masters, which it does not have, of one bucket after the other."""
    if master_weights not in expected:
        policy = None
        if master_weights != "none":
            policy = OffloadPolicy(master_weights=master_weights, serial=True)
        expected[master_weights] = trained(mesh, policy, master_weights, with_model=False).everything()
    return expected[master_weights]


def check(
    mesh: DeviceMesh, policy: OffloadPolicy, expected: dict[str, list[torch.Tensor]], *, with_model: bool
) -> Engine:
    loop = trained(mesh, policy, policy.master_weights, with_model=with_model)
    wanted, found = what_is_expected(mesh, policy.master_weights, expected), loop.everything()
    assert len(found) == len(wanted)
    assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True))
    engine = engine_of(loop.optimizer)
    assert engine is not None
    assert engine.plan.moving_buckets >= 4
    if policy.device_bytes != "auto":
        # One bucket's worth is for state that the optimizer is just creating.
        assert engine.plan.ring_bytes + BUCKET_BYTES + engine.plan.resident_bytes <= policy.device_bytes
    return engine


MASTER_WEIGHTS = {name: name for name in ("none", "fp32", "remainder")}
SERIAL = {str(value): value for value in (False, True)}


@spread(
    pairs=True,
    master_weights=MASTER_WEIGHTS,
    serial=SERIAL,
    device_bytes=DEVICE_BYTES,
    overlap={name: name for name in ("step", "forward", "iteration")},
)
def test_with_a_model(
    mesh: DeviceMesh,
    expected: dict[str, list[torch.Tensor]],
    overlap: Any,
    device_bytes: Any,
    serial: bool,
    master_weights: Any,
) -> None:
    policy = OffloadPolicy(
        overlap=overlap,
        device_bytes=device_bytes,
        bucket_bytes=BUCKET_BYTES,
        serial=serial,
        master_weights=master_weights,
    )
    assert check(mesh, policy, expected, with_model=True).loads_in_backward


@spread(pairs=True, master_weights=MASTER_WEIGHTS, serial=SERIAL, device_bytes=DEVICE_BYTES)
def test_without_a_model(
    mesh: DeviceMesh, expected: dict[str, list[torch.Tensor]], device_bytes: Any, serial: bool, master_weights: Any
) -> None:
    policy = OffloadPolicy(
        device_bytes=device_bytes, bucket_bytes=BUCKET_BYTES, serial=serial, master_weights=master_weights
    )
    assert not check(mesh, policy, expected, with_model=False).loads_in_backward
