"""Attaching refuses, leaving everything as it was, and warns. More refusals are rows of ``test_remedy_table.py``."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.engine.engine import engine_of
from tests.fused_adam_reference import FusedAdam
from tests.parity import take_step
from tests.remedies import Unlisted, seen_of

pytestmark = pytest.mark.usefixtures("mesh")

Asked = tuple[Optimizer, dict[str, Any]]


def asked(
    make: Callable[..., Optimizer] = optim.AdamW,
    *,
    shard: dict[str, Any] | None = None,
    model: bool = False,
    **policy: Any,
) -> Callable[[], Asked]:
    """An optimizer, and with what it is attached; ``shard``: options of ``fully_shard``, if it is called."""

    def ask() -> Asked:
        net = nn.Linear(4, 4)
        if shard is not None:
            fully_shard(net, mesh=init_device_mesh("cpu", (1,)), **shard)
        return make(net.parameters()), {"policy": policy, **({"model": net} if model else {})}

    return ask


def matrices(params: Any) -> Optimizer:
    return optim.Muon([param for param in params if param.dim() == 2])


class HybridDeviceOptimizer(optim.AdamW):
    """Holds what Megatron's class of that name does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.offload_fraction, self.gpu_optimizer = 0.5, None
        self.cpu_optimizers: list[Tensor | Optimizer] = [optim.AdamW(self.param_groups[0]["params"])]


NO_OTHER_KERNEL = "FusedAdam is not one of them.*its kernels are the device's"
REFUSED: dict[str, tuple[Callable[[], Asked], str]] = {
    "sparse gradients": (asked(optim.SparseAdam), "SparseAdam .*sparse"),
    **{
        f"capturable {cls.__name__}": (asked(partial(cls, foreach=False, capturable=True)), "capturable")
        for cls in (optim.Adam, optim.RMSprop, optim.NAdam)
    },
    "Megatron's": (asked(HybridDeviceOptimizer), r"HybridDeviceOptimizer: .*OffloadPolicy\(host_fraction=0\.5\)"),
    "whole parameters on the CPU": (asked(matrices, host_fraction=0.5), "host_fraction=0.5 is for the elementwise"),
    "Adafactor on the CPU": (asked(optim.Adafactor, host_fraction=0.5), "Adafactor is not one of them"),
    "Adafactor of shards": (asked(optim.Adafactor, shard={}, model=True), "Adafactor .*sharded"),
    "FusedAdam on the CPU": (asked(FusedAdam, host_fraction=0.5), NO_OTHER_KERNEL),
    "others on the CPU": (asked(partial(Unlisted, momentum=0.9), host_fraction=0.5), "Unlisted is not one of them"),
    "overlap without a model": (asked(shard={}, overlap="forward"), r"\(overlap='forward'\) needs model=\.\.\."),
    "overlap without groups": (asked(model=True, overlap="iteration"), r"'iteration'\) hooks into fully_shard, and"),
    "gradients that nobody reduces": (
        asked(partial(FusedAdam, use_decoupled_grad=True), shard={}, model=True, overlap="iteration"),
        r"reads param\.decoupled_grad",
    ),
    "parameters without a model": (asked(parameters=True), r"parameters=True\) needs model=\.\.\."),
    "parameters that are on the host": (
        asked(shard={"offload_policy": CPUOffloadPolicy(pin_memory=False)}, model=True, parameters=True),
        r"CPUOffloadPolicy.*parameters=True",
    ),
}


@pytest.mark.parametrize(("ask", "message"), REFUSED.values(), ids=REFUSED)
def test_attaching_is_refused_and_leaves_the_optimizer_as_it_was(ask: Callable[[], Asked], message: str) -> None:
    optimizer, options = ask()
    before = seen_of(optimizer)
    with pytest.raises(ValueError, match=message):
        offload_optimizer(optimizer, **options)
    assert seen_of(optimizer) == before


# Policies ------------------------------------------------------------------------------------------------------------


def adamw() -> optim.AdamW:
    return optim.AdamW([nn.Parameter(torch.ones(64))])


@pytest.mark.parametrize("device_bytes", [1, 3])
def test_a_few_bytes_are_as_little_as_there_can_be(device_bytes: int) -> None:
    with pytest.warns(UserWarning, match="One update needs 512 bytes of the device, more than device_bytes="):
        optimizer = offload_optimizer(adamw(), policy={"device_bytes": device_bytes})
    take_step(optimizer)


def test_a_dict_is_a_policy() -> None:
    optimizer = offload_optimizer(adamw(), policy={"bucket_bytes": 2048, "serial": True})
    policy = OffloadPolicy(bucket_bytes=2048, serial=True)
    engine = engine_of(optimizer)
    assert engine is not None
    assert engine.policy == policy
    assert offload_optimizer(optimizer, policy=policy, exist_ok=True) is optimizer
    assert offload_optimizer(optimizer, policy={"bucket_bytes": 2048, "serial": True}, exist_ok=True) is optimizer


WITHOUT_EFFECT: dict[str, tuple[dict[str, Any], str]] = {
    "snapshot": ({"snapshot_bytes": 16}, r"snapshot_bytes=16 has no effect: no state fits into it"),
    "share": ({"host_fraction": 1e-6}, r"host_fraction=1e-06 has no effect"),
}


@pytest.mark.parametrize(("policy", "message"), WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
def test_an_option_without_effect_is_warned_of_once(policy: dict[str, Any], message: str) -> None:
    optimizer = adamw()
    with pytest.warns(UserWarning, match=message) as told:
        offload_optimizer(optimizer, policy=policy)
    assert sum("has no effect" in str(one.message) for one in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_step(optimizer)
