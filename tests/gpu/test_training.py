"""Training habits that behave differently on a device: GradScaler with fused kernels, clipping, capture."""

import pytest
import torch
from torch import nn

from fsdp_offload import OffloadPolicy, offload_optimizer

POLICY = OffloadPolicy(device_bytes=1 << 20, bucket_bytes=1 << 18)


def make(device: torch.device, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 700), nn.GELU(), nn.Linear(700, 300), nn.LayerNorm(300), nn.Linear(300, 1))
    model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def test_capture_is_refused(device):
    model, optimizer = make(device, capturable=True)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.synchronize()
    captured = torch.zeros(1, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured += 1
        with pytest.raises(RuntimeError, match="CUDA graph"):
            optimizer.step()
    optimizer.step()  # still whole
