"""The parity suite and the cut table once more, with the parameters on a device and state in pinned memory."""

from typing import Any

import pytest
import torch
from torch import optim

from tests.cpu.test_cut_table import check_entry, entries
from tests.cpu.test_parity_optimizers import cases, model_for
from tests.parity import Zoo, make_pair


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
