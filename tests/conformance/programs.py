"""What loops do, habit by habit, and random programs of them: drawn and shrunk by hypothesis, always legal."""

import copy
import math
from collections.abc import Callable, Mapping
from inspect import isfunction, signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_offload.core.room import Reading
from fsdp_offload.engine.engine import engine_of
from tests.conformance.axes import Case, legal
from tests.conformance.oracle import ALWAYS, NEVER, PHASES, Loop, clip_by, usual, whole
from tests.parity import leaves, local, turn_amsgrad_on

Habit = Callable[[Loop, int], None]

LOOKS: list[Callable[[Any], torch.Tensor]] = [
    lambda grad: grad.to_local(),
    lambda grad: grad._local_tensor,
    lambda grad: grad.full_tensor(),
    lambda grad: grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim).to_local(),
    lambda grad: torch.tensor([ord(letter) for letter in repr(grad)]),
]
"""Ways to look at a gradient, also past torch's functions."""


def evaluate(loop: Loop, at: int) -> None:
    usual(loop, at)
    loop.look()


def evaluate_before_step(loop: Loop, at: int) -> None:
    loop.backward(at)
    loop.look()
    loop.step()


def infer(loop: Loop, at: int) -> None:
    """Several forwards in inference mode, one without a part."""
    usual(loop, at)
    loop.model.eval()
    with torch.inference_mode():
        for extra in (True, False):
            loop.seen.append(loop.model(loop.batch(900), extra=extra).item())
    loop.model.train()


def forward_without_backward(loop: Loop, at: int) -> None:
    loop.seen.append(loop.model(loop.batch(at + 70)).item())
    usual(loop, at)


def two_forwards(loop: Loop, at: int) -> None:
    (loop.model(loop.batch(at)) + loop.model(loop.batch(at + 30))).backward()
    for micro in range(1, loop.case.micro):
        loop.model(loop.batch(at + micro)).backward()
    loop.step()


def telling_the_last(loop: Loop, at: int, tell: Callable[[bool], None]) -> None:
    """Micro-batches; ``tell`` is told whether it is the last."""
    for micro in range(loop.case.micro):
        tell(micro == loop.case.micro - 1)
        loss = loop.model(loop.batch(10 * at + micro))
        loss.backward()
        loop.seen.append(loss.item())
        loop.nap()
    loop.step()


def unreduced(loop: Loop, at: int) -> None:
    """Gradients are reduced with the last micro-batch."""
    telling_the_last(loop, at, loop.model.set_requires_gradient_sync)


def keep_gathered(loop: Loop, at: int) -> None:
    """Parameters stay gathered between micro-batches."""
    telling_the_last(loop, at, loop.model.set_reshard_after_backward)


def unshard_by_hand(loop: Loop, at: int) -> None:
    groups = [module for module in loop.model.modules() if isinstance(module, FSDPModule)][1:]
    for group in groups:
        group.unshard()
    for group in groups if at % 2 else ():
        group.reshard()
    usual(loop, at)


def phases_in_backward(loop: Loop, at: int) -> None:
    """One after the other, or in part; in the middle of the backward, or between it and the step."""
    chosen = (*PHASES, *PHASES)[at % 3 : at % 3 + at % 5]
    in_backward = chosen if at % 2 else ()
    handle = loop.model.blocks[2].register_full_backward_pre_hook(lambda *_: loop.phase(*in_backward))
    loop.backward(at)
    handle.remove()
    loop.phase(*chosen[len(in_backward) :])
    loop.step()


# Between the backward and the step ----------------------------------------------------------------------------------


def gradients(loop: Loop) -> list[torch.Tensor]:
    return [param.grad for param in loop.params if param.grad is not None]


def has_empty_shard(param: torch.nn.Parameter) -> bool:
    """Return whether some rank has nothing of ``param``: there, torch's function refuses the largest element."""
    if not isinstance(param, DTensor):
        return not param.numel()
    cuts = zip(param.placements, param.device_mesh.shape, strict=True)
    sizes = [(param.shape[placement.dim], parts) for placement, parts in cuts if isinstance(placement, Shard)]
    return any(-(-size // parts) * (parts - 1) >= size for size, parts in sizes)


def clip_otherwise(loop: Loop, at: int) -> None:
    """By other norms, one by one, twice, in parts with norms of their own, and by a norm that is put together."""
    loop.backward(at)
    limit, params = ALWAYS if at % 2 else NEVER, loop.params
    if at % 6 == 0:
        loop.clip(limit, foreach=False)
    elif at % 6 == 1:
        loop.clip(0.01, norm_type=1.0 if any(map(has_empty_shard, params)) else math.inf)
    elif at % 6 == 2:
        loop.clip(0.05 * at)  # which is among the norms of these gradients
    elif at % 6 == 3:
        loop.clip(NEVER)
        loop.clip(limit)
    else:
        for part in (params[::2], params[1::2]) if at % 6 == 4 else (params,):
            loop.seen.append(clip_by(limit, part, together=at % 6 == 4))
    loop.step()


def look_at_gradients(loop: Loop, at: int) -> None:
    """Before and after clipping, or only after it; also past torch's functions."""
    loop.backward(at)
    for looks in (at % 2, True):
        for number, grad in enumerate(gradients(loop) if looks else ()):
            look = LOOKS[(at + number) % len(LOOKS)] if isinstance(grad, DTensor) else whole
            loop.seen.append(look(grad).double().sum().item())
        loop.clip()
    loop.step()


def scale_gradients(loop: Loop, at: int) -> None:
    """After clipping; some of these ways count no version."""
    loop.backward(at)
    loop.clip()
    grads = gradients(loop)
    if at % 5 == 0:
        again = grads[:2] if loop.device.type == "cpu" else []  # a GPU's kernel would multiply both at once
        torch._foreach_mul_([*grads, *again], 0.3)
    elif at % 5 == 4:
        for grad in grads:
            grad.clamp_(-0.01, 0.01)  # as who clips by value
    else:
        for grad in grads[at % 3 :: 2]:
            {1: grad, 2: local(grad), 3: getattr(grad, "_local_tensor", grad).data}[at % 5].mul_(0.5)
    loop.step()


def exchange_gradients(loop: Loop, at: int) -> None:
    """One is taken away or is another, or all of another backward come on top."""
    loop.backward(at)
    param = loop.params[at % 4]
    if at % 3 == 0:
        param.grad = None
    elif at % 3 == 1 and param.grad is not None:
        param.grad = param.grad * 2
    else:
        loop.backward(at + 50)
    loop.step()


def look_at_parameters(loop: Loop, at: int) -> None:
    """As adaptive clipping, averages and logs do; and in an evaluation behind the clipping."""
    loop.backward(at)
    if loop.case.overlap == "forward" or at % 2:
        loop.synchronize()
    # The largest element is the same number on the host and on the device; a sum is not.
    ways = (
        lambda param: torch.norm(param, math.inf),
        lambda param: param.detach().clone(),
        lambda param: param.data,
        lambda param: getattr(param, "_local_tensor", param),  # as others read it, and not past what is watched
        whole,
    )
    values = [ways[at % len(ways)](param) for param in loop.params]
    loop.seen += [local(value.detach()).double().sum().item() for value in values]
    loop.clip()
    loop.look()
    loop.step()


def write_between(loop: Loop, at: int) -> None:
    """Weights; some of these ways count no version."""
    loop.finish_saving()  # nobody would hear of a checkpoint that has some of the new values
    loop.backward(at)
    loop.clip()
    if loop.case.overlap == "forward":
        loop.synchronize()
    params = [param.detach() for param in loop.params]
    if at % 3 == 0:
        torch._foreach_mul_(params, 0.875)  # in bf16, the CPU's rounds a factor first, and the device's does not
    for param in params if at % 3 else ():
        (param.data if at % 3 == 1 else local(param).data).mul_(0.9)
    loop.step()


def read_between(loop: Loop, at: int) -> None:
    """Parameters, state and counters are those from before the step."""
    loop.backward(at)
    loop.clip()
    copied = loop.copy()["model"].values()
    loop.seen += [local(value).double().sum().item() for value in copied]
    see_state(loop)
    loop.step()


def load_between(loop: Loop, at: int) -> None:
    saved = loop.kept.setdefault("before", loop.copy())
    loop.backward(at)
    loop.clip()
    loop.restore(saved)
    loop.step()


# The step, and behind it ---------------------------------------------------------------------------------------------


def short_backward(loop: Loop, at: int) -> None:
    """From here on, the backward is too short for the link, so that some updates wait for the step; or no longer."""
    engine = engine_of(loop.optimizer)
    if engine is not None and engine.core.reductions.chooses:
        rank = dist.get_rank() if dist.is_initialized() else 0
        engine.core.reductions.choose_later(engine.core.buckets, Reading(0.0, 1.0, link_ms=0.5 + (at + rank) % 3))
    usual(loop, at)


def unused(loop: Loop, at: int) -> None:
    loop.backward(at, extra=False)
    loop.step()


def skip(loop: Loop, at: int) -> None:
    """By the optimizer's function, by the model's, or where the norm is not finite."""
    if at % 3 == 2:
        (loop.model(loop.batch(at)) * math.inf).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            loop.clip(NEVER, error_if_nonfinite=True)
    else:
        loop.backward(at)
    if at % 3 == 1:
        loop.model.zero_grad()
    else:
        if at % 3 == 0:
            loop.clip()
        loop.clear()


def step_twice(loop: Loop, at: int) -> None:
    loop.backward(at)
    loop.clip()
    loop.update()
    loop.synchronize()  # as whoever touches gradients has to: they are clipped once more
    loop.step()


def zero_in_place(loop: Loop, at: int) -> None:
    """By the optimizer, or by the model, which also clears."""
    loop.backward(at)
    loop.clip()
    loop.update()
    if at % 3 == 0:
        loop.clear(set_to_none=False)
    else:
        loop.synchronize()  # as whoever touches gradients has to
        loop.model.zero_grad(set_to_none=at % 3 == 1)


def scaler(loop: Loop, at: int) -> None:
    """GradScaler, which finds ``inf`` in every third step and leaves it out. Without clipping, ``step()`` unscales."""
    scale = loop.kept.setdefault("scaler", torch.amp.GradScaler(loop.device.type, init_scale=4.0))
    for micro in range(loop.case.micro):
        loss = loop.model(loop.batch(10 * at + micro))
        scale.scale(loss * (math.inf if at % 3 == 0 else 1.0)).backward()
    optimizer = loop.scaled()
    if loop.case.clip != "never" or loop.case.optimizer == "fused-adam":  # which would be given the scaler itself
        scale.unscale_(optimizer)
        loop.clip()
    scale.step(optimizer)
    scale.update()
    loop.clear()


def closure(loop: Loop, at: int) -> None:
    def evaluate_again() -> torch.Tensor:
        loop.clear()
        loop.backward(at)
        return torch.tensor(loop.seen[-1])

    loop.seen.append(float(loop.update(evaluate_again)))
    loop.clear()


def see_state(loop: Loop) -> None:
    for name in loop.named:
        for value in loop.state_of(name).values():
            if isinstance(value, torch.Tensor):
                loop.seen += [leaf.double().cpu().sum().item() for leaf in leaves(value) if leaf.numel()]


def read_state(loop: Loop, at: int) -> None:
    usual(loop, at)
    see_state(loop)


def write_state(loop: Loop, at: int) -> None:
    """Between the backward and the step, when loads may have begun; torch counts no such writes into DTensors."""
    loop.finish_saving()  # a checkpoint that is being written would have some of the new values
    loop.backward(at)
    values = [
        value
        for name in list(loop.named)[at % 3 :: 3]
        for key, value in loop.state_of(name).items()
        if isinstance(value, torch.Tensor) and value.dim() and key != "master_param"
    ]
    if at % 2 and values:
        torch._foreach_mul_(values, 0.5)
    for value in values if at % 2 == 0 else ():
        local(value).mul_(0.5)
    loop.step()


def replace_state(loop: Loop, at: int) -> None:
    """Other tensors in the place of some; and one parameter begins anew."""
    names = list(loop.named)
    for name in names[at % 3 :: 3]:
        state = loop.live_state(name)
        for key, value in list(state.items()):
            if isinstance(value, torch.Tensor) and value.dim() and key != "master_param":
                state[key] = value * 0.5
    if loop.case.masters == "none":
        loop.live_state(names[at % len(names)]).clear()
    usual(loop, at)


def delete_between(loop: Loop, at: int) -> None:
    """State of a parameter, or of all, in each way that a dict has: they begin anew."""
    loop.finish_saving()
    loop.backward(at)
    state, param = loop.optimizer.state, loop.params[at % 4]
    if at % 6 == 0:
        state.clear()
    elif at % 6 == 1:
        state[param] = {}
    elif at % 6 == 2:
        state.pop(param, None)
    elif at % 6 == 3:
        state.update({param: {}})
    elif at % 6 == 4:
        state |= {param: {}}
    elif param in state:
        del state[param]
    loop.step()


def begin_anew(loop: Loop, at: int) -> None:
    """Some parameters, or all, have no state before the backward; others may be held."""
    loop.finish_saving()
    state, params = loop.optimizer.state, loop.params[at % 3 :: 1 + at % 2]
    loop.kept["held"] = [dict(state[param]) for param in loop.params[:: 2 + at % 3] if param in state]
    if at % 4 == 0:
        state.clear()
    for param in params if at % 4 else ():
        state.pop(param, None)
    usual(loop, at)


def set_aside(loop: Loop, at: int) -> None:
    """State of some parameters begins anew for one step; then that of before is put back."""
    loop.finish_saving()
    state, params = loop.optimizer.state, loop.params[at % 2 :: 2]
    kept = {param: state.pop(param) for param in params if param in state}
    usual(loop, at)
    loop.finish_saving()
    for param, entry in kept.items():
        state[param] = entry
    usual(loop, at + 1)


def load_over_held(loop: Loop, at: int) -> None:
    """Tensors of the state that are held stay what they were when other state is loaded."""
    saved = loop.copy()
    usual(loop, at)
    loop.finish_saving()
    states = [loop.state_of(name) for name in loop.named]
    held = [
        one for state in states for key, one in state.items() if key != "master_param" and isinstance(one, torch.Tensor)
    ]
    loop.restore(saved)
    usual(loop, at + 60)
    loop.seen += [leaf.double().cpu().sum().item() for one in held for leaf in leaves(one) if leaf.numel()]


def ask_for_more(loop: Loop, at: int) -> None:
    """Adam keeps another moment from now on; tensors that are held before stay state, and writes into them count."""
    usual(loop, at)
    loop.finish_saving()
    is_adam = "amsgrad" in loop.optimizer.param_groups[0]
    states = [state for name in loop.named if is_adam and (state := loop.live_state(name)).keys() >= {"exp_avg_sq"}]
    held = [state["exp_avg"] for state in states]
    if is_adam:
        turn_amsgrad_on(loop.optimizer, states)
    usual(loop, at + 1)
    loop.finish_saving()
    for value in held:
        local(value).mul_(0.5)
    usual(loop, at + 2)
    loop.seen += [leaf.double().cpu().sum().item() for one in held for leaf in leaves(one) if leaf.numel()]


def reattach(loop: Loop, at: int) -> None:
    """With a plain step in between."""
    loop.finish_saving()
    loop.remove()
    usual(loop, at)
    loop.attach_again()


def write_group(loop: Loop, at: int) -> None:
    """Between the backward and the step."""
    loop.backward(at)
    loop.optimizer.param_groups[0]["weight_decay"] = 0.01 * (at % 3)
    loop.step()


def write_parameters(loop: Loop, at: int) -> None:
    usual(loop, at)
    loop.synchronize()
    loop.finish_saving()
    for number, param in enumerate(loop.params):
        if number % 3 == 0:
            param.detach().mul_(0.99)
        elif number % 3 == 1:
            param.data.copy_(param.data * 1.01)
        else:
            local(param.detach()).mul_(0.99)


def read_parameters(loop: Loop, at: int) -> None:
    """In every way that hands out their values."""
    usual(loop, at)
    loop.synchronize()
    for param in loop.params:
        for value in (param, param.detach(), param.data, copy.deepcopy(param)):
            loop.seen += [one.detach().double().sum().item() for one in (local(value), whole(value))]


def average(loop: Loop, at: int) -> None:
    """A mean of the parameters, that is evaluated with."""
    usual(loop, at)
    loop.synchronize()
    params = [param.detach() for param in loop.params]
    mean = loop.kept.setdefault("mean", [param.clone() for param in params])
    torch._foreach_lerp_(mean, params, 0.3)
    loop.seen += [local(one).double().sum().item() for one in mean]


def freeze(loop: Loop, at: int) -> None:
    """For one step."""
    names = list(loop.named)[at % 4 :: 4]
    for name in names:
        loop.named[name].requires_grad_(False)
    usual(loop, at)
    for name in names:
        loop.named[name].requires_grad_(True)


HABITS: dict[str, Habit] = {
    name.replace("_", "-"): function
    for name, function in list(vars().items())
    if isfunction(function) and [*signature(function).parameters] == ["loop", "at"]
}
"""All of the above that are called so."""


@st.composite
def programs(draw: st.DrawFn, axes: Mapping[str, tuple[Any, ...]], lead: int = 2) -> Case:
    """A case with a program of up to ten habits after ``lead`` usual steps."""
    chosen = {axis: draw(st.sampled_from(values)) for axis, values in axes.items()}
    drawn = draw(st.lists(st.sampled_from(list(HABITS)), min_size=3, max_size=10))
    case = legal(Case(**chosen, program=("usual",) * lead + tuple(drawn)), axes)
    assert case is not None, "every rule says what to change"
    return case
