"""``master_param``: saved where it is the only copy, rebuilt where a checkpoint lacks it, and weights win over it.

With a small optimizer that keeps its state as Transformer Engine's FusedAdam does; and its reference is the same one
without offload, whose masters are put right by hand after somebody has written weights.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim import Optimizer

from fsdp_offload.checkpoint import load as checked_load
from tests.state_dicts import EVERY_FORM, Run, all_used, assert_same

pytestmark = pytest.mark.usefixtures("mesh")


class MasterAdam(Optimizer):
    """Fp32 moments and an fp32 ``master_param`` for every parameter; the counter is the group's.

    A bf16 parameter is what its master rounds to. An fp32 parameter has a master as well, which nobody reads nor
    updates after it was made.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
                    state["master_param"] = param.clone().float()
                target = state["master_param"] if param.dtype is torch.bfloat16 else param
                self._adam(target, param.grad.float(), state, group)
                if target is not param:
                    param.copy_(target)

    @staticmethod
    def _adam(target: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(1e-8)
        target.sub_(state["exp_avg"] / (1 - beta1 ** group["step"]) / denominator, alpha=group["lr"])


class LateCounter(MasterAdam):
    """The group has no counter before the first step."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        for group in self.param_groups:
            del group["step"]
        del self.defaults["step"]


LOW = ["up.weight", "up.bias", "down.weight", "down.bias"]
FULL = ["norm.weight", "norm.bias"]


def new_run(make: type[MasterAdam] = MasterAdam, **options: Any) -> Run:
    """Linear layers in bf16, one of them of several buckets, and a norm in fp32."""
    return Run(make, dtype=torch.bfloat16, prepare=all_used, groups=lambda net: net.parameters(), **options)


def save(run: Run, folder: Path, **options: Any) -> None:
    dcp.save({"model": run.model.state_dict(), "optimizer": run.get(**options)}, checkpoint_id=folder)


def load(run: Run, folder: Path, **options: Any) -> None:
    state = {"model": run.model.state_dict(), "optimizer": run.get(for_load=True, **options)}
    dcp.load(state, checkpoint_id=folder)
    run.set(state["optimizer"])


def assert_same_training(one: Run, other: Run) -> None:
    """But for the masters that nobody reads."""
    assert_same(one.values(), other.values())
    for name in (*LOW, *FULL):
        read = [key for key in other.state(name) if key != "master_param" or name in LOW]
        assert_same({key: one.state(name)[key] for key in read}, {key: other.state(name)[key] for key in read}, name)
    assert [group["step"] for group in one.optimizer.param_groups] == [
        group["step"] for group in other.optimizer.param_groups
    ]


# Saved ---------------------------------------------------------------------------------------------------------------


def test_where_nobody_wrote_training_is_that_without_offload() -> None:
    run, plain = new_run(), new_run(offload=False)
    for step in range(4):
        assert_same_training(run.train(step), plain.train(step))
    assert_same(run.optimizer.state_dict(), plain.optimizer.state_dict())
    masters = [run.state(name)["master_param"] for name in LOW]
    assert not any(torch.equal(master, master.bfloat16().float()) for master in masters)  # more than the parameters say


@EVERY_FORM
@pytest.mark.parametrize("for_load", [False, True])
def test_only_copies_are_saved_and_duplicates_are_not(form: dict[str, Any], for_load: bool) -> None:
    run = new_run().train(0)
    keys = run.get(for_load=for_load, **form)
    if not form:
        keys = {f"state.{fqn}.{name}" for fqn, state in keys["state"].items() for name in state}
    assert {key for key in keys if "master_param" in key} == {f"state.{name}.master_param" for name in LOW}
    assert all("master_param" in run.state(name) for name in FULL)  # the optimizer's own, as it was


@EVERY_FORM
def test_a_run_resumes_with_its_masters(tmp_path: Path, form: dict[str, Any]) -> None:
    saver = new_run().train(0, 1)
    save(saver, tmp_path, **form)
    resumed = new_run(seed=1)
    load(resumed, tmp_path, **form)
    assert_same_training(resumed, saver)
    assert_same_training(resumed.train(2, 3), new_run(offload=False).train(0, 1, 2, 3))


@EVERY_FORM
def test_counters_that_groups_get_in_the_first_step_resume(tmp_path: Path, form: dict[str, Any]) -> None:
    saver = new_run(make=LateCounter).train(0, 1)
    save(saver, tmp_path, **form)
    resumed = new_run(seed=1, make=LateCounter)
    load(resumed, tmp_path, **form)
    assert_same_training(resumed.train(2), new_run(offload=False, make=LateCounter).train(0, 1, 2))


# Missing -------------------------------------------------------------------------------------------------------------


def without_masters(state: dict[str, Any]) -> dict[str, Any]:
    left = {fqn: {k: v for k, v in values.items() if k != "master_param"} for fqn, values in state["state"].items()}
    return {**state, "state": left}


def plain_without_masters(*steps: int) -> Run:
    """The reference: as if the masters had been made anew after those steps."""
    plain = new_run(offload=False).train(*steps)
    for name in LOW:
        plain.state(name)["master_param"].copy_(plain.values()[name].float())
    return plain


@pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "used"])
def test_missing_masters_are_made_from_the_parameters(steps_before: int) -> None:
    saver, run = new_run().train(0, 1), new_run(seed=1).train(*range(steps_before))
    run.weights_from(saver).set(without_masters(saver.get()))
    for name in LOW:
        assert torch.equal(run.state(name)["master_param"], run.values()[name].float())
    assert_same_training(run, plain_without_masters(0, 1))
    assert_same_training(run.train(2, 3), plain_without_masters(0, 1).train(2, 3))


@pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "used"])
def test_masters_that_a_checkpoint_lacks_are_made_from_the_parameters(tmp_path: Path, steps_before: int) -> None:
    saver, run = new_run().train(0, 1), new_run(seed=1).train(*range(steps_before))
    dcp.save({"model": saver.model.state_dict(), "optimizer": without_masters(saver.get())}, checkpoint_id=tmp_path)
    state = {"model": run.model.state_dict(), "optimizer": run.get(for_load=True)}
    checked_load(state, checkpoint_id=tmp_path)
    run.set(state["optimizer"])
    assert_same_training(run, plain_without_masters(0, 1))
    assert_same_training(run.train(2, 3), plain_without_masters(0, 1).train(2, 3))


def test_other_state_is_not_made_up() -> None:
    saver, run = new_run().train(0), new_run(seed=1)
    state = without_masters(saver.get())
    del state["state"]["up.weight"]["exp_avg"]
    with pytest.raises(ValueError, match=r"up\.weight should have .*missing \['exp_avg'\]"):
        run.set(state)
    assert len(run.optimizer.state) == 0


def test_existing_masters_stay_where_only_other_state_is_written() -> None:
    """Somebody resets the momentum of a run in use; nobody touches weights or masters."""
    run, plain = new_run().train(0, 1), new_run(offload=False).train(0, 1)
    state = run.get(for_load=True)
    for name in (*LOW, *FULL):
        state["state"][name]["exp_avg"].zero_()
        plain.state(name)["exp_avg"].zero_()
    run.set(state)
    assert_same_training(run, plain)


# Weights win ---------------------------------------------------------------------------------------------------------


def put_right(plain: Run) -> None:
    """What offload does in the slot, by hand: an element that somebody has written is taken over by its master."""
    for name in LOW:
        param, master = plain.values()[name], plain.state(name)["master_param"]
        master.copy_(torch.where(param == master.to(param.dtype), master, param.float()))


def write(how: str, run: Run, source: Run, folder: Path) -> None:
    mine, others = run.values(), source.values()
    if how == "copy":
        for name, param in mine.items():
            param.copy_(others[name])
    elif how == "load_state_dict":
        run.weights_from(source)
    elif how == "dcp":
        if not folder.exists():
            dcp.save({"model": source.model.state_dict()}, checkpoint_id=folder)
        dcp.load({"model": run.model.state_dict()}, checkpoint_id=folder)
    else:  # every other row of one matrix, and one element of a vector
        mine["up.weight"][::2].copy_(others["up.weight"][::2])
        mine["down.bias"][1].fill_(3.0)


WRITERS = pytest.mark.parametrize("how", ["copy", "load_state_dict", "dcp", "some elements"])


@WRITERS
@pytest.mark.parametrize("steps_before", [0, 2])
def test_written_weights_win_in_the_next_step(tmp_path: Path, how: str, steps_before: int) -> None:
    run, plain = (new_run(offload=offload).train(*range(steps_before)) for offload in (True, False))
    source = new_run(seed=1, offload=False)
    for one in (run, plain):
        write(how, one, source, tmp_path / "weights")
    if steps_before:
        assert_same_training(run, plain)  # masters are looked at in the step, not before
        put_right(plain)
    for step in (5, 6):
        assert_same_training(run.train(step), plain.train(step))


@WRITERS
@EVERY_FORM
def test_weights_that_come_after_the_optimizers_state_win(tmp_path: Path, how: str, form: dict[str, Any]) -> None:
    """As in fine-tuning from other weights with the state of an earlier run."""
    save(new_run().train(0, 1), tmp_path / "run", **form)
    run, plain, source = new_run(seed=2), new_run(offload=False).train(0, 1), new_run(seed=1, offload=False)
    load(run, tmp_path / "run", **form)
    for one in (run, plain):
        write(how, one, source, tmp_path / "weights")
    put_right(plain)
    for step in (5, 6):
        assert_same_training(run.train(step), plain.train(step))


def test_elements_that_nobody_wrote_keep_their_precision() -> None:
    run = new_run().train(0, 1)
    before = run.state("up.weight")["master_param"].clone()
    run.values()["up.weight"][3] = 7.0
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.train(2)
    after = run.state("up.weight")["master_param"]
    assert torch.equal(after[3], torch.full_like(after[3], 7.0))
    assert torch.equal(after[:3], before[:3])
    assert torch.equal(after[4:], before[4:])
    assert not torch.equal(before, before.bfloat16().float())


def test_the_reference_would_show_a_master_that_wins() -> None:
    """Without putting right, plain training goes on from the old masters, and forgets the weights."""
    plain, source = new_run(offload=False).train(0, 1), new_run(seed=1, offload=False)
    forgotten = new_run(offload=False).train(0, 1)
    plain.weights_from(source)
    forgotten.weights_from(source)
    put_right(plain)
    for one in (plain, forgotten):
        one.train(5)
    assert not torch.equal(plain.values()["up.weight"], forgotten.values()["up.weight"])
