"""Optimizers from other packages on a device, as their own users use them. Each package is optional."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload import OffloadPolicy
from tests.parity import Run, make_pair

SHAPES = [(256, 512), (512,), (96, 128), (4096,), (1024, 300)]


def step(run: Run, at: int) -> None:
    for param in run.model.parameters():
        generator = torch.Generator("cuda").manual_seed(at)
        param.grad = torch.randn(param.shape, device="cuda", generator=generator)
    run.optimizer.step()


@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        *(("bitsandbytes.optim", name, {}) for name in ("AdamW8bit", "Adam8bit", "AdamW", "Lion8bit")),
        *(("torchao.optim", name, {}) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
        *(("schedulefree", "AdamWScheduleFree", {"foreach": foreach}) for foreach in (True, False)),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_same_bits(module: str, name: str, options: dict[str, Any]) -> None:
    cls = getattr(pytest.importorskip(module), name)
    pair = make_pair(
        lambda: nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES),
        lambda params: cls(params, lr=1e-3, **options),
        device="cuda",
        policy=OffloadPolicy(bucket_bytes=1 << 20),
    )
    pair.each(lambda run: getattr(run.optimizer, "train", lambda: None)())
    pair.train(5 if module == "torchao.optim" else 10, step)
    pair.assert_trained()
    assert pair.offloaded.optimizer.offload_report().memory.host_state_bytes > 0
    if module == "schedulefree":
        pair.offloaded.optimizer.eval()
        pair.offloaded.optimizer.train()
