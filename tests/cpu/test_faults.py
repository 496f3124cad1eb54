"""Bad input and faults: each says what was expected, what was found and what to do, and loses nothing."""

import copy
import importlib
import io
import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, offload_optimizer, remove_offload
from tests.policies import with_share
from tests.tiers import spread

adam_module = importlib.import_module("torch.optim.adam")  # torch.optim itself hides it

POLICY = OffloadPolicy(bucket_bytes=1024)
NUMEL = 100  # of each parameter below: Adam's state of one is a bucket


class Net(nn.Module):
    """Parameters ``first``, ``middle`` and ``last``, a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(("first", "middle", "last")):
            setattr(self, name, nn.Parameter(torch.linspace(-1, number, NUMEL)))


def offloaded(net: nn.Module, make: Callable[..., Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    return offload_optimizer(make(net.parameters(), **options), model=net, policy=POLICY)


def backward(net: nn.Module, step: int) -> None:
    for number, param in enumerate(net.parameters()):
        param.grad = torch.linspace(number, step + 1.0, param.numel()).view_as(param)


def train(net: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        backward(net, step)
        optimizer.step()


def tensors_of(net: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Parameters and state, copied."""
    state = [value for param in net.parameters() for value in optimizer.state[param].values()]
    return [value.detach().clone() for value in [*net.parameters(), *state]]


def assert_equal(ones: list[Tensor], others: list[Tensor]) -> None:
    assert len(ones) == len(others)
    assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def plain_run(steps: int, make: Callable[..., Optimizer] = torch.optim.AdamW, **options: Any) -> list[Tensor]:
    net = Net()
    optimizer = make(net.parameters(), **options)
    train(net, optimizer, range(steps))
    return tensors_of(net, optimizer)


def assert_refused(
    optimizer: Optimizer, error: type[Exception], message: str, *, model: nn.Module | None = None, policy: Any = POLICY
) -> None:
    """Attaching fails, and leaves the optimizer as it was."""
    before = dict(optimizer.__dict__), type(optimizer), dict(optimizer.state)
    hooks = dict(optimizer._optimizer_step_pre_hooks)
    with pytest.raises(error, match=message):
        offload_optimizer(optimizer, model=model, policy=policy)
    assert (dict(optimizer.__dict__), type(optimizer), dict(optimizer.state)) == before
    assert dict(optimizer._optimizer_step_pre_hooks) == hooks


def test_what_is_not_offloaded_or_no_optimizer_is_refused() -> None:
    with pytest.raises(RuntimeError, match="this AdamW is not offloaded"):
        remove_offload(torch.optim.AdamW(Net().parameters()))
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Net"):
        offload_optimizer(Net())  # type: ignore[arg-type]


def listed_twice() -> dict[str, Any]:
    param = nn.Parameter(torch.randn(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        return {"optimizer": torch.optim.AdamW([param, param])}


def adamw(policy: OffloadPolicy = POLICY, **options: Any) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(Net().parameters(), **options), "policy": policy}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a parameter twice": (listed_twice, "lists a parameter more than once"),
    "pinned without an accelerator": (lambda: adamw(OffloadPolicy(pin_memory=True)), "pin_memory=True needs an accel"),
    "a step that autograd follows": (
        lambda: adamw(differentiable=True),
        r"param_groups\[0\] has differentiable=True",
    ),
    "sparse gradients": (lambda: {"optimizer": torch.optim.SparseAdam(Net().parameters())}, "SparseAdam .*sparse"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_attaching_is_refused(make: Callable[[], dict[str, Any]], message: str) -> None:
    assert_refused(error=ValueError, message=message, **make())


def test_a_step_without_any_gradient_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    optimizer = offloaded(net)
    train(net, optimizer, [0])
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.step()
    assert caplog.text.count("step() found no gradient in any parameter; nothing was updated or moved") == 1


def test_parameters_on_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    real = torch.Tensor.device.__get__
    elsewhere = property(lambda tensor: torch.device("cuda", 1) if tensor is net.last else real(tensor))
    optimizer = torch.optim.AdamW(net.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "device", elsewhere)
        with pytest.raises(
            ValueError, match=r"several devices: first on cpu, last on cuda:1\. Use one optimizer for each"
        ):
            offload_optimizer(optimizer, model=net, policy=POLICY)
    train(net, optimizer, range(2))
    assert_equal(tensors_of(net, optimizer), plain_run(2))


@pytest.mark.parametrize(
    "make_copy",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda optimizer: torch.save(optimizer, io.BytesIO())],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
def test_a_copy_is_refused_while_offloaded(make_copy: Callable[[Optimizer], object]) -> None:
    net = Net()
    optimizer = offloaded(net)
    train(net, optimizer, [0])
    with pytest.raises(
        TypeError, match=r"OffloadedAdamW cannot be copied .*state_dict\(\), or call remove_offload\(\)"
    ):
        make_copy(optimizer)
    train(net, optimizer, [1])
    assert_equal(tensors_of(net, optimizer), plain_run(2))
    make_copy(remove_offload(optimizer))


def test_a_sparse_gradient_changes_nothing_and_the_next_step_works() -> None:
    net = Net()
    optimizer = offloaded(net)
    train(net, optimizer, [0])
    before = tensors_of(net, optimizer)
    backward(net, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.11 warns of unchecked invariants whatever one asks for
        net.last.grad = torch.sparse_coo_tensor([[3]], [1.0], (NUMEL,), check_invariants=True)
    with pytest.raises(
        RuntimeError, match=r"last cannot be updated: its gradient is torch.sparse_coo.*Nothing has been"
    ):
        optimizer.step()
    assert_equal(tensors_of(net, optimizer), before)
    train(net, optimizer, [1])
    assert_equal(tensors_of(net, optimizer), plain_run(2))


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
    net = Net()
    optimizer = offloaded(net, foreach=False)
    train(net, optimizer, range(steps_before))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    before, real, calls = tensors_of(net, optimizer), adam_module.adam, list[int]()

    def adam(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        calls.append(1)
        if len(calls) > broken:
            raise error("a bit has flipped")

    with monkeypatch.context() as patch:
        patch.setattr(adam_module, "adam", adam)
        with pytest.raises(error, match="a bit has flipped"):
            train(net, optimizer, [steps_before])

    for number, param in enumerate(net.parameters()):
        assert torch.equal(param, before[number]) == (number > broken)
    with pytest.raises(ValueError, match="middle"):
        optimizer.load_state_dict({**saved[1], "state": {1: {"other": torch.zeros(())}}})
    message = rf"{error.__name__}: a bit has flipped\. {message}.*load_state_dict"
    for refused in (optimizer.step, optimizer.state_dict, lambda: remove_offload(optimizer)):
        with pytest.raises(RuntimeError, match=message):
            refused()
    assert "Not usable" in str(optimizer.offload_report())
    assert isinstance(optimizer, OffloadedOptimizer)

    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(net, optimizer, range(steps_before, steps_before + 2))
    assert_equal(tensors_of(net, optimizer), plain_run(steps_before + 2, foreach=False))
    remove_offload(optimizer)


@pytest.mark.parametrize("device_bytes", [2048, 1 << 20], ids=["streams", "kept"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_first_update_that_fails_before_it_writes_parameters_can_be_repeated(
    steps_before: int, device_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters were counted and moments written by then. State that is kept is newer there than at home."""
    net = Net()
    policy = OffloadPolicy(bucket_bytes=1024, device_bytes=device_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = offload_optimizer(torch.optim.Adam(net.parameters(), foreach=True), model=net, policy=policy)
    train(net, optimizer, range(steps_before))

    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for temporaries")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_sqrt", no_room)
        with pytest.raises(torch.OutOfMemoryError, match=r"^no room for temporaries$"):
            train(net, optimizer, [steps_before])
    if device_bytes > 2048 and steps_before:
        with pytest.raises(RuntimeError, match="0 of 3 buckets had been updated"):
            optimizer.step()
        return
    optimizer.step()
    train(net, optimizer, [steps_before + 1])
    assert_equal(tensors_of(net, optimizer), plain_run(steps_before + 2, torch.optim.Adam, foreach=True))


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
    net = Net()
    optimizer = offloaded(net, torch.optim.Adam, **options)
    train(net, optimizer, range(steps_before))
    group = optimizer.param_groups[0]
    group[name], right = value, group[name]
    said = re.escape(f"param_groups[0]['{name}'] = {value!r}")
    message = rf"(?s)step\(\) cannot run with {said}: TypeError: .*Nothing has been changed"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            train(net, optimizer, [steps_before])
    group[name] = right
    optimizer.step()
    train(net, optimizer, [steps_before + 1])
    assert_equal(tensors_of(net, optimizer), plain_run(steps_before + 2, torch.optim.Adam, **options))


@pytest.mark.parametrize("where", ["closure", "pre", "post", "global"])
def fail(*_: Any) -> None:
    raise ArithmeticError("no loss, or a hook")


@pytest.mark.parametrize("where", ["closure", "pre", "post", "global"])
def test_an_exception_in_the_users_code_loses_nothing(where: str) -> None:
    net = Net()
    optimizer = offloaded(net)
    train(net, optimizer, [0])
    pre, post = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    register = {"pre": pre, "post": post, "global": register_optimizer_step_pre_hook}.get(where, lambda _: None)
    handle = register(fail)
    backward(net, 1)
    try:
        with pytest.raises(ArithmeticError):
            optimizer.step(fail if handle is None else None)
    finally:
        if handle is not None:
            handle.remove()
    train(net, optimizer, [2] if where == "post" else [1, 2])
    assert_equal(tensors_of(net, optimizer), plain_run(3))


def test_another_layout_of_a_cut_parameter_is_refused_before_anything_changes() -> None:
    net = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    policy = with_share(bucket_bytes=4096, passing=5 * 4096)
    offload_optimizer(optimizer, policy=policy)
    net(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert optimizer.offload_report().kept.buckets > 1
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
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    captured = capture(optimizer)
    train(net, optimizer, [0])
    offload_optimizer(optimizer, policy=POLICY)
    before = tensors_of(net, optimizer)
    backward(net, 1)
    with pytest.raises(RuntimeError, match=r"AdamW\.step was called past the offload.*Nothing has been changed"):
        captured()
    assert_equal(tensors_of(net, optimizer), before)
    train(net, optimizer, [1])
    assert_equal(tensors_of(net, optimizer), plain_run(2))
    remove_offload(optimizer)
    backward(net, 2)
    captured()
    assert_equal(tensors_of(net, optimizer), plain_run(3))


@pytest.mark.filterwarnings("default")
def test_one_warning_on_the_cpu_that_there_is_nothing_to_gain() -> None:
    with pytest.warns(UserWarning, match="nothing to gain") as warned:
        optimizer = offload_optimizer(torch.optim.AdamW(Net().parameters()), policy=POLICY)
    assert len(warned) == 1
    assert "on the CPU: offloading works, but there is nothing to gain" in str(warned[0].message)
    assert warned[0].filename == __file__
    assert "nothing to gain" in str(optimizer.offload_report())


def test_an_offload_that_moves_nothing_says_so_loudly() -> None:
    net = Net()
    with pytest.warns(UserWarning, match="NOTHING IS OFFLOADED: SGD keeps no state for these parameters"):
        optimizer = offload_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    train(net, optimizer, range(2))
    report = optimizer.offload_report()
    assert "NOTHING IS OFFLOADED" in str(report).splitlines()[1]
    assert (report.memory.host_bytes, report.step.loaded_bytes, report.step.stored_bytes) == (0, 0, 0)
