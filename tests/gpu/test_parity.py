"""The parity suite and the cut table once more, with the parameters on a device and state in pinned memory."""

from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_offload import OffloadPolicy
from tests.cpu.test_cut_table import check_entry, entries
from tests.cpu.test_parity_optimizers import cases, model_for, plain_cases
from tests.parity import Net, Run, Zoo, batch, make_pair, train_step


def on_device(case: Any) -> bool:
    """torch has fused Adagrad on the CPU only."""
    cls, kwargs = case.values
    return not (cls is optim.Adagrad and kwargs.get("fused"))


ROOMY = OffloadPolicy(bucket_bytes=1 << 20)


@pytest.mark.parametrize(("cls", "kwargs"), [case for case in cases() if on_device(case)])
def test_same_bits(cls: type[optim.Optimizer], kwargs: dict[str, Any]) -> None:
    pair = make_pair(lambda: model_for(cls), lambda params: cls(params, **kwargs), device="cuda")
    pair.train(10)
    pair.assert_trained()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cls", "kwargs"), [case for case in plain_cases() if on_device(case)])
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


@pytest.mark.parametrize("kwargs", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_a_network_with_clipping_schedule_and_late_attach(kwargs: dict[str, Any]) -> None:
    def step(run: Run, number: int) -> float:
        run.optimizer.zero_grad()
        for micro in range(2):
            (run.model(batch(2 * number + micro, run.device, run.dtype)) / 2).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizer.step()
        run.parts["scheduler"].step()
        return run.optimizer.param_groups[0]["lr"]

    pair = make_pair(Net, lambda params: optim.AdamW(params, lr=0.02, **kwargs), device="cuda", policy=None)
    for run in pair:
        run.parts["scheduler"] = optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 20)
    pair.train(3, step)
    pair.attach(with_model=True)
    pair.train(5, step)
    pair.detach()
    pair.train(3, step)
    pair.attach(ROOMY, with_model=True)
    pair.train(3, step)


def test_load_state_dict_between_the_sides() -> None:
    pair = make_pair(Zoo, lambda params: optim.AdamW(params, lr=0.02, fused=True), device="cuda")
    pair.train(4)
    saved = pair.offloaded.optimizer.state_dict()
    copied = {
        "state": {key: {name: value.clone() for name, value in state.items()} for key, state in saved["state"].items()},
        "param_groups": saved["param_groups"],
    }
    pair.train(2)
    for run in pair:
        run.optimizer.load_state_dict(copied)
    pair.assert_same()
    pair.train(4, train_step)
