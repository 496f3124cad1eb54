"""A FusedAdam trained with and without offload, side by side: for Transformer Engine's own and for the reference.

After each step every parameter, state tensor, scale and entry of the groups has to be the same, bit by bit, but for the
master of an fp32 parameter: the plain side has one that nobody reads, and the offloaded one has none.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from tests.parity import assert_at_home, attach, leaves, local, same_bits, same_value

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8

MASTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp32": {"master_weights": True},
    "remainder": {"master_weights": True, "store_param_remainders": True},
    "fp16": {"master_weights": True, "master_weight_dtype": FP16},
}


def options(moments: tuple[torch.dtype, ...]) -> Iterator[dict[str, Any]]:
    """Everything that FusedAdam's constructor accepts together."""
    for master, first, second in itertools.product(MASTERS.values(), moments, moments):
        yield {**master, "exp_avg_dtype": first, "exp_avg_sq_dtype": second}
    for master, both in itertools.product(("none", "fp32"), (FP32, BF16)):
        yield {**MASTERS[master], "exp_avg_dtype": both, "exp_avg_sq_dtype": both, "capturable": True}


def name_of(options: dict[str, Any]) -> str:
    return "-".join(f"{key}={str(value).removeprefix('torch.')}" for key, value in options.items())


class Mixed(nn.Module):
    """Linear layers in bf16, of several buckets, a norm in fp32, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 96, dtype=BF16)
        self.norm = nn.LayerNorm(96)
        self.frozen = nn.Linear(5, 7, dtype=BF16).requires_grad_(False)
        self.down = nn.Linear(96, 37, dtype=BF16)


class Twins:
    """The plain side and the offloaded one."""

    def __init__(
        self,
        make: Callable[..., Optimizer],
        *,
        device: str = "cpu",
        build: Callable[[], nn.Module] = Mixed,
        policy: OffloadPolicy | None = None,
        late: int = 0,
        **kwargs: Any,
    ) -> None:
        self.decoupled = bool(kwargs.get("use_decoupled_grad"))
        self.steps = 0
        self.models = []
        for _ in range(2):
            torch.manual_seed(0)
            self.models.append(build().to(device))
        self.optimizers = [make(self.groups(model), lr=0.02, weight_decay=0.1, **kwargs) for model in self.models]
        self.step(late)
        attach(self.offloaded, model=self.models[1], **({} if policy is None else {"policy": policy}))

    @staticmethod
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        """Matrices, the rest without weight decay, and a group without parameters."""
        params = list(model.parameters())
        return [
            {"params": [param for param in params if param.dim() > 1]},
            {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
            {"params": []},
        ]

    @property
    def plain(self) -> Optimizer:
        return self.optimizers[0]

    @property
    def offloaded(self) -> Optimizer:
        return self.optimizers[1]

    def give_gradients(self, without: tuple[str, ...] = ()) -> None:
        """The same on both sides; none for frozen parameters, nor for those whose name begins so."""
        for model in self.models:
            generator = torch.Generator().manual_seed(self.steps)
            for name, param in model.named_parameters():
                values = torch.randn(param.shape, generator=generator)
                local = param.detach()
                grad = None
                if param.requires_grad and not name.startswith(without or ("?",)):
                    grad = values.to(local.device, FP32 if self.decoupled else param.dtype)
                if self.decoupled:
                    param.decoupled_grad = grad
                else:
                    param.grad = grad

    def step(self, count: int = 1, without: tuple[str, ...] = (), **kwargs: Any) -> "Twins":
        for _ in range(count):
            self.give_gradients(without)
            for optimizer in self.optimizers:
                optimizer.step(**kwargs)
            self.steps += 1
            if "_offload_engine" in vars(self.offloaded):
                self.assert_same()
        return self

    def assert_same(self) -> None:
        assert_same_content(self.models, self.optimizers)
        if "_offload_engine" in vars(self.offloaded):
            assert_at_home(self.offloaded)

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.models[0].parameters()]

    def set_weights(self, weights: list[Tensor]) -> None:
        for model in self.models:
            for param, value in zip(model.parameters(), weights, strict=True):
                param.detach().copy_(value)


def assert_same_content(models: list[nn.Module], optimizers: list[Any]) -> None:
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert same_content(one.detach(), other.detach()), name
        mine, others = [_read(opt.state.get(p, {}), p) for opt, p in zip(optimizers, (one, other), strict=True)]
        assert list(mine) == list(others), f"state of {name}: {list(mine)} and {list(others)}"
        assert "master_param" not in optimizers[1].state.get(other, {}) or other.dtype is not FP32
        for key, value in mine.items():
            assert same_content(value, others[key]), f"{key} of {name}"
        scales = [opt._scales.get(p, {}) for opt, p in zip(optimizers, (one, other), strict=True)]
        for key in mine.keys() & scales[0].keys():
            assert same_value(scales[0][key], scales[1][key]), f"scale of {key} of {name}"
    for one_group, other_group in zip(optimizers[0].param_groups, optimizers[1].param_groups, strict=True):
        assert list(one_group) == list(other_group)
        for key in one_group.keys() - {"params"}:
            assert same_value(one_group[key], other_group[key]), f"{key}: {one_group[key]} and {other_group[key]}"


def _read(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """What the optimizer reads."""
    unread = "master_param" if param.dtype is FP32 else ""
    return {name: value for name, value in state.items() if name != unread}


def same_content(one: Tensor, other: Tensor) -> bool:
    """The same bits. Of fp8 tensors, of the data and their scale: the rest are caches. Ours may be gathered by bits."""
    if hasattr(local(one), "_scale_inv"):
        mine, others = ([local(t)._data, local(t)._scale_inv] for t in (one, other))
    elif hasattr(local(one), "_quantizer"):  # blocks, with padding that means nothing
        mine, others = [local(one).dequantize()], [local(other).dequantize()]
    else:
        mine, others = leaves(one), leaves(other)
    return isinstance(other, type(one)) and all(same_bits(a, b) for a, b in zip(mine, others, strict=True))


def same_state_dicts(twins: Twins) -> dict[str, Any]:
    """The plain side's, after comparing the two."""
    plain, offloaded = (optimizer.state_dict() for optimizer in twins.optimizers)
    params = [param for group in twins.plain.param_groups for param in group["params"]]
    assert plain["state"].keys() == offloaded["state"].keys()
    for number, state in plain["state"].items():
        expected = _read(state, params[number])
        assert list(expected) == list(offloaded["state"][number])
        for name, value in expected.items():
            assert same_value(value, offloaded["state"][number][name]), f"{name} of {number}"
    return copy.deepcopy(plain)


def check_options(make: Callable[..., Optimizer], kwargs: dict[str, Any], device: str = "cpu") -> None:
    """Steps, parameters whose gradient comes late, state dicts, a load, and removing."""
    twins = Twins(make, device=device, **kwargs)
    twins.step(2, without=("up",)).step(2)
    saved, weights = same_state_dicts(twins), twins.weights()
    twins.step(2)
    given = copy.deepcopy(saved)
    twins.set_weights(weights)
    twins.plain.load_state_dict(copy.deepcopy(saved))
    twins.offloaded.load_state_dict(given)
    for number, state in saved["state"].items():
        for name, value in state.items():
            assert same_value(given["state"][number][name], value), "the caller's dict has been changed"
    twins.assert_same()
    twins.step(2)
    from fsdp_offload import remove_offload

    remove_offload(twins.offloaded)
    twins.assert_same()
    twins.step(1)
    twins.assert_same()
