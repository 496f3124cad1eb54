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
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, remove_offload
from tests.parity import Pair, Run, attach, group_differences, leaves, local, params_of, same_bits, same_value

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


class FusedPair(Pair):
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
        runs = []
        for _ in range(2):
            torch.manual_seed(0)
            model = build().to(device)
            optimizer = make(groups_of(model), lr=0.02, weight_decay=0.1, **kwargs)
            runs.append(Run(model, optimizer, torch.device(device), BF16))
        super().__init__(*runs)
        self.step(late)
        attach(runs[1].optimizer, model=runs[1].model, **({} if policy is None else {"policy": policy}))

    def give_gradients(self, without: tuple[str, ...] = ()) -> None:
        """The same on both sides; none for frozen parameters, nor for those whose name begins so."""
        for run in self:
            generator = torch.Generator().manual_seed(self.steps)
            for name, param in run.params.items():
                grad: Tensor | None = torch.randn(param.shape, generator=generator)
                grad = grad.to(param.device, FP32 if self.decoupled else param.dtype)
                if isinstance(param, DTensor):
                    grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
                if not param.requires_grad or name.startswith(without or ("?",)):
                    grad = None
                setattr(param, "decoupled_grad" if self.decoupled else "grad", grad)

    def step(self, count: int = 1, without: tuple[str, ...] = ()) -> "FusedPair":
        for _ in range(count):
            self.give_gradients(without)
            for run in self:
                run.optimizer.step()
            self.steps += 1
            if self.offloaded.is_offloaded:
                self.assert_same()
        return self

    def differences(self) -> Iterator[str]:
        """Also of what FusedAdam keeps elsewhere, and without masters that nobody reads."""
        yield from group_differences(self.plain.optimizer, self.offloaded.optimizer)
        for (name, one), other in zip(self.plain.params.items(), self.offloaded.params.values(), strict=True):
            both = [(run.optimizer, param) for run, param in zip(self, (one, other), strict=True)]
            mine, others = (read_of(optimizer.state.get(param, {}), param) for optimizer, param in both)
            if list(mine) != list(others):
                yield f"state of {name}: {list(mine)} and {list(others)}"
            if "master_param" in self.offloaded.optimizer.state.get(other, {}) and other.dtype is FP32:
                yield f"{name} has a master that nobody reads"
            values = {"the parameter": (one.detach(), other.detach())}
            values |= {key: (value, others[key]) for key, value in mine.items() if key in others}
            yield from (f"{key} of {name}" for key, two in values.items() if not same_content(*two))
            scales = [{k: v for k, v in opt._scales.get(p, {}).items() if k in mine} for opt, p in both]  # type: ignore[attr-defined]
            if not same_value(*scales):
                yield f"scales of {name}"


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, the rest without weight decay, and a group without parameters."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
        {"params": []},
    ]


def read_of(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
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


def same_state_dicts(pair: FusedPair) -> dict[str, Any]:
    """The plain side's, after comparing the two."""
    plain, offloaded = (run.optimizer.state_dict() for run in pair)
    params = params_of(pair.plain.optimizer)
    assert plain["state"].keys() == offloaded["state"].keys()
    for number, state in plain["state"].items():
        expected, found = read_of(state, params[number]), offloaded["state"][number]
        assert list(expected) == list(found)
        assert all(same_value(value, found[name]) for name, value in expected.items()), number
    return copy.deepcopy(plain)


def check_options(make: Callable[..., Optimizer], kwargs: dict[str, Any], device: str = "cpu") -> None:
    """Steps, parameters whose gradient comes late, state dicts, a load, and removing."""
    pair = FusedPair(make, device=device, **kwargs)
    pair.step(2, without=("up",)).step(2)
    saved, weights = same_state_dicts(pair), copy.deepcopy(pair.plain.model.state_dict())
    pair.step(2)
    for run in pair:
        run.model.load_state_dict(weights)
        given = copy.deepcopy(saved)
        run.optimizer.load_state_dict(given)
    for number, state in saved["state"].items():
        assert all(same_value(given["state"][number][n], v) for n, v in state.items()), "the caller's has been changed"
    pair.assert_same()
    pair.step(2)
    remove_offload(pair.offloaded.optimizer)
    pair.assert_same()
    pair.step(1)
    pair.assert_same()
