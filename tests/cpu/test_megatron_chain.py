"""Megatron's optimizers and chains of them: looked through, sent through the phases, bit by bit as without offload.

The classes here have the attributes and the order of calls of ``megatron/core/optimizer`` (megatron-core 0.16.1:
``ChainedOptimizer``, ``DistributedOptimizer`` without the precision-aware optimizer): bf16 parameters of the model,
fp32 masters that are the inner optimizer's parameters, gradients copied to them before the step and they to the model
after it.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_offload import (
    OffloadedOptimizer,
    OffloadPolicy,
    is_offloaded,
    offload_optimizer,
    offload_report,
    offload_states,
    release_states,
    reload_before,
    reload_states,
    remove_offload,
    synchronize,
)
from fsdp_offload.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from tests.async_writers import copied

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer")

POLICY = OffloadPolicy(bucket_bytes=1 << 10)
STAYING = OffloadPolicy(bucket_bytes=1 << 10, device_bytes=1 << 20)
"""All state stays on the device, unless phases take it away."""


class DistributedOptimizer:
    """One inner optimizer; with ``masters``, on fp32 copies of bf16 parameters, which the attribute ``groups`` has."""

    groups = "shard_fp32_from_float16_groups"

    def __init__(self, params: list[Tensor], *, masters: bool, calls: list[str], name: str) -> None:
        self.model_params, self.calls, self.name = params, calls, name
        mains = [param.detach().clone().float().flatten() for param in params] if masters else params
        setattr(self, self.groups, [mains] if masters else [[None for _ in params]])
        self.optimizer = torch.optim.AdamW(mains, lr=0.01)

    def prepare_grads(self) -> None:
        for model, main in zip(self.model_params, self.mains, strict=True):
            if main is not model:
                main.grad = model.grad.float().flatten()

    def step(self) -> None:
        self.prepare_grads()
        self.calls.append(f"{self.name}.step")
        self.optimizer.step()
        for model, main in zip(self.model_params, self.mains, strict=True):
            if main is not model:
                model.data.copy_(main.view(model.shape))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for param in self.model_params:
            param.grad = None

    @property
    def mains(self) -> list[Tensor]:
        return self.optimizer.param_groups[0]["params"]


class Stub:
    """What Megatron has on a rank that trains nothing of a part."""

    is_stub_optimizer, optimizer = True, None

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


class ChainedOptimizer:
    """Several of them; ``optimizer`` is for chains of one."""

    def __init__(self, chained_optimizers: list[Any]) -> None:
        self.chained_optimizers = chained_optimizers

    @property
    def optimizer(self) -> Any:
        assert len(self.chained_optimizers) == 1, "ChainedOptimizer has more than one optimizer"
        return self.chained_optimizers[0].optimizer

    def step(self) -> None:
        for optimizer in self.chained_optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.chained_optimizers:
            optimizer.zero_grad()


class Loop:
    """Dense parameters in bf16 under one optimizer, experts in fp32 under another."""

    def __init__(self, flag: bool, policy: OffloadPolicy = POLICY, *, nested: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 4))
        self.model[0].to(torch.bfloat16)
        self.calls: list[str] = []
        dense, experts = (list(layer.parameters()) for layer in self.model)
        self.dense = DistributedOptimizer(dense, masters=True, calls=self.calls, name="dense")
        self.experts = DistributedOptimizer(experts, masters=False, calls=self.calls, name="experts")
        chain = [self.dense, self.experts]
        self.optimizer: Any = ChainedOptimizer([ChainedOptimizer(chain), Stub()] if nested else chain)
        self.flag = flag
        self.finalize: Callable[..., Any] = functools.partial(self.finalize_model_grads, group="dp")
        if flag:
            assert offload_optimizer(self.optimizer, policy=policy) is self.optimizer
            self.finalize = reload_before(self.finalize, self.optimizer)

    def finalize_model_grads(self, num_tokens: int, *, group: str) -> str:
        self.calls.append(f"finalize {num_tokens} {group}")
        return "finalized"

    def phase(self, phase: Callable[[Any], None]) -> None:
        if self.flag:
            self.calls.append(phase.__name__)
            phase(self.optimizer)

    def train_step(self, step: int) -> None:
        self.phase(offload_states)
        self.optimizer.zero_grad()
        self.phase(release_states)
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 12, generator=generator)
        self.model[1](self.model[0](x.bfloat16()).float()).square().mean().backward()
        assert self.finalize(7) == "finalized"
        self.optimizer.step()

    def values(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        for one in (self.dense, self.experts):
            for main in one.mains:
                yield main.detach()
                yield from (one.optimizer.state[main][name] for name in ("exp_avg", "exp_avg_sq", "step"))


def assert_same(on: Loop, off: Loop) -> None:
    synchronize(on.optimizer)
    values, others = list(on.values()), list(off.values())
    assert len(values) == len(others)
    assert all(map(torch.equal, values, others))


def train(pair: tuple[Loop, Loop], *steps: int) -> None:
    """With the flag and without it."""
    for step in steps:
        for loop in pair:
            loop.train_step(step)


def test_room_for_mains_that_require_no_gradient_is_taken_at_once(recwarn: pytest.WarningsRecorder) -> None:
    """As Megatron makes them: not in the first step, where host memory may have gone elsewhere."""
    warnings.simplefilter("always")
    loop = Loop(True)
    assert not any(main.requires_grad for main in loop.dense.mains)
    taken = loop.dense.optimizer.offload_report().memory.host_bytes
    assert taken >= 2 * sum(main.numel() * 4 for main in loop.dense.mains)
    assert not [warning for warning in recwarn if "NOTHING IS OFFLOADED" in str(warning.message)]


@pytest.mark.parametrize("groups", [DistributedOptimizer.groups, "fp32_from_float16_groups"])
def test_masters_whose_memory_has_been_exchanged_leave_as_well(groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron's ``offload_to_cpu`` and ``restore_from_cpu`` do it, by ``param.data = ...``.

    They are right until the release: with MXFP8 parameters, Megatron fills their buffers from the masters by then.
    """
    monkeypatch.setattr(DistributedOptimizer, "groups", groups)
    on, off = Loop(True), Loop(False)
    for step in range(3):
        train((on, off), step)
        for main in on.dense.mains:
            main.data = main.data.clone()
    offload_states(on.optimizer)
    assert all(map(torch.equal, on.dense.mains, off.dense.mains))
    release_states(on.optimizer)
    assert [main.untyped_storage().nbytes() for main in on.dense.mains] == [0 for _ in on.dense.mains]
    with pytest.raises(RuntimeError, match="reload_states"):
        on.dense.mains[0].sum()
    train((on, off), 3)
    assert_same(on, off)


def test_a_master_that_is_away_refuses_to_be_read_and_takes_its_gradient() -> None:
    loop = Loop(True)
    loop.train_step(0)
    main = loop.dense.mains[0]
    offload_states(loop.optimizer)
    main.grad = torch.ones(main.shape)
    release_states(loop.optimizer)
    with pytest.raises(RuntimeError, match=r"tensor\.data.*has freed the device memory of this fp32 master"):
        main.data  # noqa: B018
    main.grad = torch.ones(main.shape)
    loop.dense.optimizer.step()  # comes back by itself
    assert main.untyped_storage().nbytes()
    main.sum()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda main: main.add_(1),
    "a view": lambda main: main.view(-1)[1:].mul_(2),
    "data": lambda main: main.data.copy_(main.data + 3),
    "other data": lambda main: setattr(main, "data", main.data + 4),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_masters_that_are_written_to_before_they_are_released(write: Callable[[Tensor], object]) -> None:
    on, off = Loop(True), Loop(False)
    train((on, off), 0)
    offload_states(on.optimizer)
    for main in (*on.dense.mains, *off.dense.mains):
        write(main)
    release_states(on.optimizer)
    on.flag = False
    train((on, off), 1)
    assert_same(on, off)


@pytest.mark.parametrize("phases", [(), (offload_states,), (offload_states, release_states)])
def test_removing_brings_masters_back(phases: tuple[Any, ...]) -> None:
    on, off = Loop(True), Loop(False)
    train((on, off), *range(2))
    for phase in phases:
        phase(on.optimizer)
    assert remove_offload(on.optimizer) is on.optimizer
    on.flag, on.finalize = False, off.finalize
    train((on, off), *range(2, 4))
    assert not isinstance(on.dense.optimizer, OffloadedOptimizer)
    assert_same(on, off)


def test_one_that_cannot_be_offloaded_leaves_none_offloaded() -> None:
    loop = Loop(False)
    loop.experts.optimizer = torch.optim.SparseAdam(loop.experts.model_params)
    with pytest.raises(ValueError, match="SparseAdam"):
        offload_optimizer(loop.optimizer, policy=POLICY)
    assert not isinstance(loop.dense.optimizer, OffloadedOptimizer)
    with pytest.raises(TypeError, match="is not offloaded"):
        offload_states(loop.optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(loop.dense.optimizer, lambda _: 1.0)  # holds an optimizer, too
    for other in (object(), scheduler):
        with pytest.raises(
            TypeError, match=r"offload_states: expected a torch.optim.Optimizer, a list of them, or one of"
        ):
            offload_states(other)
        with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer"):
            offload_optimizer(other)


def test_functions_of_one_optimizer_reach_those_of_a_chain() -> None:
    loop = Loop(False)
    assert not is_offloaded(loop.optimizer)
    offload_optimizer(loop.dense, policy=POLICY)
    assert is_offloaded(loop.dense)
    assert not is_offloaded(loop.optimizer)
    synchronize(loop.optimizer)  # the plain one among them has nothing under way
    offload_optimizer(loop.optimizer, policy=POLICY, exist_ok=True)
    assert is_offloaded(loop.optimizer)
    loop.train_step(0)
    offload_states(loop.optimizer)
    release_states(loop.optimizer)
    reload_states(loop.optimizer)
    synchronize(loop.optimizer)
    assert all(main.sum().isfinite() for main in loop.dense.mains)
    assert offload_report(loop.dense).memory.host_bytes
    with pytest.raises(RuntimeError, match=r"ChainedOptimizer holds 2 optimizers; give one at a time"):
        offload_report(loop.optimizer)


def test_what_needs_the_models_own_parameters_says_so() -> None:
    """Mains are copies, flat parts of parameters; advice about fully_shard would lead nowhere."""
    loop = Loop(False)
    with pytest.raises(ValueError, match=r"copies or parts of them.*Leave out model=.*reload_before\(\)"):
        offload_optimizer(loop.optimizer, model=loop.model, policy=POLICY)
    assert not is_offloaded(loop.dense)
    offload_optimizer(loop.dense, policy=POLICY)
    with pytest.raises(ValueError, match=r"copies.*sharded_state_dict\(\)"):
        get_optimizer_state_dict(loop.model, loop.dense)


def test_state_dicts_of_a_chain() -> None:
    """By the names of the model's parameters, where those are the optimizers' own."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"dense": nn.Linear(3, 4), "experts": nn.Linear(4, 2)})
    calls: list[str] = []
    chain = ChainedOptimizer(
        [DistributedOptimizer(list(model[k].parameters()), masters=False, calls=calls, name=k) for k in model]
    )
    offload_optimizer(chain, model=model, policy=POLICY)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    chain.step()
    saved = copied(get_optimizer_state_dict(model, chain, fsdp_dtensor=True))
    names = [name for name, _ in model.named_parameters()]
    assert [*saved["state"]] == [*saved["param_to_group_meta"]] == names
    chain.step()
    wrapped = {part: {f"module.module.{name}": of for name, of in saved[part].items()} for part in saved}
    set_optimizer_state_dict(model, chain, wrapped)
    for name, param in model.named_parameters():
        inner = chain.chained_optimizers[name.startswith("experts")].optimizer
        assert torch.equal(inner.state[param]["exp_avg"], saved["state"][name]["exp_avg"])
        assert inner.state[param]["step"] == 1


# Precision-aware updates ---------------------------------------------------------------------------------------------


def test_a_gradient_that_torchs_optimizers_do_not_read_is_none() -> None:
    """With ``use_precision_aware_optimizer`` Megatron puts gradients where only FusedAdam looks."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = offload_optimizer(torch.optim.AdamW([param], lr=0.5), policy=POLICY)
    param.decoupled_grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"params\[0\] cannot be updated: its gradient is in param.decoupled_grad"):
        optimizer.step()
    assert torch.equal(param, torch.ones(4, dtype=torch.bfloat16))
    assert not optimizer.state
    param.decoupled_grad = None
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert not torch.equal(param, torch.ones(4, dtype=torch.bfloat16))
