"""Transformer Engine's FusedAdam, as far as it can be tested on the CPU: against a reference of its Python contract.

In the end its masters: saved where they are the only copy, rebuilt where a checkpoint lacks them, and weights win over
them. Without offload, they are put right by hand after somebody has written weights.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import load as checked_load
from fsdp_offload.engine.engine import Engine
from tests.fused_adam import BF16, FP16, FP32, MASTERS, FusedPair, check_options, name_of, options, read_of
from tests.fused_adam_reference import FusedAdam
from tests.policies import with_share
from tests.state_dicts import EVERY_FORM, Run, all_used, assert_same, load, save
from tests.tiers import spread

pytestmark = pytest.mark.usefixtures("mesh")

CASES = {name_of(kwargs): kwargs for kwargs in options((FP32, FP16, BF16))}


@spread(kwargs=CASES, decoupled={"grad": False, "decoupled_grad": True})
def test_same_bits(kwargs: dict[str, Any], decoupled: bool) -> None:
    check_options(FusedAdam, {**kwargs, "use_decoupled_grad": decoupled})


@spread(
    master={master: master for master in MASTERS},
    policy={"roomy": OffloadPolicy(), "resident": with_share(staying=12_000)},
)
def test_attached_late(policy: OffloadPolicy, master: str) -> None:
    pair = FusedPair(FusedAdam, policy=policy, late=2, **MASTERS[master], exp_avg_dtype=BF16)
    pair.assert_same()
    pair.step(3)


@pytest.mark.parametrize(("set_grad_none", "waits"), [(None, 0), (True, 0), (False, 1)])
def test_zero_grad_waits_for_updates_where_it_zeroes(
    monkeypatch: pytest.MonkeyPatch, set_grad_none: bool | None, waits: int
) -> None:
    pair = FusedPair(FusedAdam, set_grad_none=set_grad_none).step(1)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "wait_updated", wait := Mock())
        pair.offloaded.optimizer.zero_grad()
    assert wait.call_count == waits
    pair.plain.optimizer.zero_grad()
    pair.step(2)


def test_state_of_parameters_without_gradient() -> None:
    pair = FusedPair(FusedAdam, master_weights=True)
    pair.step(1, without=("up", "down", "norm"))
    assert pair.offloaded.optimizer.state.keys() == set(pair.offloaded.params.values())
    assert [group["step"] for group in pair.offloaded.optimizer.param_groups] == [1, 1, 1]


def test_remainder_and_fp32_masters_refuse_each_other() -> None:
    one = FusedPair(FusedAdam, **MASTERS["fp32"]).step(2)
    other = FusedPair(FusedAdam, **MASTERS["remainder"]).step(2)
    for target, source in ((one, other), (other, one)):
        optimizer, saved = target.offloaded.optimizer, source.offloaded.optimizer.state_dict()
        before = optimizer.state_dict()["param_groups"]
        with pytest.raises(ValueError, match=r"master_param.*int16"):
            optimizer.load_state_dict(saved)
        assert optimizer.state_dict()["param_groups"] == before
        target.assert_same()


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    package = types.ModuleType("transformer_engine")
    package.__version__ = "2.17.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    with pytest.raises(ValueError, match=r"2\.17\.1 writes out of bounds.*Use 2\.18 or newer"):
        offload_optimizer(FusedAdam([torch.nn.Parameter(torch.ones(3))]))


@pytest.mark.parametrize("moments", [FP32, BF16], ids=str)
def test_grad_scaler_with_capturable(moments: torch.dtype) -> None:
    """An overflow skips the step on both sides, and the counters of the groups follow FusedAdam's own order."""
    pair = FusedPair(FusedAdam, capturable=True, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(6):
        pair.give_gradients()
        for scaler, run in zip(scalers, pair, strict=True):
            scaler.scale(torch.ones(()))
            for param in run.params.values():
                if param.grad is not None:
                    param.grad.mul_(scaler.get_scale())
            if step in (1, 4):
                run.params["norm.bias"].grad[3] = torch.inf
            with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
                scaler.step(run.optimizer)
            scaler.update()
        pair.steps += 1
        pair.assert_same()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 1.0


# Masters -------------------------------------------------------------------------------------------------------------


class Like(FusedAdam):
    """A class that the library does not know, and that keeps the same state."""

    __module__ = "elsewhere"


CLASSES = pytest.mark.parametrize("cls", [FusedAdam, Like])
LOW = ["up.weight", "up.bias", "down.weight", "down.bias"]
FULL = ["norm.weight", "norm.bias"]


def new_run(cls: type[FusedAdam] = FusedAdam, **options: Any) -> Run:
    """Linear layers in bf16, one of them of several buckets, and a norm in fp32, whose master nobody reads."""
    make = partial(cls, lr=1e-3, betas=(0.9, 0.99), master_weights=True)
    return Run(make, dtype=torch.bfloat16, prepare=all_used, groups=lambda net: net.parameters(), **options)


def assert_same_training(one: Run, other: Run) -> None:
    """But for the masters that nobody reads."""
    assert_same(one.values(), other.values())
    for name, param in one.params().items():
        assert_same(*(read_of(run.state(name), param) for run in (one, other)), name)
    assert [group["step"] for group in one.optimizer.param_groups] == [
        group["step"] for group in other.optimizer.param_groups
    ]


@CLASSES
@EVERY_FORM
@pytest.mark.parametrize("for_load", [False, True])
def test_only_copies_are_saved_and_duplicates_are_not(
    form: dict[str, Any], for_load: bool, cls: type[FusedAdam]
) -> None:
    run = new_run(cls).train(0)
    keys = run.get(for_load=for_load, **form)
    if not form:
        keys = {f"state.{fqn}.{name}" for fqn, state in keys["state"].items() for name in state}
    assert {key for key in keys if "master_param" in key} == {f"state.{name}.master_param" for name in LOW}
    assert all(("master_param" in run.state(name)) == (cls is Like) for name in FULL)  # that class may read its own


@EVERY_FORM
def test_a_run_resumes_with_its_masters(tmp_path: Path, form: dict[str, Any]) -> None:
    saver = new_run().train(0, 1)
    save(saver, tmp_path, **form)
    resumed = new_run(seed=1)
    load(resumed, tmp_path, **form)
    assert_same_training(resumed, saver)
    assert_same_training(resumed.train(2, 3), new_run(offload=False).train(0, 1, 2, 3))


def without_masters(state: dict[str, Any]) -> dict[str, Any]:
    left = {fqn: {k: v for k, v in values.items() if k != "master_param"} for fqn, values in state["state"].items()}
    return {**state, "state": left}


def plain_without_masters(*steps: int) -> Run:
    """The reference: as if the masters had been made anew after those steps."""
    plain = new_run(offload=False).train(*steps)
    for name in LOW:
        plain.state(name)["master_param"].copy_(plain.values()[name].float())
    return plain


@pytest.mark.parametrize("through_a_file", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "used"])
def test_missing_masters_are_made_from_the_parameters(tmp_path: Path, steps_before: int, through_a_file: bool) -> None:
    saver, run = new_run().train(0, 1), new_run(seed=1).train(*range(steps_before))
    saved = {"model": saver.model.state_dict(), "optimizer": without_masters(saver.get())}
    if through_a_file:
        dcp.save(saved, checkpoint_id=tmp_path)
        saved = {"model": run.model.state_dict(), "optimizer": run.get(for_load=True)}
        checked_load(saved, checkpoint_id=tmp_path)
    run.weights_from(saver).set(saved["optimizer"])
    assert_same_training(run, plain_without_masters(0, 1))
    assert_same_training(run.train(2, 3), plain_without_masters(0, 1).train(2, 3))


def test_existing_masters_stay_where_only_other_state_is_written() -> None:
    """Somebody resets the momentum of a run in use; nobody touches weights or masters."""
    run, plain = new_run().train(0, 1), new_run(offload=False).train(0, 1)
    state = run.get(for_load=True)
    for name in (*LOW, *FULL):
        state["state"][name]["exp_avg"].zero_()
        plain.state(name)["exp_avg"].zero_()
    run.set(state)
    assert_same_training(run, plain)


def put_right(plain: Run) -> None:
    """Do by hand what offload does in the slot: the master takes over an element that somebody has written."""
    for name in LOW:
        param, master = plain.values()[name], plain.state(name)["master_param"]
        master.copy_(torch.where(param == master.to(param.dtype), master, param.float()))


def write_some(run: Run, source: Run) -> None:
    """Every other row of one matrix, and one element of a vector."""
    run.values()["up.weight"][::2].copy_(source.values()["up.weight"][::2])
    run.values()["down.bias"][1].fill_(3.0)


@pytest.mark.parametrize("write", [Run.weights_from, write_some])
@CLASSES
@pytest.mark.parametrize("steps_before", [0, 2])
def test_written_weights_win_in_the_next_step(
    write: Callable[[Run, Run], object], steps_before: int, cls: type[FusedAdam]
) -> None:
    run, plain = (new_run(cls, offload=offload).train(*range(steps_before)) for offload in (True, False))
    source = new_run(seed=1, offload=False)
    for one in (run, plain):
        write(one, source)
    if steps_before:
        assert_same_training(run, plain)  # masters are looked at in the step, not before
        put_right(plain)
    for step in (5, 6):
        assert_same_training(run.train(step), plain.train(step))


@EVERY_FORM
def test_weights_that_come_after_the_optimizers_state_win(tmp_path: Path, form: dict[str, Any]) -> None:
    """As in fine-tuning from other weights with the state of an earlier run."""
    save(new_run().train(0, 1), tmp_path / "run", **form)
    run, plain, source = new_run(seed=2), new_run(offload=False).train(0, 1), new_run(seed=1, offload=False)
    load(run, tmp_path / "run", **form)
    for one in (run, plain):
        one.weights_from(source)
    put_right(plain)
    for step in (5, 6):
        assert_same_training(run.train(step), plain.train(step))
