"""The parity suite and the cut table once more, with the parameters on a device and state in pinned memory.

At last optimizers from other packages, as their own users use them. Each package is optional.
"""

from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_offload import OffloadPolicy
from tests.cpu.test_cut_table import check_entry, entries
from tests.cpu.test_parity_optimizers import cases, model_for
from tests.parity import Run, Zoo, make_pair


def on_device(case: Any) -> bool:
    """torch has fused Adagrad on the CPU only."""
    cls, kwargs = case.values
    return not (cls is optim.Adagrad and kwargs.get("fused"))


@pytest.mark.parametrize(("cls", "kwargs"), [case for case in cases() if on_device(case)])
def test_same_bits(cls: type[optim.Optimizer], kwargs: dict[str, Any]) -> None:
    pair = make_pair(lambda: model_for(cls), lambda params: cls(params, **kwargs), device="cuda")
    pair.train(10)
    pair.assert_trained()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cls", "kwargs"), [case for case in cases(each_flag=False) if on_device(case)])
def test_same_bits_in_other_dtypes(cls: type[optim.Optimizer], kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    pair = make_pair(lambda: model_for(cls), lambda params: cls(params, **kwargs, lr=0.02), device="cuda", dtype=dtype)
    pair.train(10)


@pytest.mark.parametrize(("cls", "implementation", "dtype"), list(entries("cuda")))
def test_whole_and_cut_have_the_same_bits(cls: type[optim.Optimizer], implementation: str, dtype: torch.dtype) -> None:
    check_entry(cls, implementation, dtype, "cuda")


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.ASGD])
@pytest.mark.parametrize("foreach", [True, False])
def test_capturable(cls: type[optim.Optimizer], foreach: bool) -> None:
    pair = make_pair(Zoo, lambda params: cls(params, lr=0.01, capturable=True, foreach=foreach), device="cuda")
    pair.train(10)
    pair.assert_trained()


SHAPES = [(256, 512), (512,), (96, 128), (4096,), (1024, 300)]


def random_step(run: Run, at: int) -> None:
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
def test_same_bits_of_other_packages(module: str, name: str, options: dict[str, Any]) -> None:
    cls = getattr(pytest.importorskip(module), name)
    pair = make_pair(
        lambda: nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES),
        lambda params: cls(params, lr=1e-3, **options),
        device="cuda",
        policy=OffloadPolicy(bucket_bytes=1 << 20),
    )
    pair.each(lambda run: getattr(run.optimizer, "train", lambda: None)())
    pair.train(5 if module == "torchao.optim" else 10, random_step)
    pair.assert_trained()
    assert pair.offloaded.optimizer.offload_report().memory.host_state_bytes > 0
    if module == "schedulefree":
        pair.offloaded.optimizer.eval()
        pair.offloaded.optimizer.train()
