"""The Python contract of Transformer Engine's FusedAdam (2.20), without its kernels: for tests on the CPU.

Which state there is and in which dtype, scales beside it, the counter of the group, gradients in ``decoupled_grad``,
remainders of masters, and state dicts in fp32. The arithmetic is Adam's, in fp32.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.parity import local

HALF_RANGE = torch.finfo(torch.float16).max / 2.0


class FusedAdam(Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        rate = torch.tensor(lr, dtype=torch.float32) if capturable else lr
        super().__init__(params, {"lr": rate, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.capturable = capturable
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.set_grad_none = set_grad_none
        self.store_param_remainders = store_param_remainders and master_weight_dtype is torch.float32
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)
        self._scales: dict[Tensor, dict[str, Tensor]] = {}
        if capturable:
            self._step_supports_amp_scaling = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.set_grad_none is False and not self.use_decoupled_grad:
            super().zero_grad(set_to_none=False)
            return
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if self.use_decoupled_grad:
                param.decoupled_grad = None
            else:
                param.grad = None

    # State -------------------------------------------------------------------------------------------------------

    def _has_remainder(self, param: Tensor, name: str = "master_param") -> bool:
        return self.store_param_remainders and name == "master_param" and param.dtype is torch.bfloat16

    def _initialize_state(self, param: Tensor, name: str) -> None:
        dtype = torch.int16 if self._has_remainder(param, name) else self.name_to_dtype_map[name]
        self.state[param][name] = sharded_like(param, torch.zeros_like(local(param), dtype=dtype))
        if self.name_to_dtype_map[name] is not torch.float32:
            self._scales.setdefault(param, {})[name] = torch.ones(1)

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        assert store_param_remainders == self._has_remainder(param)
        self._initialize_state(param, "exp_avg")
        self._initialize_state(param, "exp_avg_sq")
        if self.master_weights:
            self._initialize_state(param, "master_param")
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", local(param).clone().detach().float())

    def _apply_scale(self, unscaled: Tensor, scaled: Tensor, scale: Tensor) -> None:
        if scaled.dtype is torch.bfloat16:
            scaled.copy_(unscaled.bfloat16())
            return
        low, high = torch.aminmax(unscaled)
        torch.div(torch.maximum(-low, high), torch.full([1], HALF_RANGE), out=scale)
        scaled.copy_(unscaled.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0)))  # in place, as the real one does

    def set_scaled_state(self, param: Tensor, name: str, unscaled: Tensor) -> None:
        assert unscaled.dtype is (torch.int16 if self._has_remainder(param, name) else torch.float32)
        if name not in self.state[param]:
            self._initialize_state(param, name)
        value = local(self.state[param][name])
        if self.name_to_dtype_map[name] is torch.float32:
            value.copy_(unscaled)
        else:
            self._apply_scale(unscaled, value, self._scales[param][name])

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        value = local(self.state[param][name])
        assert value.dtype is (torch.int16 if self._has_remainder(param, name) else self.name_to_dtype_map[name])
        if value.dtype is torch.float16:
            return value.float().mul_(self._scales[param][name])
        return value.float() if value.dtype is torch.bfloat16 else value

    # State dicts -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        for number, state in saved["state"].items():
            param = params[number]
            saved["state"][number] = {n: sharded_like(param, self.get_unscaled_state(param, n)) for n in state}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        for number, state in state_dict["state"].items():
            param = params[number]
            self.state[param] = {}
            for name, value in state.items():
                value = local(value)
                self.set_scaled_state(param, name, value if self._has_remainder(param, name) else value.float())

    # The step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if "step" in group:
                group["step"] += (self._dummy_overflow_buf != 1).to(torch.int) if self.capturable else 1
            else:
                group["step"] = torch.tensor([1], dtype=torch.int) if self.capturable else 1
            if not group["params"]:
                continue
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self._has_remainder(param))
            inverse_scale = torch.ones(())
            if self.capturable:
                found = torch.zeros(1)
                if grad_scaler is not None:
                    found = grad_scaler._check_inf_per_device(self)[torch.device("cpu")]
                    inverse_scale = grad_scaler._get_scale_async().double().reciprocal().float()
                self._dummy_overflow_buf.copy_(found)
                if found.item():
                    continue
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._update(param, local(grad).float() * inverse_scale, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        for value in self.state[param].values():
            assert isinstance(value, DTensor) == isinstance(param, DTensor)
        names = [name for name in ("exp_avg", "exp_avg_sq", "master_param") if name in self.state[param]]
        unscaled = {name: self.get_unscaled_state(param, name) for name in names}
        weights = local(param.detach())
        low_precision = weights.dtype is not torch.float32
        target = weights.float() if low_precision else weights
        if low_precision and self.master_weights:
            target = unscaled["master_param"]
            if self._has_remainder(param):
                target = join(weights, target)
        self._adam(target, grad, unscaled["exp_avg"], unscaled["exp_avg_sq"], group)
        if low_precision and self._has_remainder(param):
            split(target, weights, unscaled["master_param"])
        elif low_precision:
            weights.copy_(target)
        for name in names:
            if self.name_to_dtype_map[name] is not torch.float32:
                self._apply_scale(unscaled[name], local(self.state[param][name]), self._scales[param][name])

    @staticmethod
    def _adam(target: Tensor, grad: Tensor, first: Tensor, second: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = float(group["step"])
        denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        change = first / (1 - beta1**step) / denominator + group["weight_decay"] * target
        target.sub_(change * float(group["lr"]))


def sharded_like(param: Tensor, value: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return value
    return DTensor.from_local(value, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())


def join(weights: Tensor, remainder: Tensor) -> Tensor:
    upper = weights.view(torch.int16).int() - (remainder < 0).int()
    return ((upper << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def split(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    bits = master.view(torch.int32)
    remainder.copy_(bits.to(torch.int16))
    weights.copy_(((bits >> 16) + (remainder < 0).int()).to(torch.int16).view(torch.bfloat16))


FusedAdam.__module__ = "transformer_engine.reference"  # the library knows FusedAdam by its name and its package
