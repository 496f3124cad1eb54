"""A model that has slept is the same objects with the same bits; while it sleeps, its memory is away and use refused.

On the CPU the same code runs as on a device: storages give their memory back, and get it again.
"""

import copy
import gc
import io
import logging
import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.testing._internal.two_tensor import TwoTensor

import fsdp_offload.model.sleep as room
from fsdp_offload import OffloadPolicy, offload_model, offload_optimizer, reload_model
from fsdp_offload.device import lanes
from tests.forks import address_space_bytes, resident_bytes
from tests.parity import local, same_bits

ASLEEP = r"Call reload_model\(model\) first"


class Net(nn.Module):
    """Tied weights, a frozen parameter, an unused and an empty one, buffers, and one over a larger storage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.body[0].weight.requires_grad_(requires_grad=False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("table", torch.randn(40)[8:16], persistent=False)
        self.register_buffer("tail", self.table[4:])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens)) + self.table.to(self.head.weight.dtype)
        return self.head(hidden).float().logsumexp(-1).mean()


def batch(seed: int) -> Tensor:
    return torch.randint(0, 13, (6,), generator=torch.Generator().manual_seed(seed))


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def nap(model: nn.Module) -> None:
    offload_model(model)
    reload_model(model)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of everything, gradients included."""
    found = {name: local(tensor.detach()).clone() for name, tensor in tensors_of(model).items()}
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return found | {f"{name}.grad": local(grad).clone() for name, grad in grads.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not same_bits(one[name], other[name])] == []


def storages_of(tensors: list[Tensor]) -> list[torch.UntypedStorage]:
    return [local(tensor).untyped_storage() for tensor in tensors]


# The same objects, the same bits ------------------------------------------------------------------------------------


def everything(model: nn.Module) -> list[Tensor]:
    return [*tensors_of(model).values(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_memory_is_away_and_comes_back() -> None:
    model = make()
    model(batch(0)).backward()
    before, identities = snapshot(model), [id(tensor) for tensor in everything(model)]
    storages = list({id(one): one for one in storages_of(everything(model))}.values())
    total = sum(storage.nbytes() for storage in storages)
    assert offload_model(model) == total
    assert [storage.nbytes() for storage in storages] == [0] * len(storages)
    assert offload_model(model) == 0
    reload_model(model)
    assert sum(storage.nbytes() for storage in storages) == total
    reload_model(model)
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert [id(tensor) for tensor in everything(model)] == identities
    assert_same(snapshot(model), before)


def test_views_and_tied_weights_stay_what_they_are() -> None:
    model = make()
    view = model.body[2].weight.detach()[2:5]
    bits = view.clone()
    nap(model)
    assert torch.equal(view, bits)
    assert view.untyped_storage().data_ptr() == model.body[2].weight.untyped_storage().data_ptr()
    assert model.head.weight is model.embed.weight
    assert model.tail.data_ptr() == model.table.data_ptr() + 16
    with torch.no_grad():
        view.fill_(3)
    assert bool((model.body[2].weight[2:5] == 3).all())


def test_a_graph_that_was_made_before_works_afterwards() -> None:
    """Waking writes what was there: autograd must not take it for a modification."""
    model, other = make(), make()
    loss, expected = model(batch(0)), other(batch(0))
    versions = [param._version for param in model.parameters()]
    nap(model)
    assert [param._version for param in model.parameters()] == versions
    loss.backward()
    expected.backward()
    assert_same(snapshot(model), snapshot(other))


def test_gradients_are_dropped_on_request() -> None:
    model = make()
    parameters = offload_model(model)
    reload_model(model)
    model(batch(0)).backward()
    model.unused.grad = grad = torch.ones(3)
    assert offload_model(model, gradients="drop") == parameters
    reload_model(model)
    assert {param.grad for param in model.parameters()} == {None}
    assert torch.equal(grad, torch.ones(3))  # whoever else holds it may use it
    with pytest.raises(ValueError, match="gradients must be 'offload' or 'drop'"):
        offload_model(model, gradients="keep")  # type: ignore[arg-type]


def test_parts_and_models_that_share_a_parameter_sleep_by_themselves() -> None:
    model, other = make(0), make(1)
    other.head.weight = other.embed.weight = model.embed.weight
    model(batch(0)).backward()
    before = [snapshot(one) for one in (model, other)]
    whole = offload_model(model)
    reload_model(model)
    assert offload_model(model.body) + offload_model(model) == whole
    offload_model(other)
    reload_model(model)
    with pytest.raises(RuntimeError, match=ASLEEP):
        model(batch(0))
    reload_model(model.body)
    reload_model(other)
    assert_same(snapshot(model), before[0])
    assert_same(snapshot(other), before[1])


def test_waking_another_module_than_sleeps_is_refused() -> None:
    model, other = make(0), make(1)
    other.head.weight = model.embed.weight
    offload_model(model)
    for one in (model.body, other):
        with pytest.raises(RuntimeError, match=r"asleep because offload_model\(\) was called with another module"):
            reload_model(one)
    reload_model(model)
    for one in (model, model.body, other):
        reload_model(one)  # all are awake


def test_inference_mode_changes_nothing() -> None:
    model = make()
    before = snapshot(model)
    with torch.inference_mode():
        nap(model)
    assert_same(snapshot(model), before)
    model(batch(0)).backward()  # which inference tensors would refuse


# Sharded ------------------------------------------------------------------------------------------------------------


def shard(model: Net, mesh: DeviceMesh, **options: Any) -> Net:
    fully_shard(model.body, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def test_gradients_that_are_not_reduced_yet_are_dropped_on_request(mesh: DeviceMesh) -> None:
    """That they come back otherwise is the habit ``unreduced`` with sleep."""
    model, fresh = shard(make(), mesh), shard(make(), mesh)
    model.set_requires_gradient_sync(False)
    model(batch(0)).backward()
    moved = offload_model(model)
    reload_model(model)
    assert offload_model(model, gradients="drop") < moved
    reload_model(model)
    model.set_requires_gradient_sync(True)
    with torch.no_grad():
        fresh(batch(0))  # statistics
    for one in (model, fresh):
        one(batch(1)).backward()
    assert_same(snapshot(model), snapshot(fresh))


def test_what_fully_shard_keeps_on_the_host_is_at_home(mesh: DeviceMesh) -> None:
    model = shard(make(), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert offload_model(model) == 0
    model(batch(0)).backward()
    reload_model(model)


def test_gradients_that_are_views_of_a_bucket(mesh: DeviceMesh) -> None:
    """DistributedDataParallel reduces into its own bucket after waking, of which the gradients are still views."""
    assert mesh.size() == 1
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))
        models.append(nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True))

    for seed in range(3):
        for model in models:
            model(torch.full((2, 8), seed + 0.5)).sum().backward()
            if model is models[1]:
                nap(model)
            with torch.no_grad():
                for param in model.parameters():
                    assert param.grad is not None
                    param -= 0.1 * param.grad
            model.zero_grad(set_to_none=seed == 1)
            if model is models[1]:
                nap(model)
        assert_same(*map(snapshot, models))


# Optimizers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offloaded", [False, True])
def test_an_optimizer_neither_steps_nor_clears_while_asleep(offloaded: bool) -> None:
    model, other = make(), make()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, other)]
    if offloaded:
        offload_optimizer(optimizers[0], model=model)
    for seed in range(2):
        for net, optimizer in zip((model, other), optimizers, strict=True):
            net(batch(seed)).backward()
            if net is model:
                offload_model(net)
                for use in (
                    optimizer.step,
                    optimizer.zero_grad,
                    lambda: nn.utils.clip_grad_norm_(model.parameters(), 1),
                ):
                    with pytest.raises(RuntimeError, match=ASLEEP):
                        use()
                optimizer.state_dict()  # has nothing to do with it
                reload_model(net)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(snapshot(model), snapshot(other))


@pytest.mark.parametrize("set_to_none", [None, False, True])
def test_gradients_that_updates_have_freed_have_nothing_to_move(mesh: DeviceMesh, set_to_none: bool | None) -> None:
    model, other = shard(make(), mesh), shard(make(), mesh)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, other)]
    offload_optimizer(optimizers[0], model=model, policy=OffloadPolicy(parameters=True, overlap="iteration"))
    for seed in range(5):
        for net, optimizer in zip((model, other), optimizers, strict=True):
            net(batch(seed)).backward()
            optimizer.step()
            if set_to_none is not None:
                optimizer.zero_grad(set_to_none=set_to_none)
            if net is model:
                nap(model)
            optimizer.zero_grad()
    assert_same(snapshot(model), snapshot(other))


# Use while asleep ---------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Net], object]] = {
    "forward": lambda model: model(batch(0)),
    "forward of a part": lambda model: model.body[2](torch.ones(2, 8)),
    "functional": lambda model: torch.func.functional_call(
        model.head, dict(model.head.named_parameters()), torch.ones(8)
    ),
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a part": lambda model: model.body.state_dict(),
    "get_model_state_dict": get_model_state_dict,
    "load_state_dict": lambda model: model.load_state_dict(make(1).state_dict()),
    "deepcopy": copy.deepcopy,
    "save": lambda model: torch.save(model, io.BytesIO()),
    "to": lambda model: model.to(torch.float64),
    "arithmetic": lambda model: model.unused + 1,
    "in place": lambda model: model.unused.data.zero_(),
    "gradient": lambda model: model.unused.grad,
    "drop gradient": lambda model: setattr(model.unused, "grad", None),
    "view": lambda model: model.body[2].weight[1:],
    "item": lambda model: model.unused[0].item(),
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "out": lambda model: torch.ones(3, out=model.unused.detach()),
    "buffer": lambda model: model.table.sum(),
    "numpy": lambda model: model.table.numpy(),
    "list": lambda model: model.table.tolist(),
    "copy from": lambda model: torch.ones(8).copy_(model.table),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_is_refused(use: Callable[[Net], object]) -> None:
    model = make()
    model(batch(0)).backward()
    before = snapshot(model)
    offload_model(model)
    with pytest.raises((RuntimeError, TypeError), match=ASLEEP):
        use(model)
    reload_model(model)
    assert_same(snapshot(model), before)
    model.state_dict()
    copy.deepcopy(model)
    torch.save(model, io.BytesIO())


def test_what_needs_no_memory_is_allowed() -> None:
    model = make()
    offload_model(model)
    weight = model.embed.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((13, 8), torch.float32, "cpu")
    assert weight.requires_grad
    assert (weight.numel(), weight.is_leaf, len(weight), weight.stride()) == (104, True, 13, (8, 1))
    assert weight in set(model.parameters())
    assert repr(weight) == "Parameter(asleep, shape=(13, 8), dtype=torch.float32, device=cpu)"
    assert "Embedding(13, 8)" in repr(model)
    weight.requires_grad_(requires_grad=False)
    reload_model(model)
    assert repr(weight).startswith("Parameter containing:")


def test_a_compiled_model() -> None:
    """Compiled code does not look at hooks; that a parameter has another class is what it looks at."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(3, 8)
    expected = compiled(x)
    for _ in range(3):
        offload_model(model)
        with pytest.raises(Exception, match=ASLEEP):
            compiled(x)
        reload_model(model)
        assert torch.equal(compiled(x), expected)
    torch._dynamo.reset()


# What stays ---------------------------------------------------------------------------------------------------------


def test_memory_that_is_not_torchs_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    foreign = torch.frombuffer(bytearray(64), dtype=torch.float32)
    model.register_buffer("foreign", foreign)
    model.register_buffer("alias", torch.ones(4, 4))
    model.register_buffer("over_alias", torch.utils.dlpack.from_dlpack(model.alias[1:]))
    model.register_buffer("shared", torch.ones(5).share_memory_())
    model.unused.grad = torch.ones(3).to_sparse()
    with caplog.at_level(logging.WARNING, logger="fsdp_offload.model.sleep"):
        for _ in range(3):
            offload_model(model)
            assert foreign.sum() == 0
            assert model.over_alias.sum() == 12
            assert model.shared.sum() == 5
            reload_model(model)
    assert model.alias.sum() == 16
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "leaves 5 tensors where they are" in message
    assert "foreign: its memory is not torch's to free" in message
    assert "unused.grad: it is torch.sparse_coo" in message


def test_a_wrapper_sleeps_by_its_inner_tensors() -> None:
    """As the quantized weights of torchao and Transformer Engine."""
    first, second, model = torch.arange(12.0), torch.arange(12.0, 24.0), nn.Module()
    model.weight, expected = nn.Parameter(TwoTensor(first, second)), [first.clone(), second.clone()]
    assert offload_model(model) == 2 * 12 * 4
    assert [inner.untyped_storage().nbytes() for inner in (first, second)] == [0, 0]
    for inner in (model.weight, model.weight.a):
        with pytest.raises(RuntimeError, match=ASLEEP):
            inner.sum()
    reload_model(model)
    assert all(map(torch.equal, (model.weight.a, model.weight.b), expected))


# Host memory --------------------------------------------------------------------------------------------------------


def memory_of(model: nn.Module) -> "weakref.ref[object]":
    return weakref.ref(room._parkings[model].region._owner)


def test_host_memory_is_exact_is_kept_and_grows_with_the_model() -> None:
    model = make()
    model.register_buffer("large", torch.randn(1 << 18))
    moved = offload_model(model)
    assert moved <= room._parkings[model].region.nbytes <= moved * 1.001
    memory = memory_of(model)
    reload_model(model)
    model.unused.grad = torch.ones(3)
    offload_model(model)
    larger = memory_of(model)
    assert memory() is None
    assert larger() is not None
    reload_model(model)
    offload_model(model, gradients="drop")  # fits into what there is
    assert memory_of(model)() is larger()
    reload_model(model, free_host_memory=True)
    assert larger() is None
    reload_model(model, free_host_memory=True)


@pytest.mark.parametrize("asleep", [False, True])
def test_host_memory_goes_with_the_model(asleep: bool) -> None:
    model = make()
    model.unused.owner = model  # what people hang onto a parameter may refer to the model
    offload_model(model)
    if not asleep:
        reload_model(model)
    memory = memory_of(model)
    assert memory() is not None
    del model
    gc.collect()
    assert memory() is None


def test_too_little_host_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(1 << 50))  # as if so many ranks had to share this host
    model = make()
    model(batch(0)).backward()
    before = snapshot(model)
    with pytest.raises(MemoryError, match=r"offload_model needs \d+ bytes of host memory"):
        offload_model(model, gradients="drop")
    assert_same(snapshot(model), before)


def test_too_little_device_memory_leaves_it_asleep() -> None:
    model = nn.ParameterList([torch.randn(1000), torch.randn(64 << 20), torch.randn(3)])
    sums = [param.sum() for param in model]
    storages = storages_of(list(model))
    offload_model(model)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + (64 << 20), limit[1]))
    try:
        with pytest.raises(RuntimeError, match=r"not enough memory|can't allocate memory"):
            reload_model(model)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert [storage.nbytes() for storage in storages] == [0, 0, 0]
    with pytest.raises(RuntimeError, match=ASLEEP):
        model[0].sum()
    reload_model(model)
    assert [param.sum() for param in model] == sums


def test_two_thousand_cycles_grow_nothing() -> None:
    model = make()
    model.register_buffer("large", torch.randn(1 << 16))  # 2,000 of it would be 500 MiB
    before = snapshot(model)

    def cycle(times: int) -> None:
        for number in range(times):
            model.unused.grad = torch.ones(3)
            offload_model(model, gradients="offload" if number % 2 else "drop")
            reload_model(model)

    cycle(500)
    model.zero_grad()
    gc.collect()
    objects, resident = len(gc.get_objects()), resident_bytes()
    memory = memory_of(model)()
    cycle(2000)
    model.zero_grad()
    gc.collect()
    assert len(gc.get_objects()) - objects < 50
    assert resident_bytes() - resident < 4 << 20
    assert memory_of(model)() is memory
    assert [len(module._forward_pre_hooks) for module in model.modules()] == [0] * len(list(model.modules()))
    assert_same(snapshot(model), before)


@pytest.mark.parametrize(("name", "method"), [("DeviceLink", "synchronize"), ("Lane", "copy")])
@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupt_leaves_a_model_that_can_be_woken(
    monkeypatch: pytest.MonkeyPatch, name: str, method: str, call: int
) -> None:
    """Before its memory goes, and after."""
    model, cls, calls = make(), getattr(lanes, name), []
    before, run = snapshot(model), getattr(cls, method)

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return run(*args, **options)

    monkeypatch.setattr(cls, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        nap(model)
    reload_model(model)
    after = snapshot(model)
    assert all(same_bits(after[name], before[name]) for name in before)
    model(batch(0)).backward()
