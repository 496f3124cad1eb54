"""Device and host memory against formulas with every term named."""

import gc

import pytest
import torch
from torch import nn

from fsdp_offload import OffloadPolicy, offload_optimizer, remove_offload
from fsdp_offload.engine.engine import engine_of
from tests.forks import in_forked_child, resident_bytes
from tests.gpu.streams import MIB
from tests.overlapping import Loop

pytestmark = pytest.mark.usefixtures("clean_device")

SHAPES = [(4096, 4096), (4096,), (8192, 2048), (1000, 4099), (32000, 1024), (1024, 3000)]
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)
PARAM_BYTES = 4 * NUMEL
STATE_BYTES = 2 * PARAM_BYTES  # AdamW: exp_avg and exp_avg_sq in fp32
TOLERANCE = 0.02


def make(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()


DEVICE_BYTES = 96 * MIB
POLICY = OffloadPolicy(device_bytes=DEVICE_BYTES, bucket_bytes=16 * MIB)


def peak_above(before: int) -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("device_bytes", [DEVICE_BYTES, 256 * MIB])
def test_device_peak_of_the_first_and_of_later_steps(device, device_bytes):
    before = torch.cuda.memory_allocated()
    model, optimizer = make(device)
    policy = OffloadPolicy(device_bytes=device_bytes, bucket_bytes=16 * MIB)
    offload_optimizer(optimizer, model=model, policy=policy)
    for _ in range(4):  # the first one creates the state, in memory of its own
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer)
        peak_bytes = peak_above(before) - 2 * PARAM_BYTES  # and gradients, all alive until step() returns
        assert 0.5 * device_bytes < peak_bytes <= device_bytes + TOLERANCE * PARAM_BYTES


def test_what_nobody_uses_is_given_back_when_auto_takes_more(device, mesh, monkeypatch):
    policy = OffloadPolicy(overlap="forward", bucket_bytes=8192)
    loop = Loop(mesh, torch.optim.AdamW, policy).train(3)
    torch.empty(512 * MIB, dtype=torch.uint8, device=device)  # as a first step needed it
    engine = engine_of(loop.optimizer)
    reserved_bytes, block_bytes, room = torch.cuda.memory_reserved(), engine.core.cache.nbytes, engine.room

    def end(*_: object, **__: object) -> int:
        room.extra += 1
        return 1

    monkeypatch.setattr(room, "end", end)
    loop.train(1, first=3)
    assert engine.core.cache.nbytes > block_bytes
    assert torch.cuda.memory_reserved() <= reserved_bytes - 400 * MIB


def test_attaching_late_frees_the_state_and_removing_brings_it_back(device):
    before = torch.cuda.memory_allocated()
    model, optimizer = make(device)
    step(model, optimizer)
    assert torch.cuda.memory_allocated() - before == pytest.approx(PARAM_BYTES + STATE_BYTES, rel=TOLERANCE)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    assert torch.cuda.memory_allocated() - before <= PARAM_BYTES + DEVICE_BYTES + TOLERANCE * PARAM_BYTES
    step(model, optimizer)
    remove_offload(optimizer)
    assert torch.cuda.memory_allocated() - before == pytest.approx(PARAM_BYTES + STATE_BYTES, rel=TOLERANCE)
    del optimizer
    gc.collect()
    assert torch.cuda.memory_allocated() - before == pytest.approx(PARAM_BYTES, rel=TOLERANCE)


def test_host_memory_is_exact_pinned_and_freed(device):
    model, optimizer = make(device)
    step(model, optimizer)  # the driver's own host memory is there before we measure
    torch.cuda.synchronize()
    before = resident_bytes()
    offload_optimizer(optimizer, model=model)
    report = optimizer.offload_report()
    assert report.memory.host_state_bytes == STATE_BYTES
    assert report.memory.host_bytes == pytest.approx(STATE_BYTES, rel=0.01)
    assert resident_bytes() - before == pytest.approx(STATE_BYTES, rel=0.02)
    assert all(optimizer.state[param]["exp_avg"].is_pinned() for param in model.parameters())
    step(model, optimizer)
    del optimizer
    assert resident_bytes() - before < 0.02 * STATE_BYTES


def test_a_forked_worker_does_not_duplicate_the_arena(device):
    """A DataLoader worker, which looks at its own memory."""
    model, optimizer = make(device)
    offload_optimizer(optimizer, model=model)
    step(model, optimizer)
    torch.cuda.synchronize()
    most_bytes = resident_bytes() - 0.9 * STATE_BYTES
    assert in_forked_child(lambda: resident_bytes() < most_bytes) == 0
    step(model, optimizer)
