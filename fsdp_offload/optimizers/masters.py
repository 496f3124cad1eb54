"""Masters: higher-precision copies of low-precision parameters that an optimizer keeps as state, ``master_param``.

- A floating-point master of more precision than its parameter is saved. A master that a checkpoint lacks is rebuilt
  from the parameter. Weights that the user writes into the parameter win over the master.
- A master of the parameter's dtype is a duplicate that no kernel reads or updates: it is not saved, nor needed to load.
- An integer master (the lower bits) has no meaning without the exact parameter: it is never rebuilt.

Some optimizers keep masters themselves; ``add_masters`` gives others a class with :class:`WithMasters`. A step opens
the master of each bf16 or fp16 parameter, lets the plain class update it with an fp32 gradient and fp32 state, and
writes the parameter from it; other parameters are updated as they are. Offloaded, it is an elementwise optimizer whose
state has one more tensor.
"""

import functools
import importlib
import inspect
import itertools
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from ..fsdp.dtensor import local_shard, over_local
from ..fsdp.optim import unsupported_gradient
from ..state.layout import params_of
from .capabilities import Capabilities, Conventions
from .divided_step import DividedStep

logger = logging.getLogger(__name__)

MasterKind = Literal["remainder", "fp32"]  # what is kept: the lower 16 bits of a master in int16, or all of it
LOW_PRECISION = (torch.bfloat16, torch.float16)
MASTER = "master_param"  # also the name in the state of Transformer Engine's FusedAdam and in Megatron-LM
_OPEN_NUMEL = 1 << 26  # open together, about: a remainder takes 8 bytes for its open master and its gradient


def has_master(param: Tensor) -> bool:
    """Return whether ``param`` needs a master; parameters in fp32 and fp64 are their own."""
    return param.dtype in LOW_PRECISION


def can_rebuild(master_dtype: torch.dtype) -> bool:
    """Return whether a master of this dtype can be made from the parameter alone."""
    return master_dtype.is_floating_point


def let_weights_win(param: Tensor, master: Tensor) -> None:
    """Copy into ``master`` the elements of ``param`` that differ from the rounded master: the user has written them.

    A ``dcp.load`` into the parameters fires no hook, so every update begins with this check; without such writes it
    changes nothing. Both are local tensors on one device; temporaries take about twice ``master``'s bytes.
    """
    is_finer = master.dtype.is_floating_point and master.dtype.itemsize > param.dtype.itemsize
    if not (is_finer and param.dtype.is_floating_point and param.shape == master.shape):
        return
    written = param != master.to(param.dtype)
    master.copy_(torch.where(written, param.to(master.dtype), master))


def kept_dtype(kind: MasterKind, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of ``master_param``; raise a ValueError if ``param_dtype`` has no remainders."""
    if kind == "fp32":
        return torch.float32
    if param_dtype is not torch.bfloat16:
        raise ValueError(
            "masters of kind 'remainder' are for bf16, whose 16 bits are the upper ones of fp32, and a parameter is "
            f"{param_dtype}. Use add_masters(optimizer, 'fp32')."
        )
    return torch.int16


def new_master(kind: MasterKind, weights: Tensor) -> Tensor:
    """Return the kept part of a master that equals the local tensor ``weights``; dense."""
    kept = torch.empty_like(weights, dtype=kept_dtype(kind, weights.dtype))
    return kept.copy_(weights) if kind == "fp32" else kept.zero_()


def open_master(kind: MasterKind, weights: Tensor, kept: Tensor) -> Tensor:
    """Return the fp32 master for an update: ``kept`` itself (dense), or a tensor made from ``kept`` and the weights."""
    if kind == "fp32":
        let_weights_win(weights, kept)
        return kept
    lower = in_memory_order(kept)
    rounded = in_memory_order(torch.empty_like(kept).view(weights.dtype).copy_(weights)).view(torch.int16)
    borrowed = (lower < 0) & (rounded & 0x7FFF != 0)  # not for zeros, which only the user writes: they would become NaN
    halves = torch.stack((lower, rounded - borrowed.to(torch.int16)), dim=-1)
    return halves.view(torch.float32).as_strided(kept.shape, kept.stride())


def close_master(kind: MasterKind, master: Tensor, weights: Tensor, kept: Tensor) -> None:
    """Round ``weights`` from the updated ``master``, and store the rest in ``kept``.

    ``"fp32"`` rounds to nearest, ties to even. ``"remainder"`` is the format of Transformer Engine's
    ``store_param_remainders``: the parameter is the upper 16 bits, plus one if the lower 16, read as a signed number,
    are negative. So ties round away from zero, which can be undone.
    """
    if kind == "fp32":
        weights.copy_(master)
        return
    # The lower bits of a NaN may all be ones; rounding up would make it a number.
    master.masked_fill_(master.isnan(), torch.nan)
    halves = in_memory_order(master).view(torch.int16).view(-1, 2)
    lower, upper = halves[:, 0], halves[:, 1]
    in_memory_order(kept).copy_(lower)
    rounded = upper + (lower < 0)  # still int16
    weights.copy_(rounded.view(weights.dtype).as_strided(kept.shape, kept.stride()))


def in_memory_order(dense: Tensor) -> Tensor:
    """Return a flat view of a tensor without gaps, in the order of its memory."""
    return dense.as_strided((dense.numel(),), (1,))


# Optimizers with masters ----------------------------------------------------------------------------------------------


class WithMasters(Optimizer):
    """Mixin of :func:`class_with_masters` for an elementwise class, which may see local tensors of DTensors."""

    plain_class: type[Optimizer]  # whose arithmetic updates the masters
    master_kind: MasterKind  # the kept part of masters
    is_stepping = False  # True in this class's step; False in the plain class's step, captured before it had masters

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        widen_state(self)  # Adagrad makes state in its constructor

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update masters as the plain class updates parameters, and round the parameters from them.

        Raises:
            RuntimeError: a gradient has other placements than its parameter, or is sparse. Nothing has been changed.
            ValueError: ``"remainder"`` with an fp16 parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_gradient = [[param for param in group["params"] if param.grad is not None] for group in self.param_groups]
        for param in itertools.chain.from_iterable(with_gradient):
            if problem := unsupported_gradient(param, param.grad):
                raise RuntimeError(f"step() with masters: {problem}. Nothing has been changed.")
        with torch.no_grad():
            groups = zip(self.param_groups, with_gradient, strict=True)
            rests = [update_in_one_pass(self, self.plain_class, self.master_kind, *group) for group in groups]
            if not any(rests):
                return loss
            plain = DividedStep(self.plain_class, Capabilities(), self)
            for number, rest in enumerate(rests):
                ends = itertools.accumulate(local_shard(param).numel() for param in rest)
                opened = itertools.groupby(zip(rest, ends, strict=True), key=lambda pair: pair[1] // _OPEN_NUMEL)
                for _, some in opened:
                    _update_opened(self, plain, number, [param for param, _ in some])
            plain.commit(self)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as the plain class does, but keep fp32 state: torch casts state to the dtype of its parameter.

        State of an optimizer without masters is widened. fp32 masters that are missing are made from the parameters.

        Raises:
            ValueError: remainders are missing, or masters have another dtype. Nothing has changed.
        """
        loaded: dict[Tensor, dict[str, Tensor]] = {}
        nothing = torch.empty(0)  # replaces each tensor, of which torch would make a rounded copy

        def take(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            ids = (number for group in saved["param_groups"] for number in group["params"])
            state = dict(saved["state"])
            for number, param in zip(ids, params_of(self), strict=False):
                if has_master(param) and state.get(number):
                    tensors = {n: v for n, v in state[number].items() if isinstance(v, Tensor)}
                    wanted = kept_dtype(self.master_kind, param.dtype)
                    found = tensors[MASTER].dtype if MASTER in tensors else None
                    if found != wanted and (found is not None or not can_rebuild(wanted)):
                        raise ValueError(
                            f"load_state_dict: expected {MASTER!r} in {wanted}, as add_masters(optimizer, "
                            f"{self.master_kind!r}) keeps it, got {found}. The lower bits of a master cannot be made "
                            "from a parameter: load a state dict of the same kind."
                        )
                    state[number] = state[number] | {n: nothing for n, v in tensors.items() if v.dim()}
                    loaded[param] = {n: v for n, v in tensors.items() if n != "step"}  # torch keeps that as it is
            return {**saved, "state": state}

        def put(_: Optimizer) -> None:
            for param, tensors in loaded.items():
                _take_over(self, param, tensors)

        with (
            self.register_load_state_dict_pre_hook(take),  # behind the user's, which may rewrite what is loaded
            self.register_load_state_dict_post_hook(put, prepend=True),  # before those that look at the result
        ):
            super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: object) -> Any:
        return _remade, (self.plain_class, self.master_kind), self.__getstate__()


@functools.cache
def class_with_masters(cls: Any, kind: MasterKind) -> type[WithMasters]:
    """Return ``Master<Name>``, a subclass of ``cls``; the same class every time."""
    own = {"__module__": __name__, "__signature__": inspect.signature(cls), "plain_class": cls, "master_kind": kind}
    made: Any = types.new_class(f"Master{cls.__name__}", (WithMasters, cls), {}, lambda body: body.update(own))
    # torch.compile must not trace into the shadow. The step is wrapped for hooks, as torch's constructor does it.
    plain = torch.compiler.disable(WithMasters.step)
    hooked: Any = Optimizer.profile_hook_step(plain)

    def step(self: WithMasters, *args: Any, **kwargs: Any) -> Any:
        self.is_stepping = True
        try:
            return hooked(self, *args, **kwargs)
        finally:
            del self.is_stepping

    made.step = torch.compiler.disable(functools.wraps(hooked)(step))
    made.step.hooked, made.step.__wrapped__ = True, plain
    return made  # type: ignore[no-any-return]


def _remade(cls: Any, kind: MasterKind) -> WithMasters:
    return object.__new__(class_with_masters(cls, kind))


@torch.no_grad()
def widen_state(optimizer: WithMasters) -> None:
    """Give a master to each parameter with state, and widen that state to fp32, which is exact."""
    for group in optimizer.param_groups:
        first_sum = group.get("initial_accumulator_value")  # Adagrad makes state before its first step
        for param in filter(has_master, group["params"]):
            state = optimizer.state.get(param) or {}
            if state:
                narrow = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.dtype == param.dtype}
                _take_over(optimizer, param, narrow)
                if first_sum is not None and not state["step"]:
                    local_shard(optimizer.state[param]["sum"]).fill_(first_sum)  # the value before rounding


def _take_over(optimizer: WithMasters, param: Tensor, values: Mapping[str, Tensor]) -> None:
    """Store ``values`` in the state of ``param``, in fp32, and make a missing master."""
    state = optimizer.state[param]
    for name, value in values.items():
        state[name] = value.to(param.device, torch.float32 if value.is_floating_point() else value.dtype)
    if state and state.get(MASTER) is None:
        state[MASTER] = over_local(param, new_master(optimizer.master_kind, local_shard(param).detach()))


def _update_opened(optimizer: WithMasters, plain: DividedStep, number: int, params: Sequence[Tensor]) -> None:
    """Run the plain step on some parameters of group ``number``, with open masters in place of bf16 and fp16 ones."""
    kind, states = optimizer.master_kind, optimizer.state
    opened: dict[Tensor, tuple[Tensor, dict[str, Any]]] = {}  # updated tensor -> its parameter and local state
    for param in params:
        state = {n: local_shard(v) if isinstance(v, Tensor) else v for n, v in (states.get(param) or {}).items()}
        updated, grad = local_shard(param).detach(), local_shard(param.grad)  # type: ignore[arg-type]
        if has_master(param):
            if state.get(MASTER) is None:
                state[MASTER] = new_master(kind, updated)
            updated = open_master(kind, updated, state[MASTER]).detach()  # an alias: its gradient is dropped with it
            grad = grad.to(torch.float32)
        Conventions().hand_gradient(updated, grad)
        opened[updated] = (param, state)
    seen = {updated: {n: v for n, v in state.items() if n != MASTER} for updated, (_, state) in opened.items()}
    after = plain.run({number: list(opened)}, {updated: state for updated, state in seen.items() if state})
    for updated, (param, state) in opened.items():
        made = dict(after.get(updated, {}))
        if has_master(param):
            close_master(kind, updated, local_shard(param).detach(), state[MASTER])
            made[MASTER] = state[MASTER]
        before = states.get(param) or {}
        for name, value in made.items():
            if before.get(name) is None or value is not state.get(name):
                is_like = isinstance(value, Tensor) and value.dim() and value.shape == updated.shape
                states[param][name] = over_local(param, value) if is_like else value


def capabilities_with_masters(capabilities: Capabilities) -> Capabilities:
    """Return the capabilities of a class with masters, which updates low-precision parameters like fp32 ones."""
    conventions = Conventions()
    conventions.weights_win = True
    same = {torch.float32: (torch.float32, *LOW_PRECISION), torch.float64: (torch.float64,)}
    cuttable = frozenset((how, where, one) for how, where, of in capabilities.cuttable for one in same.get(of, ()))
    wrong_if_fused = capabilities.wrong_if_fused - set(LOW_PRECISION)
    return replace(capabilities, cuttable=cuttable, wrong_if_fused=wrong_if_fused, conventions=conventions)


# AdamW in one pass: weights, gradient, master and moments are read once and written once. -----------------------------
#
# Gives the same bits as open_master(), torch._fused_adamw_ and close_master() in sequence, which read and write the
# master three times and make temporaries of it. The arithmetic is that of torch's CUDA kernel as observed in 2.11
# (aten/src/ATen/native/cuda/fused_adam_utils.cuh; all of it in fp32, where fma rounds once):
#
#     p = fma(-(lr * wd), p, p)
#     m = fma(b1, m, fma(-b1, g, g))
#     v = fma(b2, v, fma(-b2, g * g, g * g))
#     p = p - (lr / c1 * m) / (sqrt(v) / sqrt(c2) + eps)        c1, c2 = 1 - pow(b1, step), 1 - pow(b2, step)
#
# torch does not promise this arithmetic, so each set of hyperparameters (with a fixed lr) is first tried against those
# three functions. If a bit differs, or without Triton, the three functions do the work.

_TRIED_NUMEL = 1 << 17
_KERNEL = f"{__package__}.masters_kernel"
_MOST_TRIALS = 32  # a schedule of betas or decay has new hyperparameters in every step


class AdamWStep(NamedTuple):
    """Hyperparameters of a param group: all on which the arithmetic depends, as in ``torch.optim.AdamW``."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class MasterRange(NamedTuple):
    """Contiguous local tensors of one range, of equal size and on one CUDA device."""

    weights: Tensor  # the parameter, bf16 or fp16
    grad: Tensor  # bf16, fp16 or fp32
    kept: Tensor  # the fp32 master, or the int16 remainders
    exp_avg: Tensor  # this and the next are fp32
    exp_avg_sq: Tensor
    step: Tensor  # fp32, 0-dim: steps made before this one


def update_in_one_pass(
    optimizer: Optimizer, cls: type[Optimizer], kind: MasterKind, group: Mapping[str, Any], params: Sequence[Tensor]
) -> list[Tensor]:
    """Update the ``params`` for which the kernel gives the same bits as ``cls`` on masters; return the others."""
    step, rest, steps = _asked_for(cls, group, vars(optimizer)), list[Tensor](), list[Tensor]()
    for param in params:
        state = optimizer.state.get(param) or {}
        values = [state.get(name) for name in (MASTER, "exp_avg", "exp_avg_sq", "step")]
        if step is not None and has_master(param) and all(isinstance(value, Tensor) for value in values):
            weights, *others = map(local_shard, (param, param.grad, *values))  # type: ignore[arg-type]
            part = MasterRange(weights.detach(), *others)
            unscheduled = step._replace(lr=1e-3)  # lr changes in every step, and only multiplies once
            formats = part.weights.dtype, part.grad.dtype, part.weights.device
            if _fits(kind, part) and is_exact(unscheduled, kind, *formats):
                update_master(step, kind, part)
                steps.append(part.step)
                continue
        rest.append(param)
    if steps:
        torch._foreach_add_(steps, 1)
    return rest


def _asked_for(cls: type[Optimizer], group: Mapping[str, Any], attributes: Mapping[str, Any]) -> AdamWStep | None:
    """Return the hyperparameters of a group if it asks for a plain fused AdamW step; otherwise ``None``.

    ``attributes``: the optimizer's, where GradScaler stores its scale. Subclasses of torch's classes do not count.
    """
    others = [group.get(flag) for flag in ("amsgrad", "maximize", "capturable", "differentiable")]
    scaled = any(attributes.get(name) is not None for name in ("grad_scale", "found_inf"))
    if cls not in (Adam, AdamW) or not group.get("fused") or any(others) or scaled:
        return None
    if group["weight_decay"] and not group.get("decoupled_weight_decay", cls is AdamW):
        return None
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return AdamWStep(*map(float, numbers)) if all(isinstance(number, int | float) for number in numbers) else None


def _fits(kind: MasterKind, part: MasterRange) -> bool:
    return (
        all(one.device.type == "cuda" and one.is_contiguous() and type(one) is Tensor for one in part)
        and all(one.dtype is torch.float32 for one in (part.exp_avg, part.exp_avg_sq, part.step))
        and part.grad.dtype in (torch.float32, *LOW_PRECISION)
        and part.kept.dtype is kept_dtype(kind, part.weights.dtype)
    )


def update_master(step: AdamWStep, kind: MasterKind, part: MasterRange) -> None:
    """Update weights, masters and moments in place, on the current stream; the step counter stays."""
    if part.weights.numel():
        with torch.cuda.device(part.weights.device):
            kernel_in(_KERNEL)(part, step, remainder=kind == "remainder")


@functools.cache
def is_exact(step: AdamWStep, kind: MasterKind, weights: torch.dtype, grad: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel gives the bits of the eager code on scratch tensors; blocks until they are compared."""
    if kernel_in(_KERNEL) is None or is_exact.cache_info().currsize >= _MOST_TRIALS:
        return False
    try:
        one, other = (_scratch(kind, weights, grad, device) for _ in range(2))
        for _ in range(3):
            update_master(step, kind, one)
            _eager(step, kind, other)
            for part in (one, other):
                part.step.add_(1)
        same = all(map(same_bits, one, other))
        reason = f"this torch's AdamW rounds differently ({step})"
    except Exception as error:  # noqa: BLE001  # any failure of Triton: the eager code works without it
        same, reason = False, f"{type(error).__name__}: {error}"
    if not same:
        logger.info("masters are updated without a kernel of our own: %s", reason)
    return same


def _scratch(kind: MasterKind, weights: torch.dtype, grad: torch.dtype, device: torch.device) -> MasterRange:
    """Return test values of all magnitudes, with infinities and NaN."""
    generator = torch.Generator(device).manual_seed(0)
    normal = functools.partial(torch.randn, _TRIED_NUMEL, device=device, generator=generator)
    gradient = normal() * torch.exp(3 * normal())
    gradient[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0], device=device)
    master = normal()
    master[4:8] = torch.tensor([0.0, -0.0, 0.0, -0.0], device=device)  # as a user may write weights
    kept = torch.randint(-(1 << 15), 1 << 15, (_TRIED_NUMEL,), device=device, generator=generator).to(torch.int16)
    kept[4:6] = -1
    return MasterRange(
        master.to(weights),
        gradient.to(grad),
        master if kind == "fp32" else kept,
        normal() * 0.1,
        normal().square() * 0.1,
        torch.full((), 2.0, device=device),
    )


def _eager(step: AdamWStep, kind: MasterKind, part: MasterRange) -> None:
    master = open_master(kind, part.weights, part.kept)
    tensors = [[master], [part.grad.to(torch.float32)], [part.exp_avg], [part.exp_avg_sq], [], [part.step + 1]]
    torch._fused_adamw_(*tensors, **step._asdict(), amsgrad=False, maximize=False)
    close_master(kind, master, part.weights, part.kept)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@functools.cache
def kernel_in(module: str) -> Any:
    """Return the launcher of ``module``'s Triton kernel; ``None`` without Triton. Imported on use, as that is slow."""
    try:
        return importlib.import_module(module).launch
    except ImportError:
        return None
