"""Megatron's own ``ChainedOptimizer``, over bf16 parameters with fp32 masters and over fp32 ones."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import offload_optimizer, offload_states, release_states, reload_states
from tests.distributed.megatron_optimizer import as_if_on_cuda
from tests.parity import params_of
from tests.policies import with_share
from tests.proofs import TRAINS, proves

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer")
pytest.importorskip("megatron.core", reason="test_megatron_chain.py has classes with the same interface")

POLICY = with_share(bucket_bytes=1 << 10, passing=1 << 12, staying=1 << 9)
GROUP = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


class Run:
    """A chain of Megatron's two kinds of optimizers; gradients come from a formula."""

    def __init__(self, *, offload: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that are not installed
            from megatron.core.optimizer import OptimizerConfig
            from megatron.core.optimizer import optimizer as megatron
        torch.manual_seed(0)
        self.dense = [nn.Parameter(torch.randn(size).bfloat16()) for size in ((6, 5), (7,))]
        self.experts = [nn.Parameter(torch.randn(size)) for size in ((4, 3), (9,))]
        config = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True)
        dense, experts = (torch.optim.AdamW([{"params": p, **GROUP}], lr=0.1) for p in (self.dense, self.experts))
        with as_if_on_cuda():
            masters = megatron.Float16OptimizerWithFloat16Params(dense, config, None, None)
            self.chain = megatron.ChainedOptimizer([masters, megatron.FP32Optimizer(experts, config, None)])
        self.offload = offload
        if offload:
            offload_optimizer(self.chain, policy=POLICY)

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
        for inner in (one.optimizer for one in self.chain.chained_optimizers):
            for param in params_of(inner):
                yield from (param, *(inner.state[param][key] for key in ("exp_avg", "exp_avg_sq", "step")))


@proves("Megatron-LM's optimizers", "megatron-core", TRAINS)
def test_the_same_bits_with_and_without_while_masters_leave() -> None:
    plain, offloaded = Run(offload=False), Run(offload=True)
    masters = [main for group in offloaded.chain.chained_optimizers[0].fp32_from_float16_groups for main in group]
    assert [main.dtype for main in masters] == [torch.float32, torch.float32]
    for number in range(4):
        for run in (plain, offloaded):
            run.step(number)
        assert all(main.untyped_storage().nbytes() for main in masters)
        assert all(map(torch.equal, plain.values(), offloaded.values()))
        offloaded.phases(offload_states, release_states)
        assert [main.untyped_storage().nbytes() for main in masters] == [0, 0]
