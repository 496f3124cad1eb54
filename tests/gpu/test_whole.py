"""An optimizer that moves as a whole, on a device: the programs of ``tests/core/test_whole.py``, and its memory."""

import gc

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from tests.core import test_whole as on_cpu
from tests.parity import attach

test_bits_are_those_of_plain_training = on_cpu.test_bits_are_those_of_plain_training
test_save_load_and_go_on = on_cpu.test_save_load_and_go_on
test_programs = on_cpu.test_programs


def test_state_is_on_the_device_during_the_step_alone(mesh: DeviceMesh) -> None:
    numel = 1 << 22
    param = nn.Parameter(torch.randn(numel, device="cuda"))
    during: list[int] = []

    class Momentum(on_cpu.Own):
        def update(self, param: Tensor, state: dict[str, object], group: dict[str, object]) -> None:
            velocity = state.setdefault("velocity", torch.zeros_like(param))
            velocity.add_(param.grad)  # type: ignore[union-attr]
            during.append(torch.cuda.memory_allocated())

    optimizer = attach(Momentum([param], lr=0.05), policy=OffloadPolicy())
    gc.collect()  # what earlier tests have left would go in between
    before: list[int] = []
    for _ in range(4):
        param.grad = torch.ones_like(param)
        before.append(torch.cuda.memory_allocated())
        optimizer.step()
    # The allocator does not split off a rest of less than 1 MiB.
    assert all(0 <= one - other - 4 * numel < 1 << 20 for one, other in zip(during, before, strict=True))
    assert len(set(before)) == 1
    assert torch.equal(optimizer.state[param]["velocity"], torch.full((numel,), 4.0))  # type: ignore[index]
