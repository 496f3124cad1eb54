"""Bad input and faults: each says what was expected, what was found and what to do, and loses nothing."""

import importlib
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, offload_optimizer, remove_offload
from fsdp_offload.api.report import notes_of
from fsdp_offload.engine.engine import engine_of
from tests.conformance.oracle import usual
from tests.overlapping import Loop, assert_same_each_step, pair
from tests.parity import Zoo, attach, params_of, take_step
from tests.policies import with_share
from tests.tiers import spread

adam_module = importlib.import_module("torch.optim.adam")  # torch.optim itself hides it

POLICY = OffloadPolicy(bucket_bytes=1024)


class Net(nn.Module):
    """Parameters ``first``, ``middle`` and ``last``, for each of which Adam's state is a bucket."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(("first", "middle", "last")):
            setattr(self, name, nn.Parameter(torch.linspace(-1, number, 100)))

    forward = Zoo.forward


def pair_of(
    make: Callable[..., Optimizer] = torch.optim.AdamW, policy: OffloadPolicy = POLICY, steps: int = 1, **options: Any
) -> tuple[Loop, Loop]:
    """Trained for so many steps."""
    both = pair(None, None, partial(make, **options), net=Net)
    attach(both[1].optimizer, model=both[1].model, policy=policy)
    assert_same_each_step(*both, steps)
    return both


def give_gradients(run: Loop, step: int = 1) -> None:
    run.clear()
    run.model(run.batch(step)).backward()


def again(run: Loop, step: int) -> None:
    """Train with new gradients, in the place of those that were left."""
    run.clear()
    usual(run, step)


def test_parameters_on_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair(None, None, torch.optim.AdamW, net=Net)
    last, real = both[1].model.last, torch.Tensor.device.__get__
    elsewhere = property(lambda tensor: torch.device("cuda", 1) if tensor is last else real(tensor))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "device", elsewhere)
        with pytest.raises(ValueError, match=r"first on cpu, last on cuda:1\. Use one optimizer for each"):
            attach(both[1].optimizer, model=both[1].model, policy=POLICY)
    assert_same_each_step(*both, 2)


def test_a_sparse_gradient_changes_nothing_and_the_next_step_works() -> None:
    plain, run = pair_of()
    give_gradients(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.11 warns of unchecked invariants whatever one asks for
        run.model.last.grad = torch.sparse_coo_tensor([[3]], [1.0], (100,), check_invariants=True)
    with pytest.raises(
        RuntimeError, match=r"last cannot be updated: its gradient is torch.sparse_coo.*sparse=False\). Nothing has"
    ):
        run.optimizer.step()
    assert_same_each_step(plain, run, 1, again)


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (0, ArithmeticError, r"0 of 3 buckets had been updated \(parameters none\); first may be half updated"),
        (1, KeyboardInterrupt, r"1 of 3 buckets had been updated \(parameters first\); middle may be half updated"),
        (2, torch.OutOfMemoryError, r"2 of 3 .* \(parameters first, middle\); last may be half updated; the others"),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_failed_update_is_named_and_nothing_goes_on_until_a_load(
    broken: int, error: type[BaseException], message: str, steps_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that is refused does not count."""
    plain, run = pair_of(steps=steps_before, foreach=False)
    optimizer, saved, of_plain = run.optimizer, run.copy(), plain.copy()
    real, calls = adam_module.adam, list[int]()

    def adam(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        calls.append(1)
        if len(calls) > broken:
            raise error("a bit has flipped")

    give_gradients(run)
    with monkeypatch.context() as patch:
        patch.setattr(adam_module, "adam", adam)
        with pytest.raises(error, match="a bit has flipped"):
            optimizer.step()

    for number, (name, param) in enumerate(run.named.items()):
        assert torch.equal(param, saved["model"][name]) == (number > broken)
    with pytest.raises(ValueError, match="middle"):
        optimizer.load_state_dict({**saved["optimizers"][0], "state": {1: {"other": torch.zeros(())}}})
    message = rf"{error.__name__}: a bit has flipped\. {message}.*load_state_dict"
    for refused in (optimizer.step, optimizer.state_dict, lambda: remove_offload(optimizer)):
        with pytest.raises(RuntimeError, match=message):
            refused()
    assert "Not usable" in str(optimizer.offload_report())
    assert isinstance(optimizer, OffloadedOptimizer)

    plain.restore(of_plain)
    run.restore(saved)
    assert_same_each_step(plain, run, 2, again)
    run.remove()


UNUSABLE = [("lr", "1e-3"), ("lr", None), ("betas", ("0.9", 0.999)), ("betas", None), ("eps", None)]


@spread(
    pairs=True,
    entry={f"{name}={value}": (name, value) for name, value in UNUSABLE},
    steps_before={"fresh": 0, "used": 2},
    options={"fused": {"fused": True}, "foreach": {"foreach": True}},
)
def test_a_hyperparameter_that_no_step_can_use_is_named_and_nothing_is_lost(
    entry: tuple[str, object], steps_before: int, options: dict[str, Any]
) -> None:
    name, value = entry
    plain, run = pair_of(torch.optim.Adam, steps=steps_before, **options)
    group = run.optimizer.param_groups[0]
    right = dict(group)
    group[name] = value
    said = re.escape(f"param_groups[0]['{name}'] = {value!r}")
    give_gradients(run)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"(?s)step\(\) cannot run with {said}: TypeError: .*Nothing has been"):
            run.update()
    del group[name]
    with pytest.raises(ValueError, match=rf"cannot run with param_groups\[0\] without '{name}': KeyError"):
        run.update()
    group.clear()
    group.update(right)
    assert_same_each_step(plain, run, 2, again)


def fail(*_: Any) -> None:
    raise ArithmeticError("no loss, or a hook")


@pytest.mark.parametrize("where", ["closure", "pre", "post", "global"])
def test_an_exception_in_the_users_code_loses_nothing(where: str) -> None:
    plain, run = pair_of()
    optimizer = run.optimizer
    pre, post = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    register = {"pre": pre, "post": post, "global": register_optimizer_step_pre_hook}.get(where, lambda _: None)
    handle = register(fail)
    give_gradients(run)
    try:
        with pytest.raises(ArithmeticError):
            optimizer.step(fail if handle is None else None)  # type: ignore[arg-type]
    finally:
        if handle is not None:
            handle.remove()
    if where == "post":  # the step is done by then
        give_gradients(plain)
        plain.update()
    assert_same_each_step(plain, run, 2, again)


def test_another_layout_of_a_cut_parameter_is_refused_before_anything_changes() -> None:
    net = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    offload_optimizer(optimizer, policy=with_share(bucket_bytes=4096, passing=5 * 4096))
    net(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert optimizer.offload_report().kept.moving_buckets > 1
    weight = net.weight
    contiguous, before = weight.data, weight.detach().clone()
    weight.data = contiguous.t().contiguous().t()
    with pytest.raises(RuntimeError, match=r"now has strides \(1, 64\).*Nothing has been changed"):
        optimizer.step()
    assert torch.equal(weight, before)
    weight.data = contiguous
    optimizer.step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize(
    "capture", [lambda optimizer: optimizer.step, lambda optimizer: partial(torch.optim.AdamW.step, optimizer)]
)
def test_a_step_past_the_offload_is_refused(capture: Callable[[Optimizer], Callable[[], object]]) -> None:
    """One that was captured before attaching, and the class's own."""
    optimizers = [torch.optim.AdamW(Net().parameters()) for _ in range(2)]
    captured = [capture(one) for one in optimizers]
    attach(optimizers[1], policy=POLICY)
    for one in optimizers:
        take_step(one)
    said = "AdamW.step was captured before offload_optimizer() and called now. Call offload_optimizer() first and wrap "
    with pytest.raises(RuntimeError, match=re.escape(f"{said}optimizer.step afterwards. Nothing has been changed.")):
        captured[1]()
    assert all(map(torch.equal, *map(params_of, optimizers)))
    for one in optimizers:
        partial(one.step)()
    remove_offload(optimizers[1])
    for step in captured:
        step()
    assert all(map(torch.equal, *map(params_of, optimizers)))


@pytest.mark.filterwarnings("default")
def test_one_warning_on_the_cpu_that_there_is_nothing_to_gain() -> None:
    with pytest.warns(UserWarning, match="nothing to gain") as warned:
        optimizer = offload_optimizer(torch.optim.AdamW(Net().parameters()), policy=POLICY)
    assert len(warned) == 1
    assert "on the CPU: offloading works, but there is nothing to gain" in str(warned[0].message)
    assert warned[0].filename == __file__
    assert "nothing to gain" in str(optimizer.offload_report())


def test_an_accelerator_that_no_test_has_seen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(offload_optimizer(torch.optim.AdamW(Net().parameters()), policy=POLICY))
    for device, hip, name in (("cpu", None, ""), ("cuda", None, ""), ("cuda", "6.4", "ROCm"), ("xpu", None, "xpu")):
        monkeypatch.setattr(engine, "device", torch.device(device))
        monkeypatch.setattr(torch.version, "hip", hip)
        told = [note for note in notes_of(engine) if "was not tested on" in note]
        assert len(told) == bool(name)
        assert all(f"on {name}, where" in note for note in told)


def test_an_offload_that_moves_nothing_says_so_loudly() -> None:
    net = Net()
    with pytest.warns(UserWarning, match="NOTHING IS OFFLOADED: SGD keeps no state for these parameters"):
        optimizer = offload_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    net(torch.ones(4, 16)).backward()
    optimizer.step()
    report = optimizer.offload_report()
    assert "NOTHING IS OFFLOADED" in str(report).splitlines()[1]
    assert (report.memory.host_bytes, report.step.loaded_bytes, report.step.stored_bytes) == (0, 0, 0)
