"""``add_masters`` without offload: torch's own habits go on, and each step has the bits of the offloaded one."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_offload import add_masters, offload_optimizer
from fsdp_offload.optimizers import masters
from tests.conformance.oracle import different
from tests.cpu.test_kept_masters import EVERY_FORMAT, EVERY_KIND, saved
from tests.cpu.test_wrappers import accelerated, wrap  # noqa: F401  # fixtures
from tests.overlapping import Loop, same
from tests.overlapping import Net as Small
from tests.parity import Net, Zoo, adamw, same_value
from tests.twins import MASTER, Twins, make_twins


def plain(kind: str, make: Callable[[Any], optim.Optimizer] = adamw, dtype: torch.dtype = torch.bfloat16) -> Twins:
    return make_twins(Zoo, make, kind, dtype, policy=None)


@EVERY_KIND
def test_portions_give_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    update = masters._update_opened

    def counted(optimizer: Any, plain: Any, number: int, params: list[Tensor]) -> None:
        opened.append(sum(param.numel() for param in params))
        update(optimizer, plain, number, params)

    monkeypatch.setattr(masters, "_OPEN_NUMEL", 1500)
    monkeypatch.setattr(masters, "_update_opened", counted)
    twins = plain(kind)
    twins.train(3)
    twins.assert_trained()
    largest = max(param.numel() for param in twins.low.params.values())
    assert max(opened) < 1500 + largest < sum(opened) // 3


def test_a_zero_that_somebody_writes_stays_a_number() -> None:
    """A master that rounds to zero never has negative lower bits."""
    kept = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for zero in (0.0, -0.0):
        opened = masters.open_master("remainder", torch.full(kept.shape, zero, dtype=torch.bfloat16), kept)
        assert opened.abs().max() < 1e-40


@EVERY_KIND
def test_state_from_a_constructor_is_as_for_fp32_parameters(kind: str) -> None:
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = add_masters(optim.Adagrad([param], initial_accumulator_value=0.1), kind)
    assert torch.equal(optimizer.state[param]["sum"], torch.full((8,), 0.1))


def test_it_stays_the_same_object_of_its_class() -> None:
    optimizer = adamw(Net().bfloat16().parameters())
    assert add_masters(optimizer) is optimizer
    assert isinstance(optimizer, optim.AdamW)
    assert type(optimizer).__name__ == "MasterAdamW"
    one, other = (add_masters(adamw(Net().bfloat16().parameters()), kind) for kind in ("remainder", "fp32"))
    assert type(one) is type(optimizer) is not type(other)


@EVERY_FORMAT
def test_copies_and_pickles_go_on(kind: str, dtype: torch.dtype) -> None:
    twins = plain(kind, dtype=dtype)
    twins.train(2)
    low = twins.low
    for again in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        # As one object, so that the optimizer has the parameters of the model.
        low.model, low.optimizer = again((low.model, low.optimizer))
        assert type(low.optimizer) is masters.class_with_masters(optim.AdamW, kind)  # type: ignore[arg-type]
        twins.assert_same()
        twins.train(2)


@pytest.mark.parametrize("early", [True, False], ids=["scheduler-first", "masters-first"])
def test_schedulers_hooks_and_closures(early: bool) -> None:
    twins = plain("fp32") if not early else make_without_masters("fp32")
    schedulers = [optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5) for run in twins]
    if early:
        twins.add_masters()
    calls: list[Any] = []
    twins.low.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    twins.low.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(3):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    with torch.no_grad():
        assert twins.low.optimizer.step(lambda: calls.append(torch.is_grad_enabled()) or 3.5) == 3.5
    twins.full.optimizer.step()
    twins.assert_same()
    assert calls == ["before", "after"] * 3 + ["before", True, "after"]


def make_without_masters(kind: str) -> Twins:
    twins = plain(kind)
    low = twins.low
    low.optimizer = adamw(low.model.parameters())
    return twins


def test_a_compiled_step_runs_as_it_is() -> None:
    twins = plain("remainder")
    twins.low.optimizer.step = torch.compile(twins.low.optimizer.step, backend="eager")
    twins.train(3)
    twins.assert_trained()


@pytest.mark.parametrize("first", [True, False], ids=["wrapped-first", "masters-first"])
def test_wrappers_are_seen_through(first: bool, wrap: Any) -> None:  # noqa: F811
    twins = make_without_masters("fp32")
    optimizer = twins.low.optimizer
    wrapper = wrap(optimizer) if first else None
    assert add_masters(wrapper or optimizer, "fp32") is (wrapper or optimizer)
    wrapper = wrapper or wrap(optimizer)
    if "Accelerated" in type(wrapper).__name__:  # the step of the others asks a strategy, which calls the optimizer's
        twins.low.optimizer = wrapper
    twins.train(2)
    twins.low.optimizer = optimizer
    twins.assert_trained()
    assert add_masters(wrapper, "fp32") is wrapper


@pytest.mark.parametrize("capture", [lambda step: step, functools.partial], ids=["method", "partial"])
def test_a_step_that_was_captured_before_is_refused(capture: Callable[[Any], Any]) -> None:
    """It would update the rounded parameters, and say nothing."""
    twins = make_without_masters("fp32")
    optimizer = twins.low.optimizer
    captured = capture(optimizer.step)
    twins.add_masters()
    twins.low.loss(0).backward()
    before = saved(twins.low)
    with pytest.raises(RuntimeError, match=r"AdamW.step was captured before add_masters\(\) and called now"):
        captured()
    assert not optimizer.state
    assert all(same_value(value, before["model"][name]) for name, value in twins.low.model.state_dict().items())
    twins.train(2)
    offload_optimizer(optimizer)
    twins.train(1)
    with pytest.raises(RuntimeError, match=r"MasterAdamW\.step was captured before offload_optimizer"):
        captured()


def test_counters_are_not_rounded_to_the_parameters() -> None:
    """torch casts every floating-point number in the state but ``step``: a product of 0.96 would be 0.9609."""
    twins = plain("remainder", lambda params: optim.NAdam(params, lr=0.02))
    twins.train(2)
    before = saved(twins.low)["optimizer"]
    for run in twins:
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for number, state in saved(twins.low)["optimizer"]["state"].items():
        assert state["mu_product"].dtype is torch.float32
        assert same_value(state["mu_product"], before["state"][number]["mu_product"])
    twins.train(2)


def test_state_without_masters_is_widened_in_a_load() -> None:
    """As of a bf16 training that goes on with masters from now on."""
    twins = make_without_masters("fp32")
    low = twins.low
    low.loss(0).backward()
    low.optimizer.step()
    checkpoint = saved(low)
    low.optimizer = add_masters(adamw(low.model.parameters()), "fp32")
    low.optimizer.load_state_dict(checkpoint["optimizer"])
    for number, param in enumerate(low.params.values()):
        state = low.optimizer.state[param]
        assert same_value(state[MASTER], param.detach().float())
        assert same_value(state["exp_avg"], checkpoint["optimizer"]["state"][number]["exp_avg"].float())
    remainders = add_masters(adamw(low.model.parameters()), "remainder")
    with pytest.raises(ValueError, match=r"expected 'master_param' in torch.int16, .* got None"):
        remainders.load_state_dict(checkpoint["optimizer"])
    assert not remainders.state


@EVERY_KIND
def test_masters_of_the_other_kind_are_refused(kind: str) -> None:
    twins = plain("fp32" if kind == "remainder" else "remainder")
    twins.train(1)
    other = plain(kind)
    with pytest.raises(ValueError, match=r"expected 'master_param' in .* got torch\."):
        other.low.optimizer.load_state_dict(saved(twins.low)["optimizer"])
    other.train(2)


def sharded(mesh: DeviceMesh, kind: Any) -> Loop:
    return Loop(mesh, lambda params: add_masters(adamw(params), kind), None, net=lambda: Small(16, 2).bfloat16())


@EVERY_KIND
def test_files_of_torch_resume(mesh: DeviceMesh, kind: str, tmp_path: Any) -> None:
    loop, fresh = sharded(mesh, kind).train(2), sharded(mesh, kind)
    dcp.save(loop.states(), checkpoint_id=tmp_path)
    state = fresh.states()
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(fresh.model, fresh.optimizer, state["optimizer"])
    fresh.schedulers[0].load_state_dict(loop.schedulers[0].state_dict())
    fresh.seen = [*loop.seen]
    assert same(loop, fresh)
    assert same(loop.train(1, first=2), fresh.train(1, first=2))


def test_a_gradient_with_other_placements_is_refused(mesh: DeviceMesh) -> None:
    loop = sharded(mesh, "fp32").train(1)
    loop.backward(1)
    before = copy.deepcopy(loop.everything())
    weight = loop.model.head.weight
    weight.grad = DTensor.from_local(weight.grad.to_local(), mesh, [torch.distributed.tensor.Partial()])
    with pytest.raises(
        RuntimeError, match=r"step\(\) with masters: its gradient has .*Partial.*Nothing has been changed"
    ):
        loop.optimizer.step()
    assert not different(loop.everything(), before)


def test_a_second_call_changes_nothing_and_another_kind_is_refused() -> None:
    """A framework's hook may run once for each fit."""
    optimizer = add_masters(adamw(Net().bfloat16().parameters()), "fp32")
    for _ in range(2):
        made = type(optimizer)
        assert add_masters(optimizer, "fp32") is optimizer
        assert type(optimizer) is made
        with pytest.raises(RuntimeError, match="MasterAdamW has masters already, of kind 'fp32'"):
            add_masters(optimizer, "remainder")
        offload_optimizer(optimizer, exist_ok=True)


def test_a_group_of_fp16_that_is_added_to_remainders_is_refused() -> None:
    optimizer = add_masters(adamw(Net().bfloat16().parameters()), "remainder")
    half = nn.Parameter(torch.ones(3).half())
    optimizer.add_param_group({"params": [half]})
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match=r"'remainder' are for bf16.*torch\.float16.*'fp32'"):
        optimizer.step()


def test_the_file_of_a_pickled_optimizer_has_no_class_of_ours() -> None:
    file = io.BytesIO()
    optimizer = add_masters(adamw(Net().bfloat16().parameters()), "fp32")
    torch.save(optimizer.state_dict(), file)
    assert b"fsdp_offload" not in file.getvalue()
