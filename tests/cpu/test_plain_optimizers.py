"""The same lines without ``offload_optimizer``: what the public functions do with a plain optimizer."""

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fsdp_offload
from fsdp_offload import add_masters
from fsdp_offload.checkpoint import LoadPlanner, get_optimizer_state_dict, set_optimizer_state_dict
from fsdp_offload.checkpoint import load as checked_load
from fsdp_offload.checkpoint import save as checked_save
from fsdp_offload.checkpoint.plain import _offered
from tests.fused_adam import read_of
from tests.fused_adam_reference import FusedAdam
from tests.state_dicts import (
    EVERY_FORM,
    EVERY_SIDE,
    FORMS,
    MAKERS,
    USED,
    MakeOptimizer,
    Run,
    all_used,
    assert_same,
    assert_same_runs,
    load,
    save,
)
from tests.tiers import spread
from tests.zoo.local import Assorted

pytestmark = pytest.mark.usefixtures("mesh")


def nadam(params: Iterable[Any]) -> Optimizer:
    """Has a counter beside ``step``, which torch's load casts."""
    return torch.optim.NAdam(params, lr=0.01)


def adagrad(params: Iterable[Any]) -> Optimizer:
    return torch.optim.Adagrad(params, lr=0.01)


def masters(params: Iterable[Any]) -> Optimizer:
    return add_masters(torch.optim.AdamW(params, lr=0.01), "fp32")


def remainders(params: Iterable[Any]) -> Optimizer:
    return add_masters(torch.optim.AdamW(params, lr=0.01), "remainder")


BF16 = {"dtype": torch.bfloat16}
EVERY_MAKER = {name: (make, {}) for name, make in {**MAKERS, "nadam": nadam, "adagrad": adagrad}.items()}
LISTED = {name: pair for name, pair in EVERY_MAKER.items() if name != "counted"} | {
    "nadam in bf16": (nadam, BF16),
    "masters": (masters, BF16),
}


def forms_of(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: forms_of(value) for key, value in values.items()}
    if isinstance(values, torch.Tensor):
        return values.shape, values.stride(), values.dtype, type(values)
    return [forms_of(value) for value in values] if isinstance(values, list) else values


@spread(steps={"3": 3, "1": 1, "0": 0}, make=EVERY_MAKER, form=FORMS)
def test_the_dict_is_that_of_an_offloaded_one(
    make: tuple[MakeOptimizer, dict[str, Any]], steps: int, form: dict[str, Any]
) -> None:
    made, options = make
    plain, ours = (Run(made, offload=offload, **options).train(*range(steps)) for offload in (False, True))
    assert_same(plain.get(**form), ours.get(**form))
    assert_same(plain.get(cpu_offload=True, **form), ours.get(**form))


@spread(pairs=True, make=LISTED, steps={"fresh": 0, "used": 2}, form=FORMS)
def test_what_is_loaded_into_has_the_keys_and_forms_of_an_offloaded_one_and_nothing_steps(
    make: tuple[MakeOptimizer, dict[str, Any]], steps: int, form: dict[str, Any]
) -> None:
    made, options = make
    plain, ours = (Run(made, offload=offload, **options).train(*range(steps)) for offload in (False, True))
    before, random = copy.deepcopy(plain.optimizer.state_dict()), torch.get_rng_state()
    called: list[Any] = []
    plain.optimizer.register_step_pre_hook(lambda *args: called.append(args))
    state = plain.get(for_load=True, **form)
    assert forms_of(state) == forms_of(ours.get(for_load=True, **form))
    assert not called
    assert torch.equal(random, torch.get_rng_state())
    assert_same(plain.optimizer.state_dict(), before)
    plain.train(3, 4)
    assert_same_runs(plain, Run(made, offload=False, **options).train(*range(steps), 3, 4))


@spread(pairs=True, make=LISTED, saver={"plain": False, "offloaded": True}, steps={"fresh": 0, "used": 2}, form=FORMS)
def test_a_plain_run_resumes(
    tmp_path: Path, make: tuple[MakeOptimizer, dict[str, Any]], saver: bool, steps: int, form: dict[str, Any]
) -> None:
    made, options = make
    saved = Run(made, offload=saver, prepare=all_used, **options).train(0, 1)
    save(saved, tmp_path, **form)
    run = Run(made, offload=False, seed=1, prepare=all_used, **options).train(*range(steps)).weights_from(saved)
    state = {"optimizer": run.get(for_load=True, **form)}
    checked_load(state, checkpoint_id=tmp_path)
    run.set(state["optimizer"])
    expected = Run(made, offload=False, prepare=all_used, **options).train(0, 1)
    assert_same_runs(run, expected)
    assert not _offered[run.optimizer].has_offered  # what is noted keeps memory alive
    assert_same_runs(run.train(2, 3), expected.train(2, 3))


def test_a_load_needs_no_copy_and_what_others_hold_is_copied() -> None:
    saved, run = Run(offload=False).train(0), Run(offload=False, seed=1)
    state = run.get(for_load=True)
    addresses = {fqn: values["exp_avg"].data_ptr() for fqn, values in state["state"].items()}
    for fqn in USED:
        for name, value in state["state"][fqn].items():
            value.copy_(saved.state(fqn)[name])
    run.set(state, strict=False)
    assert {fqn: run.state(fqn)["exp_avg"].data_ptr() for fqn in USED} == {fqn: addresses[fqn] for fqn in USED}
    assert run.optimizer.state.keys() == {run.params()[fqn] for fqn in USED}  # not what was left untouched
    other = Run(offload=False, seed=2)
    other.set(saved.get())
    expected = copy.deepcopy(saved.get())
    other.train(1)
    assert_same(saved.get(), expected)


@spread(saver={"plain": False, "offloaded": True}, make={**LISTED, "remainders": (remainders, BF16)})
def test_what_another_one_trains_on_is_copied(make: tuple[MakeOptimizer, dict[str, Any]], saver: bool) -> None:
    """Whatever has been handed out before, at whichever addresses."""
    made, options = make
    saved, run = (Run(made, offload=one, prepare=all_used, **options) for one in (saver, False))
    run.get(for_load=True)  # is freed, and the first step of the other one has its memory
    saved.train(0, 1)
    run.weights_from(saved).set(saved.get())
    run.train(2, 3)
    expected = Run(made, offload=False, prepare=all_used, **options).train(0, 1)
    assert_same_runs(saved, expected)
    assert_same_runs(run, expected.train(2, 3))


def test_a_part_that_comes_after_the_first_step_does_not_bring_what_is_in_unfilled_memory(tmp_path: Path) -> None:
    saved, run = Run(offload=False, prepare=all_used).train(0, 1), Run(offload=False, prepare=all_used, seed=1)
    state = saved.get()
    del state["state"]["norm.weight"]["exp_avg_sq"]
    checked_save({"optimizer": state}, checkpoint_id=tmp_path)
    state = {"optimizer": run.get(for_load=True)}
    before = copy.deepcopy(run.train(2).optimizer.state_dict())
    checked_load(state, checkpoint_id=tmp_path, planner=LoadPlanner(allow_missing=True))
    with pytest.raises(ValueError, match=r"of the state of norm\.weight, \['exp_avg_sq'\] was not loaded"):
        run.set(state["optimizer"])
    assert_same(run.optimizer.state_dict(), before)


@EVERY_SIDE
def test_hooks_on_loads_rewrite_what_is_loaded_and_what_has_been(offload: bool) -> None:
    saved, run = Run(offload=False).train(0), Run(offload=offload, seed=1)

    def doubled(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {key: {**state, "exp_avg": state["exp_avg"] * 2} for key, state in state_dict["state"].items()}
        return {**state_dict, "state": states}

    def tripled(optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].mul_(3)

    run.optimizer.register_load_state_dict_pre_hook(doubled)
    run.optimizer.register_load_state_dict_post_hook(tripled)
    run.set(saved.get())
    for name in USED:
        assert torch.equal(run.state(name)["exp_avg"], saved.state(name)["exp_avg"] * 2)
        assert torch.equal(run.state(name)["exp_avg_sq"], saved.state(name)["exp_avg_sq"] * 3)
    assert_same_runs(saved, Run(offload=False).train(0))


RAISES = {
    "offload_report": "print(offload_report(optimizer))",
    "offload_states": "offload_states(optimizer)",
    "release_states": "release_states(optimizer)",
    "reload_states": "reload_states(optimizer, free_host_memory=True)",
    "reload_before": "hook = reload_before(hook, optimizer)",
    "remove_offload": "remove_offload(optimizer)",
}


@pytest.mark.parametrize("name", RAISES)
def test_what_means_nothing_without_offload_says_the_line_to_write(name: str) -> None:
    """Nothing is silently inert, and one line lets a loop run with and without offload."""
    plain, call = Run(offload=False).train(0), RAISES[name]
    names: dict[str, Any] = {**vars(fsdp_offload), "optimizer": plain.optimizer, "hook": lambda: None}
    with pytest.raises((TypeError, RuntimeError), match=f"{name}: this AdamW is not offloaded; call") as raised:
        exec(call, names)
    [line] = re.findall(r"write `(.+)` before this", str(raised.value))
    exec(f"{line}\n    {call}", names)
    assert_same_runs(plain.train(1), Run(offload=False).train(0, 1))
    offloaded = Run().train(0)
    exec(f"{line}\n    {call}", {**names, "optimizer": offloaded.optimizer})
    offloaded.train(1)


def test_a_class_that_cannot_be_offloaded_has_its_state_as_it_is() -> None:
    model = torch.nn.Embedding(6, 4, sparse=True)
    optimizer, other = (torch.optim.SparseAdam(model.parameters(), lr=0.01) for _ in range(2))
    with pytest.raises(ValueError, match="SparseAdam has no state yet"):
        get_optimizer_state_dict(model, other, for_load=True)
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    set_optimizer_state_dict(model, other, get_optimizer_state_dict(model, optimizer))
    assert_same(other.state_dict(), optimizer.state_dict())


@EVERY_FORM
def test_a_class_that_nobody_lists_keeps_its_dtypes_where_torch_would_cast(form: dict[str, Any]) -> None:
    saved = Run(Assorted, offload=False, **BF16).train(0, 1)
    run = Run(Assorted, offload=False, seed=1, **BF16).weights_from(saved)
    with pytest.raises(ValueError, match=r"for_load=True: Assorted has no state yet, .* Load with load_state_dict\(\)"):
        run.get(for_load=True, **form)
    run.set(copy.deepcopy(saved.get(**form)))
    assert_same_runs(run.train(2), saved.train(2))


def scaled(params: Iterable[Any]) -> Optimizer:
    """Transformer Engine's class, as our reference has it: state dicts are in fp32, what it keeps is scaled."""
    halves: dict[str, Any] = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.bfloat16}
    return FusedAdam(params, lr=0.01, master_weights=True, **halves)


def read(run: Run) -> dict[str, Any]:
    """Return state and scales by name, without the masters of fp32 parameters, which no update reads."""
    scales = run.optimizer._scales  # type: ignore[attr-defined]
    return {
        name: [dict(sorted(one.items())) for one in (read_of(run.state(name), param), scales[param])]
        for name, param in run.params().items()
    }


@spread(pairs=True, saver={"plain": False, "offloaded": True}, steps={"fresh": 0, "used": 2}, form=FORMS)
def test_state_in_another_form_is_saved_and_loaded(
    tmp_path: Path, saver: bool, steps: int, form: dict[str, Any]
) -> None:
    saved = Run(scaled, offload=saver, prepare=all_used, **BF16).train(0, 1)
    assert_same(Run(scaled, offload=not saver, prepare=all_used, **BF16).train(0, 1).get(**form), saved.get(**form))
    save(saved, tmp_path, **form)
    run = Run(scaled, offload=False, seed=1, prepare=all_used, **BF16).train(*range(steps)).weights_from(saved)
    load(run, tmp_path, **form)
    expected = Run(scaled, offload=False, prepare=all_used, **BF16).train(0, 1)
    for each in ((), (2,), (3,)):
        run.train(*each)
        expected.train(*each)
        assert_same(run.values(), expected.values())
        assert_same(read(run), read(expected))


# What would be silently wrong ----------------------------------------------------------------------------------------


@EVERY_SIDE
def test_a_look_at_state_before_the_load_does_not_make_state_of_unfilled_memory(offload: bool) -> None:
    run = Run(offload=offload, prepare=all_used)
    state = run.get(for_load=True)
    assert not run.get()["state"]
    with pytest.raises(ValueError, match=r"nothing was loaded.*up\.weight"):
        run.set(state)


def test_state_that_does_not_fit_is_refused_before_anything_changes() -> None:
    run = Run(offload=False).train(0)
    state = run.get()
    state["state"]["up.weight"]["exp_avg"] = state["state"]["up.weight"]["exp_avg"].bfloat16()
    state["state"]["up.bias"]["exp_avg"] = torch.zeros(32)
    before = copy.deepcopy(run.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"'exp_avg' should have local tensors of .*float32.*got .*bfloat16"):
        run.set(state)
    with pytest.raises(ValueError, match=r"missing.*exp_avg_sq"):
        run.set({**run.get(), "state": {"up.weight": {"exp_avg": run.state("up.weight")["exp_avg"]}}})
    assert_same(run.optimizer.state_dict(), before)
