"""Transformer Engine's own FusedAdam, with its kernels: the same bits with and without offload."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import get_optimizer_state_dict, load, set_optimizer_state_dict
from tests.fused_adam import BF16, FP8, FP16, FP32, MASTERS, FusedPair, Mixed, check_options, name_of, options
from tests.process_groups import process_group

te = pytest.importorskip("transformer_engine.pytorch")
FusedAdam = te.optimizers.FusedAdam


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    with process_group("cpu:gloo,cuda:nccl"):
        yield


def sharded() -> nn.Module:
    model = Mixed().cuda()
    mesh = init_device_mesh("cuda", (1,))
    for layer in (model.up, model.norm, model.frozen, model.down):
        fully_shard(layer, mesh=mesh)
    return model


def sharded_pair(kwargs: dict[str, Any]) -> FusedPair:
    return FusedPair(FusedAdam, device="cuda", build=sharded, **kwargs)


@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])
@pytest.mark.parametrize("kwargs", list(options((FP32, FP16, BF16, FP8))), ids=name_of)
def test_same_bits(kwargs: dict[str, Any], decoupled: bool) -> None:
    check_options(FusedAdam, {**kwargs, "use_decoupled_grad": decoupled}, "cuda")


@pytest.mark.parametrize("kwargs", list(options((FP32, FP16, BF16, FP8))), ids=name_of)
def test_same_bits_with_fully_shard(kwargs: dict[str, Any], one_rank: None) -> None:
    sharded_pair(kwargs).step(2, without=("up",)).step(3)


@pytest.mark.parametrize("kwargs", [{**m, "exp_avg_dtype": d} for m in MASTERS.values() for d in (FP32, FP16, FP8)])
def test_checkpoint(kwargs: dict[str, Any], one_rank: None, tmp_path: Path) -> None:
    pair = sharded_pair(kwargs).step(3)
    saved = pair.offloaded
    state = {"model": saved.model.state_dict(), "optim": get_optimizer_state_dict(saved.model, saved.optimizer)}
    dcp.save(state, checkpoint_id=tmp_path)
    fresh = sharded_pair(kwargs).offloaded
    optimizer, model = fresh.optimizer, fresh.model
    before = torch.cuda.max_memory_allocated()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, for_load=True)}
    load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, optimizer, state["optim"])
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    expected, found = saved.optimizer.state_dict(), optimizer.state_dict()
    for number, entries in expected["state"].items():
        for name, value in entries.items():
            loaded = found["state"][number][name]
            one, other = value._local_tensor, loaded._local_tensor
            if kwargs.get("exp_avg_dtype") is FP32 and "master_weight_dtype" not in kwargs:
                assert torch.equal(one, other), name
            elif one.any() or kwargs["exp_avg_dtype"] is not FP8:  # FusedAdam itself makes NaN of zeros in fp8
                # Scaled again.
                torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    assert [g.get("step") for g in optimizer.param_groups] == [3, 3, None]  # nothing is saved of an empty group


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("moments", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("master", ["none", "fp32", "remainder"])
def test_cut_ranges_have_the_same_bits(dtype: torch.dtype, moments: tuple[torch.dtype, ...], master: str) -> None:
    """Large tensors, of which every bucket has a range."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long = nn.Parameter(torch.randn(300_007, dtype=dtype))
            self.wide = nn.Parameter(torch.randn(129, 1111, dtype=dtype))

    policy = OffloadPolicy(bucket_bytes=200_000)
    kwargs = {**MASTERS[master], "exp_avg_dtype": moments[0], "exp_avg_sq_dtype": moments[1]}
    FusedPair(FusedAdam, device="cuda", build=Large, policy=policy, **kwargs).step(5)


def test_fp8_state_has_no_transpose_on_the_device() -> None:
    pair = FusedPair(FusedAdam, device="cuda", master_weights=True, exp_avg_dtype=FP8, exp_avg_sq_dtype=FP8).step(3)
    for state in pair.offloaded.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name]._transpose is None
            assert state[name]._data.device.type == "cpu"
            assert state[name]._data.is_pinned()


def test_memory() -> None:
    """The device keeps staging and nothing else, also in the first step, and fp32 temporaries stay within a bucket."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ParameterList([nn.Parameter(torch.randn(1 << 18, dtype=BF16)) for _ in range(48)])

    policy = OffloadPolicy(bucket_bytes=4 << 20)
    pair = FusedPair(FusedAdam, device="cuda", build=Many, policy=policy, master_weights=True, exp_avg_dtype=FP16)
    model, optimizer = pair.offloaded.model, pair.offloaded.optimizer
    del pair
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= 18 << 20
    assert torch.cuda.memory_allocated() - before <= 13 << 20


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
@pytest.mark.parametrize("moment", [FP32, FP16, BF16, FP8], ids=str)
def test_quantized_parameters(recipe: str, moment: torch.dtype) -> None:
    from transformer_engine.common import recipe as recipes

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with te.quantized_model_init(enabled=True, recipe=getattr(recipes, recipe)()):
                self.up = te.Linear(256, 128, params_dtype=BF16, device="cuda")
                self.down = te.Linear(128, 256, params_dtype=BF16, device="cuda")

    pair = FusedPair(FusedAdam, device="cuda", build=Quantized, master_weights=True, exp_avg_dtype=moment)
    assert hasattr(pair.plain.params["up.weight"], "_quantizer")
    pair.step(4)
    saved = pair.plain.optimizer.state_dict()
    for run in pair:
        run.optimizer.load_state_dict(copy.deepcopy(saved))
    pair.assert_same()
    pair.step(2)


def test_remainders_of_quantized_parameters_are_refused() -> None:
    with te.quantized_model_init(enabled=True):
        layer = te.Linear(128, 128, params_dtype=BF16, device="cuda")
    optimizer = FusedAdam(layer.parameters(), master_weights=True, store_param_remainders=True)
    with pytest.raises(ValueError, match="int16 remainders"):
        offload_optimizer(optimizer)


@pytest.mark.parametrize("arguments", [(), ("--masters", "remainder", "--moments", "bf16"), ("--moments", "fp8")])
def test_example(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    run = subprocess.run(
        [*command, "examples/te_fused_adam.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": f".:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the same: yes" in run.stdout
