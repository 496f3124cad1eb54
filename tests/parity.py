"""Compare with plain training: models, two sides, and what is not the same, bit by bit.

Works on any device and with DTensors: then the local tensors are compared, and what is offloaded has to be on the host.
``tests/overlapping.py`` trains both sides by the loop of the conformance suite.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.engine import step as steps
from fsdp_offload.fsdp.dtensor import local_shard

SMALL = OffloadPolicy(bucket_bytes=2048)
"""So little that the models below have many buckets, and every parameter above 256 elements of Adam's is cut."""

torch.set_num_threads(1)  # the models are so small that several threads only wait for each other

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass
class Run:
    """One side: a model, its optimizer, and what the test adds (``parts["scheduler"]``)."""

    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    dtype: torch.dtype
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def loss(self, step: int) -> Tensor:
        """The loss of this step's batch."""
        return self.model(batch(step, self.device, self.dtype))

    @property
    def is_offloaded(self) -> bool:
        return "_offload_engine" in vars(self.optimizer)


def batch(step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(4, 16, generator=generator).to(device, dtype)


class Pair:
    """The plain side and the offloaded one."""

    def __init__(self, plain: Run, offloaded: Run) -> None:
        self.plain = plain
        self.offloaded = offloaded
        self.steps = 0

    def __iter__(self) -> Iterator[Run]:
        return iter((self.plain, self.offloaded))

    def attach(self, policy: OffloadPolicy = SMALL, *, with_model: bool = False) -> None:
        attach(self.offloaded.optimizer, policy=policy, model=self.offloaded.model if with_model else None)

    def assert_same(self) -> None:
        found = list(self.differences())
        assert not found, f"after {self.steps} steps: " + "; ".join(found[:6])
        if self.offloaded.is_offloaded:
            assert_at_home(self.offloaded.optimizer)


def attach(optimizer: Optimizer, **kwargs: Any) -> Optimizer:
    """``offload_optimizer`` without its advice (nothing to gain on the CPU, a tiny staging): tests are not users."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="offload_optimizer: ", category=UserWarning)
        return offload_optimizer(optimizer, **{"policy": SMALL, **kwargs})


# Comparing -----------------------------------------------------------------------------------------------------------


def differences(plain: Run, offloaded: Run) -> Iterator[str]:
    """What is not the same, in words."""
    if list(plain.params) != list(offloaded.params):
        yield f"parameters {list(plain.params)} and {list(offloaded.params)}"
    yield from group_differences(plain.optimizer, offloaded.optimizer)
    states = plain.optimizer.state, offloaded.optimizer.state
    for name, one, other in zip(plain.params, plain.params.values(), offloaded.params.values(), strict=True):
        if not same_value(one.detach(), other.detach()):
            yield f"parameter {name}"
        if (one in states[0]) != (other in states[1]) or len(states[0]) != len(states[1]):
            yield f"there is state for {name} on one side, or for others"
        elif one in states[0]:
            yield from state_differences(name, states[0][one], states[1][other])


def group_differences(plain: Optimizer, offloaded: Optimizer) -> Iterator[str]:
    if len(plain.param_groups) != len(offloaded.param_groups):
        yield f"{len(plain.param_groups)} and {len(offloaded.param_groups)} groups"
    for number, (one, other) in enumerate(zip(plain.param_groups, offloaded.param_groups, strict=True)):
        if list(one) != list(other):
            yield f"keys of param_groups[{number}] are {list(one)} and {list(other)}"
        for key in one.keys() & other.keys() - {"params"}:
            if not same_value(one[key], other[key]):
                yield f"param_groups[{number}][{key!r}] is {one[key]!r} and {other[key]!r}"


def state_differences(name: str, one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    if list(one) != list(other):
        yield f"state of {name} has the keys {list(one)} and {list(other)}"
    for key in one.keys() & other.keys():
        if not same_value(one[key], other[key]):
            yield f"state {key!r} of {name} is {_short(one[key])} and {_short(other[key])}"


def same_value(one: Any, other: Any) -> bool:
    """The same types, shapes and bits; of numbers the same type and value. Where it lives does not matter."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same_value, one, other))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor) and one.placements != other.placements:
        return False
    mine, others = leaves(one), leaves(other)
    return len(mine) == len(others) and all(same_bits(a, b) for a, b in zip(mine, others, strict=True))


def same_values(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of NaN and of minus zero, and in the same order in memory (where a dimension of size 1 says nothing)."""
    strides = [[step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (one, other)]
    if one.shape != other.shape or one.dtype != other.dtype or strides[0] != strides[1]:
        return False
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: Tensor) -> Tensor:
    return (
        tensor.detach()
        .cpu()
        .to_dense()
        .resolve_conj()
        .resolve_neg()
        .reshape(-1)
        .clone(memory_format=torch.contiguous_format)
        .view(torch.uint8)
    )


def leaves(value: Tensor) -> list[Tensor]:
    """The plain tensors inside a DTensor or another wrapper."""
    if isinstance(value, DTensor):
        return leaves(local_shard(value))
    if hasattr(type(value), "__tensor_flatten__"):
        inner = (getattr(value, name) for name in value.__tensor_flatten__()[0])
        return [leaf for part in inner if isinstance(part, Tensor) for leaf in leaves(part)]
    return [value]


def local(tensor: Tensor) -> Tensor:
    return local_shard(tensor)


def host_copy(value: Any) -> Any:
    """Copy this rank's part of a tensor to the host."""
    return local(value).detach().cpu().clone() if isinstance(value, Tensor) else value


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step, if there is one, as optimizers do first."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _short(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"{type(value).__name__}{tuple(value.shape)} {value.dtype} of norm {value.float().norm().item():.9g}"
    return repr(value)


def assert_at_home(optimizer: Optimizer) -> None:
    """Every state tensor that has a home is there, on the host, and not in memory that a step has left behind."""
    engine = vars(optimizer)["_offload_engine"].engine
    regions = [(region.bytes.data_ptr(), region.nbytes) for region in engine.plan.regions]
    for param, shard in engine.plan.shards.items():
        for name, value in optimizer.state.get(param, {}).items():
            if name not in shard.homes:
                continue
            for leaf in leaves(value):
                assert leaf.device.type == "cpu", f"state {name!r} of {shard.name} is on {leaf.device}"
                inside = any(begin <= leaf.data_ptr() < begin + nbytes for begin, nbytes in regions)
                assert inside or leaf.numel() == 0, f"state {name!r} of {shard.name} is not in the arena"


def offloaded_names(optimizer: Optimizer) -> set[str]:
    """Names of the state that moves, over all parameters."""
    engine = vars(optimizer)["_offload_engine"].engine
    return {name for shard in engine.plan.shards.values() for name in shard.homes}


def random_state(device: torch.device) -> Tensor:
    on_device = torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else torch.empty(0)
    return torch.cat([torch.get_rng_state(), on_device.to(torch.uint8).cpu()])


def fail_in_bucket(number: int, step: Callable[[], object]) -> None:
    """Make a step whose updates of buckets fail before they begin, from the one of that number on, counted from 0."""
    update, calls = steps.update_bucket, [0]

    def failing(*args: Any) -> None:
        calls[0] += 1
        if calls[0] > number:
            raise ArithmeticError("a bit has flipped")
        update(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "update_bucket", failing)
        with pytest.raises(ArithmeticError, match="a bit has flipped"):
            step()


def adamw(params: Any, **options: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, **options)


def take_step(optimizer: Optimizer, count: int = 1) -> None:
    """With gradients of ones."""
    for _ in range(count):
        for param in params_of(optimizer):
            param.grad = torch.ones_like(param)
        optimizer.step()


# Models --------------------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """Parameters of every kind of shape: 0-dim, one element, ends that fill no vector, channels last, an empty one."""

    def __init__(self, *, empty: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.bias = nn.Parameter(torch.randn(65))
        self.weight = nn.Parameter(torch.randn(40, 33))
        self.transposed = nn.Parameter(torch.randn(24, 31).t())
        self.conv = nn.Parameter(torch.randn(8, 5, 3, 3).to(memory_format=torch.channels_last))
        self.long = nn.Parameter(torch.randn(2500))
        if empty:
            self.empty = nn.Parameter(torch.randn(0, 7))

    def forward(self, x: Tensor) -> Tensor:
        factors = x.real.flatten() if x.is_complex() else x.flatten()
        total = factors.new_zeros(())
        for number, param in enumerate(self.parameters()):
            values = (param * factors[number]).sin()
            total = total + (values.abs() if values.is_complex() else values).sum()
        return total


class One(nn.Module):
    """A single parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))

    forward = Zoo.forward


class Matrices(nn.Module):
    """Matrices only: what Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Parameter(torch.randn(40, 12))
        self.square = nn.Parameter(torch.randn(16, 16))
        self.wide = nn.Parameter(torch.randn(9, 33))

    forward = Zoo.forward


class Net(nn.Module):
    """A small network: linear layers, a norm, a convolution in channels_last, a 0-dim gain, and a layer never used."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.table = nn.Linear(16, width, bias=False)
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width * 4, 40)
        self.down = nn.Linear(40, width)
        self.unused = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.table(x))
        image = self.conv(hidden.view(len(x), 1, 4, -1)).flatten(1)
        hidden = hidden + self.down(torch.tanh(self.up(image))) * self.gain
        return (self.head(hidden) - x.roll(1, 1)).pow(2).mean()


def turn_amsgrad_on(optimizer: Optimizer, states: Iterable[dict[str, Any]]) -> None:
    """Have Adam keep another moment from now on, in ``states``, which thereby has another layout."""
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    for state in states:
        state.setdefault("max_exp_avg_sq", torch.zeros_like(state["exp_avg_sq"]))
