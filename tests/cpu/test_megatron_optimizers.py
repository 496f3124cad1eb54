"""Megatron's own ``ChainedOptimizer``, over bf16 parameters with fp32 masters and over fp32 ones: with and without us.

They run as they are, on the CPU. What they make on ``device="cuda"`` while they are built (scales of one element) is
made on the CPU, and bf16 parameters say that their type is that of the device, by which Megatron recognises them.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import offload_optimizer, offload_states, release_states, reload_states
from tests.policies import with_share

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer")
pytest.importorskip("megatron.core", reason="test_megatron_chain.py has classes with the same interface")

POLICY = with_share(bucket_bytes=1 << 10, passing=1 << 12, staying=1 << 9)
GROUP = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


class OnDevice(nn.Parameter):
    """A bf16 parameter, to Megatron."""

    def type(self, *args: Any, **kwargs: Any) -> Any:
        return super().type(*args, **kwargs) if args or kwargs else "torch.cuda.BFloat16Tensor"


class Run:
    """A chain of Megatron's two kinds of optimizers; gradients come from a formula."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, offload: bool) -> None:
        torch.manual_seed(0)
        self.dense = [OnDevice(torch.randn(6, 5).bfloat16()), OnDevice(torch.randn(7).bfloat16())]
        self.experts = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(9))]
        self.chain = self._built(monkeypatch)
        self.offload = offload
        if offload:
            offload_optimizer(self.chain, policy=POLICY)

    def _built(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that are not installed
            from megatron.core.optimizer import OptimizerConfig
            from megatron.core.optimizer.optimizer import (
                ChainedOptimizer,
                Float16OptimizerWithFloat16Params,
                FP32Optimizer,
            )
        config = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True)
        make = torch.tensor
        with monkeypatch.context() as patched:
            patched.setattr(torch, "tensor", lambda *args, **kwargs: make(*args, **{**kwargs, "device": "cpu"}))
            groups = [{"params": params, **GROUP} for params in (self.dense, self.experts)]
            inner = [torch.optim.AdamW([group], lr=0.1) for group in groups]
            dense = Float16OptimizerWithFloat16Params(inner[0], config, None, None)
            return ChainedOptimizer([dense, FP32Optimizer(inner[1], config, None)])

    def phases(self, *phases: Callable[[Any], None]) -> None:
        for phase in phases if self.offload else ():
            phase(self.chain)

    def step(self, number: int) -> None:
        self.phases(offload_states)
        self.chain.zero_grad()
        self.phases(release_states)
        generator = torch.Generator().manual_seed(number)
        for param in (*self.dense, *self.experts):
            param.main_grad = torch.randn(param.shape, generator=generator)
        self.phases(reload_states)
        assert not self.chain.prepare_grads()
        assert self.chain.step_with_ready_grads()

    def values(self) -> Iterator[Tensor]:
        yield from (*self.dense, *self.experts)
        for optimizer in self.chain.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                for param in group["params"]:
                    yield param
                    yield from (optimizer.optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq", "step"))


def test_the_same_bits_with_and_without_while_masters_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, offloaded = Run(monkeypatch, offload=False), Run(monkeypatch, offload=True)
    masters = [main for group in offloaded.chain.chained_optimizers[0].fp32_from_float16_groups for main in group]
    assert [main.dtype for main in masters] == [torch.float32, torch.float32]
    for number in range(4):
        for run in (plain, offloaded):
            run.step(number)
        assert all(main.untyped_storage().nbytes() for main in masters)
        assert all(map(torch.equal, plain.values(), offloaded.values()))
        offloaded.phases(offload_states, release_states)
        assert [main.untyped_storage().nbytes() for main in masters] == [0, 0]
