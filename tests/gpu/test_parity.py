"""The parity suite and the cut table once more, with the parameters on a device and state in pinned memory.

At last optimizers from other packages, as their own users use them. Each package is optional.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_offload import OffloadPolicy
from tests.cpu.test_cut_table import check_entry, entries
from tests.cpu.test_parity_optimizers import cases, model_for
from tests.overlapping import Loop, assert_same_each_step, assert_trained, pair
from tests.parity import SMALL, Zoo


def on_device(case: Any) -> bool:
    """torch has fused Adagrad on the CPU only."""
    cls, kwargs = case.values
    return not (cls is optim.Adagrad and kwargs.get("fused"))


@pytest.mark.parametrize(("cls", "kwargs"), [case for case in cases() if on_device(case)])
def test_same_bits(cls: type[optim.Optimizer], kwargs: dict[str, Any]) -> None:
    both = pair(None, SMALL, partial(cls, **kwargs), net=partial(model_for, cls), device="cuda")
    assert_same_each_step(*both, 10)
    assert_trained(both[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cls", "kwargs"), [case for case in cases(each_flag=False) if on_device(case)])
def test_same_bits_in_other_dtypes(cls: type[optim.Optimizer], kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    both = pair(None, SMALL, partial(cls, **kwargs, lr=0.02), net=lambda: model_for(cls).to(dtype), device="cuda")
    assert_same_each_step(*both, 10)


@pytest.mark.parametrize(("cls", "implementation", "dtype"), list(entries("cuda")))
def test_whole_and_cut_have_the_same_bits(cls: type[optim.Optimizer], implementation: str, dtype: torch.dtype) -> None:
    check_entry(cls, implementation, dtype, "cuda")


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.ASGD])
@pytest.mark.parametrize("foreach", [True, False])
def test_capturable(cls: type[optim.Optimizer], foreach: bool) -> None:
    both = pair(None, SMALL, partial(cls, lr=0.01, capturable=True, foreach=foreach), net=Zoo, device="cuda")
    assert_same_each_step(*both, 10)
    assert_trained(both[0])


SHAPES = [(256, 512), (512,), (96, 128), (4096,), (1024, 300)]


def random_step(run: Loop, at: int) -> None:
    for param in run.params:
        generator = torch.Generator("cuda").manual_seed(at)
        param.grad = torch.randn(param.shape, device="cuda", generator=generator)
    run.step()


@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        *(("bitsandbytes.optim", name, {}) for name in ("AdamW8bit", "Adam8bit", "AdamW", "Lion8bit")),
        *(("torchao.optim", name, {}) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
        *(("schedulefree", "AdamWScheduleFree", {"foreach": foreach}) for foreach in (True, False)),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_same_bits_of_other_packages(module: str, name: str, options: dict[str, Any]) -> None:
    cls = getattr(pytest.importorskip(module), name)
    both = plain, loop = pair(
        None,
        OffloadPolicy(bucket_bytes=1 << 20),
        partial(cls, lr=1e-3, **options),
        net=lambda: nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES),
        device="cuda",
    )
    for run in both:
        getattr(run.optimizer, "train", lambda: None)()
    assert_same_each_step(*both, 5 if module == "torchao.optim" else 10, random_step)
    assert_trained(plain)
    assert loop.optimizer.offload_report().memory.host_state_bytes > 0
    if module == "schedulefree":
        loop.optimizer.eval()
        loop.optimizer.train()
