"""megatron-core's LayerWiseDistributedOptimizer, Muon beside AdamW: whole parameters, and a rank that has no bias."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_offload import OffloadPolicy, is_offloaded, offload_optimizer, offload_states, release_states, reload_before
from tests.distributed import megatron_optimizer as megatron
from tests.distributed.launch import spawn
from tests.parity import same_bits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that are not installed
    pytest.importorskip("megatron.core.optimizer")
    pytest.importorskip("megatron.core.distributed")

pytestmark = [pytest.mark.distributed, pytest.mark.gloo]

WIDTH = 32


def build() -> tuple[Any, Any]:
    """Three matrices under Muon, one bias under AdamW, all in bf16."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Model(MegatronModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=n == 0, dtype=torch.bfloat16) for n in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + torch.tanh(layer(x.bfloat16())).float()
            return x

    torch.manual_seed(0)
    config = TransformerConfig(num_layers=3, hidden_size=WIDTH, num_attention_heads=1, bf16=True)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, check_for_nan_in_grad=False)
    model = DistributedDataParallel(config, ddp, Model(config))
    params = [*model.parameters()]
    muon = torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02)
    adam = torch.optim.AdamW([param for param in params if param.dim() < 2], lr=0.02)
    options = OptimizerConfig(optimizer="muon", bf16=True, params_dtype=torch.bfloat16, clip_grad=0.01)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chain = LayerWiseDistributedOptimizer([muon, adam], options, groups, [lambda *_: None] * 2)
    chain.allgather_params = chain.broadcast_params  # its own reference: gloo gathers no parts of different sizes
    return model, chain


def train(*, offload: bool) -> tuple[list[float], list[Tensor]]:
    from megatron.core.distributed import finalize_model_grads

    model, chain = build()
    inners = [one.optimizer for one in chain.chained_optimizers]
    assert len(inners[1].param_groups[0]["params"]) == (dist.get_rank() == 0)
    model.config.finalize_model_grads_func = finalize_model_grads
    if offload:
        offload_optimizer(chain, policy=OffloadPolicy(bucket_bytes=2048))
        model.config.finalize_model_grads_func = reload_before(finalize_model_grads, chain)
        assert all(map(is_offloaded, inners))
    seen = []
    for step in range(4):
        model.zero_grad_buffer()
        chain.zero_grad()
        if offload:
            offload_states(chain)
            release_states(chain)
            mains = [main for one in chain.chained_optimizers for of in one.fp32_from_float16_groups for main in of]
            assert sum(main.untyped_storage().nbytes() for main in mains) == 0
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        model.config.finalize_model_grads_func([model])
        _, norm, _ = chain.step()
        seen += [loss.item(), float(norm)]
    left = [param.detach() for param in model.parameters()]
    for inner in inners:
        for param in inner.param_groups[0]["params"]:
            left += [param.detach(), *(torch.as_tensor(value) for value in inner.state[param].values())]
    return seen, [value.clone() for value in left]


def run_both(rank: int, world_size: int) -> None:
    from megatron.core import parallel_state

    warnings.filterwarnings("ignore", message="offload_optimizer")
    parallel_state.initialize_model_parallel()
    with megatron.as_if_on_cuda():
        (seen, left), (seen_offloaded, left_offloaded) = train(offload=False), train(offload=True)
    assert seen == seen_offloaded
    assert len(left) == len(left_offloaded) > 4
    assert all(map(same_bits, left, left_offloaded))
    parallel_state.destroy_model_parallel()


def test_muon_and_adamw_by_layers_keep_the_bits(tmp_path: Path) -> None:
    spawn(run_both, 2, tmp_path)
