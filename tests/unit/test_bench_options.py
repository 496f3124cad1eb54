"""What ``bench step`` makes of its options, without an accelerator: figures come from one only."""

import sys
from typing import get_args

import pytest
import torch
from torch import nn

from examples.benchmarks.step import AdamKind, Implementation, Masters, optimizer_maker, plain_model
from fsdp_offload.optimizers.masters import MasterKind

PARAMS = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]


def test_adamw_has_the_implementation_that_was_asked_for() -> None:
    fused, foreach = (
        optimizer_maker(AdamKind.ADAMW, implementation, Masters.FP32)(PARAMS) for implementation in Implementation
    )
    assert (fused.defaults["fused"], fused.defaults["foreach"]) == (True, False)
    assert (foreach.defaults["fused"], foreach.defaults["foreach"]) == (False, True)


def test_parameters_and_gradients_have_one_dtype() -> None:
    model = plain_model([(3, 8), (2, 8)], torch.device("cpu"), torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.bfloat16}


def test_every_kind_of_master_can_be_asked_for() -> None:
    assert {kind.value for kind in Masters} == {"none", *get_args(MasterKind)}


def test_transformer_engine_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(
        SystemExit, match=r"--optimizer te needs Transformer Engine \(pip install 'fsdp-offload\[te\]'\)"
    ):
        optimizer_maker(AdamKind.TE, Implementation.FUSED, Masters.NONE)


def test_transformer_engine_has_masters_of_its_own() -> None:
    with pytest.raises(SystemExit, match="masters of its own"):
        optimizer_maker(AdamKind.TE, Implementation.FUSED, Masters.FP32)
