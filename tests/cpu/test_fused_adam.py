"""Transformer Engine's FusedAdam, as far as it can be tested on the CPU: against a reference of its Python contract."""

from typing import Any

import pytest
import torch

from fsdp_offload import OffloadPolicy, offload_optimizer
from tests.fused_adam import BF16, FP16, FP32, MASTERS, FusedPair, check_options, name_of, options
from tests.fused_adam_reference import FusedAdam
from tests.policies import with_share
from tests.tiers import spread

CASES = {name_of(kwargs): kwargs for kwargs in options((FP32, FP16, BF16))}


@spread(kwargs=CASES, decoupled={"grad": False, "decoupled_grad": True})
def test_same_bits(kwargs: dict[str, Any], decoupled: bool) -> None:
    check_options(FusedAdam, {**kwargs, "use_decoupled_grad": decoupled})


@spread(
    master={master: master for master in MASTERS},
    policy={"roomy": OffloadPolicy(), "resident": with_share(staying=12_000)},
)
def test_attached_late(policy: OffloadPolicy, master: str) -> None:
    pair = FusedPair(FusedAdam, policy=policy, late=2, **MASTERS[master], exp_avg_dtype=BF16)
    pair.assert_same()
    pair.step(3)


def test_state_of_parameters_without_gradient() -> None:
    pair = FusedPair(FusedAdam, master_weights=True)
    pair.step(1, without=("up", "down", "norm"))
    assert pair.offloaded.optimizer.state.keys() == set(pair.offloaded.params.values())
    assert [group["step"] for group in pair.offloaded.optimizer.param_groups] == [1, 1, 1]


def test_remainder_and_fp32_masters_refuse_each_other() -> None:
    one = FusedPair(FusedAdam, **MASTERS["fp32"]).step(2)
    other = FusedPair(FusedAdam, **MASTERS["remainder"]).step(2)
    for target, source in ((one, other), (other, one)):
        optimizer, saved = target.offloaded.optimizer, source.offloaded.optimizer.state_dict()
        before = optimizer.state_dict()["param_groups"]
        with pytest.raises(ValueError, match=r"master_param.*int16"):
            optimizer.load_state_dict(saved)
        assert optimizer.state_dict()["param_groups"] == before
        target.assert_same()


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    package = types.ModuleType("transformer_engine")
    package.__version__ = "2.17.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    with pytest.raises(ValueError, match=r"2\.17\.1 writes out of bounds.*Use 2\.18 or newer"):
        offload_optimizer(FusedAdam([torch.nn.Parameter(torch.ones(3))]))


@pytest.mark.parametrize("moments", [FP32, BF16], ids=str)
def test_grad_scaler_with_capturable(moments: torch.dtype) -> None:
    """An overflow skips the step on both sides, and the counters of the groups follow FusedAdam's own order."""
    pair = FusedPair(FusedAdam, capturable=True, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(6):
        pair.give_gradients()
        for scaler, run in zip(scalers, pair, strict=True):
            scaler.scale(torch.ones(()))
            for param in run.params.values():
                if param.grad is not None:
                    param.grad.mul_(scaler.get_scale())
            if step in (1, 4):
                run.params["norm.bias"].grad[3] = torch.inf
            with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
                scaler.step(run.optimizer)
            scaler.update()
        pair.steps += 1
        pair.assert_same()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 1.0
