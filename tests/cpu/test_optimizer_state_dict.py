"""``get_optimizer_state_dict`` and ``set_optimizer_state_dict``: the layout of torch's, and none of its traps."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torch_get
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import (
    LoadPlanner,
    chunks_of,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
    with_chunks,
)
from fsdp_offload.checkpoint import load as checked_load
from fsdp_offload.checkpoint import save as checked_save
from fsdp_offload.checkpoint.names import SavedByFqn, by_fqn, flattened
from fsdp_offload.fsdp.dtensor import local_shard, over_local, over_part
from tests.parity import attach, take_step
from tests.state_dicts import (
    EVERY_FORM,
    EVERY_SIDE,
    FLAT,
    FORMS,
    MAKERS,
    POLICY,
    SIDES,
    USED,
    MakeOptimizer,
    Net,
    Run,
    adamw,
    all_used,
    assert_same,
    assert_same_runs,
    by_dimension,
    is_home,
    load,
    save,
    sgd,
)
from tests.tiers import spread
from tests.zoo.local import Assorted

pytestmark = pytest.mark.usefixtures("mesh")


# Nothing is made up --------------------------------------------------------------------------------------------------


@spread(steps={"3": 3, "1": 1, "0": 0}, make=MAKERS, form=FORMS)
def test_it_is_what_torch_gives_without_offload(make: MakeOptimizer, steps: int, form: dict[str, Any]) -> None:
    """Where torch makes nothing up: there is state, or there is a gradient."""
    plain, ours = (Run(make, offload=offload, prepare=all_used).train(*range(steps)) for offload in (False, True))
    for run in (plain, ours):
        run.backward(9)
    options = StateDictOptions(flatten_optimizer_state_dict=bool(form))
    assert_same(sorted_keys(ours.get(**form)), sorted_keys(torch_get(plain.model, plain.optimizer, options=options)))


@EVERY_FORM
def test_copies_stay_what_they_were(form: dict[str, Any]) -> None:
    """Without them, the tensors are homes, and the next step changes them. Nor does a set change what it is given."""
    run = Run().train(0, 1)
    homes, copied = run.get(**form), run.get(**form, cpu_offload=True)
    expected = copy.deepcopy(homes)
    assert_same(copied, expected)
    run.train(2)
    assert_same(copied, expected)
    assert_same(homes, run.get(**form))
    run.set(copied)
    assert_same(run.get(**form), expected)
    run.train(3)
    assert_same(copied, expected)


def test_copies_of_what_is_in_containers() -> None:
    model = nn.Linear(3, 2)
    optimizer = attach(Assorted(model.parameters(), lr=torch.tensor(0.1)))  # type: ignore[arg-type]

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"].mul_(0.5)

    step()
    copied = get_optimizer_state_dict(model, optimizer, cpu_offload=True)
    expected = copy.deepcopy(copied)
    step()
    assert_same(copied, expected)


class Late(torch.optim.Optimizer):
    """Has ``None`` in the place of a tensor that comes later, and looks at what it is given in a load."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in state["param_groups"]:
            group.setdefault("new", 1)

    @torch.no_grad()
    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state |= {"first": torch.zeros_like(param), "late": None}
            state["first"].add_(param.grad)
            if state["first"].amax() > 3:
                state["late"] = state["first"].clone()
            param.sub_(state["first"] if state["late"] is None else state["late"], alpha=0.1)


@pytest.mark.parametrize("trust", [False, True])
def test_entries_that_are_none_come_back(trust: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = attach(Late(model.parameters(), {}), trust_separable=trust)
    for _ in range(4):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0].pop("new", None)  # it is an old checkpoint
        optimizer.load_state_dict(saved)
        assert_same(optimizer.state_dict()["state"], saved["state"])
        assert optimizer.param_groups[0]["new"] == 1
        optimizer.zero_grad()


def sorted_keys(value: Any) -> Any:
    """Keys say it all; where they stand does not matter to anyone."""
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(item) for item in value] if isinstance(value, list) else value


@spread(for_load={"save": False, "load": True}, form=FORMS)
def test_a_fresh_optimizer_stays_fresh(for_load: bool, form: dict[str, Any]) -> None:
    """torch's function runs a step of its own here, with gradients of its own."""
    run = Run()
    steps: list[Any] = []
    run.optimizer.register_step_pre_hook(lambda *args: steps.append(args))
    params, groups = copy.deepcopy(run.params()), copy.deepcopy(run.optimizer.param_groups)
    state = run.get(for_load=for_load, **form)
    assert not steps
    assert len(run.optimizer.state) == 0
    assert all(param.grad is None for param in run.params().values())
    assert_same(run.values(), {name: param.detach() for name, param in params.items()})
    assert [list(group) for group in groups] == [list(group) for group in run.optimizer.param_groups]
    assert any("exp_avg" in str(key) for key in [*state, *state.get("state", {}).get("up.weight", {})]) == for_load
    assert_same_runs(run.train(0, 1), Run(offload=False).train(0, 1))


def test_frozen_and_unused_parameters_have_no_state_but_are_in_the_groups() -> None:
    run = Run().train(0)
    state = run.get()
    assert sorted(state["state"]) == sorted(USED)
    assert {fqn for group in state["param_groups"] for fqn in group["params"]} == run.params().keys()
    assert run.get(for_load=True)["state"].keys() == {*USED, "unused.weight", "unused.bias"}  # frozen has no room


@EVERY_FORM
def test_a_layer_that_has_thawed_before_the_load(tmp_path: Path, form: dict[str, Any]) -> None:
    """It was frozen when the optimizer was attached, and has state in the checkpoint."""

    def thaw(run: Run) -> Run:
        run.model.up.requires_grad_(True)
        return run

    def frozen(net: Net) -> None:
        all_used(net)
        net.up.requires_grad_(False)

    saved = thaw(Run(prepare=frozen).train(0)).train(1, 2)
    save(saved, tmp_path, **form)
    resumed = thaw(Run(prepare=frozen, seed=1)).weights_from(saved)
    load(resumed, tmp_path, **form)
    saved.train(3)
    resumed.train(3)
    assert_same(dict(saved.model.state_dict()), dict(resumed.model.state_dict()))
    for name in saved.params():  # whose order is that of the first gradients
        assert_same(dict(saved.state(name)), dict(resumed.state(name)))


# From a file ---------------------------------------------------------------------------------------------------------


@spread(pairs=True, make=MAKERS, steps_before={"fresh": 0, "used": 2}, form=FORMS)
def test_a_run_resumes_and_a_checkpoint_from_before_the_first_step_gives_no_state(
    tmp_path: Path, make: MakeOptimizer, steps_before: int, form: dict[str, Any]
) -> None:
    """That says nothing about the next load: templates of existing state are the same tensors each time."""
    save(Run(make, prepare=all_used), tmp_path / "none", **form)
    saver = Run(make, prepare=all_used).train(0, 1)
    run = Run(make, seed=1, prepare=all_used).train(*range(steps_before))
    save(saver, tmp_path / "good", **form)
    for is_set in (False, True):
        state = {"optimizer": run.get(for_load=True, **form)}
        checked_load(state, checkpoint_id=tmp_path / "none")
        if is_set:
            run.set(state["optimizer"])
            assert len(run.optimizer.state) == 0
        load(run.weights_from(saver), tmp_path / "good", **form)
        assert is_home(run)
        assert_same_runs(run, saver)
    assert_same_runs(run.train(2, 3), Run(make, offload=False, prepare=all_used).train(0, 1, 2, 3))


def test_a_load_goes_home_without_a_copy(tmp_path: Path) -> None:
    saver, resumed = Run(prepare=all_used).train(0), Run(seed=1, prepare=all_used)
    save(saver, tmp_path)
    state = {"optimizer": resumed.get(for_load=True)}
    addresses = {fqn: values["exp_avg"].data_ptr() for fqn, values in state["optimizer"]["state"].items()}
    dcp.load(state, checkpoint_id=tmp_path)
    resumed.set(state["optimizer"])
    assert {fqn: resumed.state(fqn)["exp_avg"].data_ptr() for fqn in addresses} == addresses
    assert not resumed.optimizer.state.has_offered  # what is noted keeps memory alive


# Loads that would be silently wrong ----------------------------------------------------------------------------------


@spread(pairs=True, steps_before={"fresh": 0, "used": 1}, form=FORMS, offload=SIDES)
def test_a_load_that_matched_nothing_is_an_error(
    tmp_path: Path, steps_before: int, form: dict[str, Any], offload: bool
) -> None:
    save(Run().train(0, 1), tmp_path, **form)
    run = Run(seed=1, offload=offload).train(*range(steps_before))
    state = {"optim": run.get(for_load=True, **form)}  # saved as "optimizer"
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    with pytest.raises(ValueError, match=r"nothing was loaded.*up\.weight"):
        run.set(state["optim"])
    assert len(run.optimizer.state) == (len(USED) if steps_before else 0)
    assert_same_runs(run.train(2), Run(offload=False, seed=1).train(*range(steps_before), 2))


@EVERY_SIDE
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_a_parameter_that_was_filled_in_part_is_an_error(tmp_path: Path, name: str, offload: bool) -> None:
    saved = Run().train(0, 1).get()
    del saved["state"]["up.weight"][name]
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
    run = Run(seed=1, offload=offload)
    with pytest.raises(ValueError, match=rf"of the state of up\.weight, \['{name}'\] was not loaded"):
        load(run, tmp_path, partial=True)
    assert len(run.optimizer.state) == 0
    told = pytest.warns(UserWarning, match=r"set_optimizer_state_dict\(\) has not taken it")
    with told if offload else nullcontext():
        run.train(0)
    assert_same_runs(run, Run(offload=False, seed=1).train(0))


def test_a_rank_without_elements_has_the_keys_of_the_others(tmp_path: Path) -> None:
    """No counter and no version tells it of a load; ``empty`` is what such a rank has of ``lacking``."""

    def built(names: str) -> tuple[nn.Module, Optimizer]:
        model = nn.Module()
        for name, rows in {"saved": 2, "lacking": 2, "empty": 0, "saved_empty": 0}.items():
            setattr(model, name, nn.Parameter(torch.ones(rows, 3)))
        optimizer = torch.optim.SGD([getattr(model, name) for name in names.split()], lr=0.1, momentum=0.9)
        return model, offload_optimizer(optimizer, policy=POLICY)

    model, optimizer = built("saved saved_empty")
    take_step(optimizer)
    dcp.save(get_optimizer_state_dict(model, optimizer, **FLAT), checkpoint_id=tmp_path)
    model, optimizer = built("saved lacking empty saved_empty")
    state = get_optimizer_state_dict(model, optimizer, for_load=True, **FLAT)
    checked_load(state, checkpoint_id=tmp_path, planner=LoadPlanner(allow_missing=["*.lacking.*", "*.empty.*"]))
    set_optimizer_state_dict(model, optimizer, state)
    kept = get_optimizer_state_dict(model, optimizer, **FLAT)
    assert {key for key in kept if key.startswith("state.")} == {
        f"state.{name}.momentum_buffer" for name in ("saved", "saved_empty")
    }


@EVERY_SIDE
@EVERY_FORM
def test_a_template_is_not_saved_before_it_is_loaded_into(tmp_path: Path, form: dict[str, Any], offload: bool) -> None:
    saved, run = (Run(offload=offload, prepare=all_used) for _ in range(2))
    save(saved.train(0), tmp_path / "good", **form)
    state = {"optimizer": run.get(for_load=True, **form)}
    with pytest.raises(ValueError, match=r"for_load=True made this .*up\.weight.* have no state yet"):
        checked_save(state, checkpoint_id=tmp_path / "empty")
    checked_load(state, checkpoint_id=tmp_path / "good")
    checked_save(state, checkpoint_id=tmp_path / "again")
    checked_save({"optimizer": saved.get(for_load=True, **form)}, checkpoint_id=tmp_path / "state that exists")


@EVERY_SIDE
@pytest.mark.parametrize("trained_since", [False, True])
def test_templates_that_were_not_used_are_forgotten(trained_since: bool, offload: bool) -> None:
    """There was no checkpoint after all; later the state goes out and in again."""
    run = Run(offload=offload, prepare=all_used).train(0)
    held = run.get(for_load=True)
    if trained_since:
        run.train(1)
    run.set(run.get())
    assert held
    assert_same_runs(run, Run(offload=False, prepare=all_used).train(*range(2 if trained_since else 1)))


@EVERY_FORM
def test_a_step_between_the_template_and_its_load_is_an_error(tmp_path: Path, form: dict[str, Any]) -> None:
    """State that stays on the device is newer than what was loaded."""
    saver = Run(prepare=all_used).train(0, 1)
    save(saver, tmp_path, **form)
    run = Run(seed=1, prepare=all_used).train(0)
    state = {"optimizer": run.get(for_load=True, **form)}
    run.train(1)
    dcp.load(state, checkpoint_id=tmp_path)
    with pytest.raises(RuntimeError, match="before the last step"):
        run.set(state["optimizer"])
    run.backward(2)
    with pytest.raises(RuntimeError, match="before the last step"):
        run.optimizer.step()
    load(run, tmp_path, **form)
    assert_same(run.get(), saver.get())


@pytest.mark.parametrize("snapshot_bytes", [0, 1 << 20])
def test_a_save_after_a_step_has_the_state_of_that_step(tmp_path: Path, snapshot_bytes: int) -> None:
    """Some of it may have stayed on the device."""
    policy = OffloadPolicy(bucket_bytes=1024, device_bytes=8192, snapshot_bytes=snapshot_bytes)
    run = Run(offload=False, prepare=all_used)
    attach(run.optimizer, model=run.model, policy=policy)
    state = run.train(0, 1).get(**FLAT)
    run.train(2)
    checked_save(state, checkpoint_id=tmp_path)
    resumed = Run(seed=1, prepare=all_used)
    template = resumed.get(for_load=True, **FLAT)
    checked_load(template, checkpoint_id=tmp_path)
    resumed.set(template)
    assert_same(resumed.get(), run.get())


# Several optimizers --------------------------------------------------------------------------------------------------


class TwoOptimizers(Run):
    """One for the matrices, another for the vectors, of one model."""

    def __init__(self, *, offload: bool = True, seed: int = 0) -> None:
        super().__init__(lambda groups: adamw(groups[:1]), offload=offload, seed=seed, prepare=all_used)
        self.optimizers = [self.optimizer, sgd(by_dimension(self.model)[1:])]
        if offload:
            attach(self.optimizers[1], model=self.model, policy=POLICY)

    def train(self, *steps: int) -> "TwoOptimizers":
        for step in steps:
            self.model.zero_grad()
            self.backward(step)
            for optimizer in self.optimizers:
                optimizer.step()
        return self

    def get(self, **options: Any) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizers, **options)

    def set(self, state: dict[str, Any], **options: Any) -> None:
        set_optimizer_state_dict(self.model, iter(self.optimizers), state, **options)


def assert_same_pairs(one: TwoOptimizers, other: TwoOptimizers) -> None:
    assert_same_runs(one, other)
    assert_same(one.optimizers[1].state_dict(), other.optimizers[1].state_dict())


@EVERY_FORM
def test_several_optimizers_share_a_state_dict(tmp_path: Path, form: dict[str, Any]) -> None:
    saver, resumed, plain = TwoOptimizers().train(0, 1), TwoOptimizers(seed=1), TwoOptimizers(offload=False).train(0, 1)
    options = StateDictOptions(flatten_optimizer_state_dict=bool(form))
    theirs = torch_get(plain.model, tuple(plain.optimizers), options=options)
    assert_same(sorted_keys(saver.get(**form)), sorted_keys(theirs))
    save(saver, tmp_path, **form)
    load(resumed.weights_from(saver), tmp_path, **form)
    assert_same_pairs(resumed, saver)
    assert_same_pairs(resumed.train(2), plain.train(2))


def test_one_of_several_optimizers_takes_its_part() -> None:
    saver, run = TwoOptimizers().train(0), TwoOptimizers(seed=1)
    state = get_optimizer_state_dict(saver.model, saver.optimizers)
    with pytest.raises(ValueError, match="parameters that the optimizer has not"):
        set_optimizer_state_dict(run.model, run.optimizers[1], state)
    set_optimizer_state_dict(run.model, run.optimizers[1], state, strict=False)
    assert len(run.optimizers[0].state) == 0
    assert_same(run.optimizers[1].state_dict(), saver.optimizers[1].state_dict())


def test_if_one_of_several_refuses_none_is_loaded() -> None:
    saver, run = TwoOptimizers().train(0, 1), TwoOptimizers(seed=1).train(5)
    state, untouched = saver.get(), TwoOptimizers(seed=1).train(5)
    state["state"]["up.bias"] = {"momentum_buffer": torch.zeros(31)}
    with pytest.raises(ValueError, match=r"up\.bias, 'momentum_buffer'"):
        run.set(state)
    assert_same_pairs(run, untouched)


# Groups and names ----------------------------------------------------------------------------------------------------


def each_alone(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [param]} for param in reversed(list(net.parameters()))]


@EVERY_FORM
def test_parameters_may_be_grouped_anew(tmp_path: Path, form: dict[str, Any]) -> None:
    """Each brings its hyperparameters, whichever group it is in now."""
    saver, plain = (Run(offload=offload, prepare=all_used).train(0, 1) for offload in (True, False))
    save(saver, tmp_path, **FLAT)
    resumed = Run(seed=1, prepare=all_used, groups=each_alone).weights_from(saver)
    if form:
        load(resumed, tmp_path, **form)
    else:
        resumed.set(saver.get())
    assert len(resumed.optimizer.param_groups) == len(USED)
    assert_same(resumed.train(2).values(), plain.train(2).values())
    for name in USED:
        assert_same(resumed.state(name), plain.state(name))


def test_one_group_of_different_hyperparameters_is_refused() -> None:
    saver, run = Run(prepare=all_used).train(0), Run(seed=1, prepare=all_used, groups=named(("down",), ("up", "norm")))
    with pytest.raises(ValueError, match=r"down\.weight and down\.bias are in one param group \(0\)"):
        run.set(saver.get(**FLAT))
    assert len(run.optimizer.state) == 0
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.01, 0.01]


def named(*layers: tuple[str, ...]) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """Groups of named parameters: torch then keeps ``param_names`` in each."""
    return lambda net: [
        {"params": [(name, param) for name, param in net.named_parameters() if name.split(".")[0] in group]}
        for group in layers
    ]


@spread(regroup={" to ".join(one): one for one in (("together", "apart"), ("apart", "together"))}, form=FORMS)
def test_named_parameters_may_be_grouped_anew(regroup: tuple[str, str], form: dict[str, Any]) -> None:
    groups = {"together": named(("up", "norm", "down")), "apart": named(("up",), ("norm", "down"))}
    saver, run = (Run(prepare=all_used, groups=groups[name]) for name in regroup)
    saver.train(0)
    before = [group["param_names"] for group in run.optimizer.param_groups]
    run.set(saver.get(**form))
    assert [group["param_names"] for group in run.optimizer.param_groups] == before


def only(state: dict[str, Any], *fqns: str) -> dict[str, Any]:
    """A flattened state dict of some parameters."""
    return {key: value for key, value in state.items() if key.split(".", 1)[1].rpartition(".")[0] in fqns}


def test_missing_and_unknown_parameters_are_an_error_or_stay_as_they_are() -> None:
    saver, run = Run().train(0, 1), Run(seed=1).train(5)
    part = only(saver.get(**FLAT), "up.weight", "down.weight", "frozen.weight", "unused.weight")
    before, unknown = copy.deepcopy(run.get()), saver.get()
    unknown["state"]["elsewhere.weight"] = unknown["state"]["up.weight"]
    for state, message in (
        (part, r"lacks parameters of the optimizer: up\.bias, norm\.weight"),
        (unknown, r"that the optimizer has not: elsewhere\.weight"),
    ):
        with pytest.raises(ValueError, match=message):
            run.set(state)
        assert_same(run.get(), before)
    run.set(part, strict=False)
    for name in USED:
        expected = saver.get()["state"] if name in ("up.weight", "down.weight") else before["state"]
        assert_same(run.get()["state"][name], expected[name])
    assert is_home(run)
    run.set(unknown, strict=False)
    assert_same(run.get()["state"], saver.get()["state"])


@EVERY_FORM
def test_state_without_its_groups(form: dict[str, Any]) -> None:
    """The hyperparameters stay, and all state is loaded."""
    saver, run = Run().train(0, 1), Run(seed=1).train(5)
    part = {
        key: [] if key == "param_groups" else value for key, value in saver.get(**form).items() if "groups." not in key
    }
    run.set(part, strict=False)
    assert_same(run.get()["state"], saver.get()["state"])


def test_names_in_dicts_of_state_have_dots_in_the_flattened_form() -> None:
    nested = {
        "state": {"a": {"x": 1}, "a.b": {"pre": {"l": 2, "r": {"s": 3}}, "y": 4}},
        "param_groups": [{"params": ["a", "a.b"]}],
    }
    nested["param_groups"][0]["lr"] = 5  # type: ignore[index]
    assert by_fqn(flattened(nested)) == by_fqn(nested)


def test_two_saved_names_are_two_parameters() -> None:
    """A name that the state dict has itself is nobody else's with ``module.`` in front."""
    for other in ("w", "module.module.w", "_orig_mod.w"):
        saved = SavedByFqn({"module.w": {"x": 1}, other: {"x": 2}}, {})
        assert saved.with_names_of(["w"]).state == saved.state
    assert SavedByFqn({"module.w": {"x": 1}}, {}).with_names_of(["w"]).state == {"w": {"x": 1}}


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def layer(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Net], Net]:
    """One of its layers in a wrapper."""

    def change(net: Net) -> Net:
        net.up = wrap(net.up)
        return net

    return change


def compiled_in_place(net: Net) -> Net:
    net.compile(backend="eager")
    return net


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "compiled": compiled,
    "a layer compiled": layer(compiled),
    "compiled in place": compiled_in_place,
    "a layer checkpointed": layer(checkpoint_wrapper),
    "a layer checkpointed and compiled": layer(lambda module: compiled(checkpoint_wrapper(module))),
    "data parallel": nn.parallel.DistributedDataParallel,
}


@spread(wrap=WRAPPERS, form=FORMS)
def test_names_are_those_without_wrappers(wrap: Callable[[Net], nn.Module], form: dict[str, Any]) -> None:
    net = Net()
    all_used(net)
    model = wrap(net)
    optimizer = offload_optimizer(adamw(model.parameters()), model=model, policy=POLICY)
    net.down(net.norm(net.up(torch.ones(2, 16)))).sum().backward()
    optimizer.step()
    ours = get_optimizer_state_dict(model, optimizer, **form)
    theirs = torch_get(model, optimizer, options=StateDictOptions(**form))
    assert ours.keys() == theirs.keys()
    if not form:
        assert [sorted(state["state"]) for state in (ours, theirs)] == [sorted(USED)] * 2
        assert ours["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]


def recompiled(*names: str) -> Callable[[Net], None]:
    """Activation checkpointing around compiled layers, whose names torch leaves ``_orig_mod.`` in."""

    def change(net: Net) -> None:
        for name in names:
            setattr(net, name, checkpoint_wrapper(compiled(getattr(net, name))))

    return change


@torch.compiler.set_stance("force_eager")
@spread(form=FORMS, wrapped={"saved": ("down", "unused"), "loaded": (), "both": ("norm",)})
def test_wrappers_in_names_are_forgiven(form: dict[str, Any], wrapped: tuple[str, ...], tmp_path: Path) -> None:
    """On either side of a save and a load: in keys, in lists of param groups, of parameters with and without state."""
    saver = Run(prepare=recompiled(*wrapped)).train(0, 1)
    for group in saver.optimizer.param_groups:
        group["initial_lr"] = 0.25  # as schedulers add it
    expected = Run().train(0, 1).train(2)
    run = Run(seed=1, prepare=recompiled(*({"down", "norm", "unused"} - {*wrapped})))
    checked_save({"model": saver.model.state_dict(), "optim": saver.get(**form)}, checkpoint_id=tmp_path / "saved")
    state = {"model": run.model.state_dict(), "optim": run.get(for_load=True, **form)}
    loaded = checked_load(state, checkpoint_id=tmp_path / "saved")
    assert {"unused" in key for key in loaded.missing} == {True}
    run.set(state["optim"])
    assert [group["initial_lr"] for group in run.optimizer.param_groups] == [0.25, 0.25]
    run.train(2)
    assert_same(list(run.values().values()), list(expected.values().values()))
    assert [run.state(name) != {} for name in run.params()] == [
        expected.state(name) != {} for name in expected.params()
    ]


def test_two_keys_that_wrappers_alone_tell_apart_are_not_one(tmp_path: Path) -> None:
    """Neither of two saved keys is loaded as a third, nor one as two."""
    two, at = {"a._orig_mod.w": torch.ones(3), "_checkpoint_wrapped_module.a.w": torch.zeros(3)}, tmp_path / "two"
    dcp.save(two, checkpoint_id=at)
    dcp.save({"a.w": torch.ones(3), "n": 5}, checkpoint_id=tmp_path / "one")
    for state, folder in (({"a.w": torch.ones(3)}, at), ({**two}, tmp_path / "one")):
        with pytest.raises(ValueError, match="requested, but not in the checkpoint"):
            checked_load(dict(state), checkpoint_id=folder)
    any_keys = LoadPlanner(allow_missing=True, allow_extra=True)
    loaded = checked_load({**two, "n": 0}, checkpoint_id=tmp_path / "one", planner=any_keys)
    assert {*loaded.missing} == {*two}
    kept = torch.full((3,), 2.0)
    checked_load({"_checkpoint_wrapped_module.a.w": kept}, checkpoint_id=at, planner=any_keys)
    assert not kept.any()


def test_what_is_not_requested_is_told_under_any_wrappers(tmp_path: Path) -> None:
    """Also where the keys have nothing in front; but for masters, which are made anew."""
    bare = {"up.w": torch.ones(3), "up.b": torch.ones(3), "state.up.w.exp": torch.ones(3), "param_groups.up.w.lr": 1.0}
    bare["state.up.w.master_param"] = torch.ones(3)
    wrapped = {re.sub(r"up\.", "_orig_mod.up.", key): value for key, value in bare.items()}
    for saved, other, extra in ((bare, wrapped, r"up\.b"), (wrapped, bare, r"_orig_mod\.up\.b")):
        dcp.save(saved, checkpoint_id=tmp_path / extra)
        wanted = {
            key: copy.deepcopy(value) for key, value in other.items() if "up.b" not in key and "master" not in key
        }
        with pytest.raises(ValueError, match=rf"- 1 in the checkpoint, but not requested: {extra}\."):
            checked_load(wanted, checkpoint_id=tmp_path / extra)
        assert not checked_load(
            wanted, checkpoint_id=tmp_path / extra, planner=LoadPlanner(allow_extra=["*up.b"])
        ).missing
    at = tmp_path / "root"
    dcp.save({f"_orig_mod.{key}": torch.ones(3) for key in ("a.w", "b.w", "b.b")}, checkpoint_id=at)
    with pytest.raises(ValueError, match=r"- 2 in the checkpoint, but not requested"):
        checked_load({"_orig_mod.a.w": torch.ones(3)}, checkpoint_id=at)


# Refusals and the rest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("for_load", [False, True])
def test_state_dict_hooks_fire_once(for_load: bool) -> None:
    run = Run().train(0)
    fired: list[str] = []
    run.optimizer.register_state_dict_pre_hook(lambda _: fired.append("before"))
    run.optimizer.register_state_dict_post_hook(lambda *_: fired.append("after"))
    run.get(for_load=for_load)
    assert fired == ([] if for_load else ["before", "after"])


def test_flat_state_of_other_elements_is_refused(mesh: DeviceMesh) -> None:
    """As Megatron-LM's pull request 4623 keeps it: elements in one dimension, which are to be those of this rank."""
    whole, model = torch.arange(42.0).view(7, 3, 2), nn.Module()
    options: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    weight: Any = nn.Parameter(DTensor.from_local(whole.flatten()[1:41].clone(), mesh, [Shard(0)], **options))
    weight.megatron_fsdp_slice = slice(1, 41)  # in mid-row at both ends
    weight.megatron_fsdp_dist_index = SimpleNamespace(tp_dim=None)
    model.weight = weight
    optimizer = offload_optimizer(adamw([weight]), model=model, policy=POLICY)
    weight.grad = over_local(weight, torch.ones(40))
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    values = local_shard(optimizer.state[weight]["exp_avg"]).clone()
    others = over_part(weight, values, (42,))
    state["state"]["weight"]["exp_avg"] = with_chunks(others, values, chunks_of((42,), (2, 42)))
    with pytest.raises(ValueError, match=r"state has \[\(\(2,\), \(40,\)\)\] of \(42,\) on this rank"):
        set_optimizer_state_dict(model, optimizer, state)
