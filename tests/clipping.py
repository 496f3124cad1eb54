"""Operations of random programs: what a loop may do between the backward and ``step()``, clipping above all."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from fsdp_offload import OffloadPolicy, clip_grad_norm_, is_offloaded
from fsdp_offload.core.engine import engine_of
from fsdp_offload.core.guesses import Guesses
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.overlapping import Loop, look, policy_of
from tests.parity import leaves

NEVER, ALWAYS = 1e9, 1e-3
"""Norms to clip by: beyond reach, and below every gradient."""

Operation = Callable[[Loop, int], None]


def guesses_of(loop: Loop) -> Guesses:
    engine = engine_of(loop.optimizer)
    assert engine is not None
    return engine.guesses


def clip(loop: Loop, max_norm: float, **options: Any) -> None:
    """By our function where the optimizer is offloaded; as torch's own does in plain training."""
    optimizers = [loop.optimizer, *filter(None, [getattr(loop, "second", None)])]
    if is_offloaded(loop.optimizer):
        norm = clip_grad_norm_(optimizers, max_norm, **options)
    else:
        norm = nn.utils.clip_grad_norm_(loop.params, max_norm, **options)
    loop.seen.append(getattr(norm, "full_tensor", lambda: norm)().item())


def clipped_step(loop: Loop, at: int, max_norm: float, **options: Any) -> None:
    loop.backward(at)
    clip(loop, max_norm, **options)
    loop.step()


def train(loop: Loop, limits: list[float], **options: Any) -> Loop:
    for at, max_norm in enumerate(limits):
        clipped_step(loop, at, max_norm, **options)
    return loop


def clipping(**more: Any) -> OffloadPolicy:
    """With updates in the backward."""
    return policy_of({"overlap": "iteration"}, **more)


def within_bounds(loop: Loop, at: int) -> None:
    clipped_step(loop, at, NEVER)


def clipped(loop: Loop, at: int) -> None:
    clipped_step(loop, at, ALWAYS)


def now_and_then(loop: Loop, at: int) -> None:
    """By a norm that is among those of these gradients."""
    clipped_step(loop, at, 0.05 * (1 + at % 5))


def one_by_one(loop: Loop, at: int) -> None:
    clipped_step(loop, at, ALWAYS if at % 3 == 0 else NEVER, foreach=False)


def by_the_largest(loop: Loop, at: int) -> None:
    clipped_step(loop, at, 0.01 if at % 3 == 0 else NEVER, norm_type=math.inf)


def unclipped(loop: Loop, at: int) -> None:
    loop.backward(at)
    loop.step()


def twice(loop: Loop, at: int) -> None:
    loop.backward(at)
    clip(loop, NEVER)
    clip(loop, ALWAYS if at % 2 else NEVER)
    loop.step()


def in_two_parts(loop: Loop, at: int) -> None:
    """Each with a norm of its own, one of which may bind."""
    loop.backward(at)
    params = list(loop.model.parameters())
    for part, max_norm in ((params[::2], NEVER), (params[1::2], ALWAYS if at % 2 else NEVER)):
        loop.seen.append(nn.utils.clip_grad_norm_(part, max_norm).full_tensor().item())
    loop.step()


def norm_in_parts(loop: Loop, at: int) -> None:
    """As torchtitan does it."""
    loop.backward(at)
    params = list(loop.model.parameters())
    total = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    total = total.full_tensor()
    loop.seen.append(total.item())
    nn.utils.clip_grads_with_norm_(params, ALWAYS if at % 3 == 0 else NEVER, total)
    loop.step()


def scaled_by_hand(loop: Loop, at: int) -> None:
    loop.backward(at)
    for param in loop.model.parameters():
        if param.grad is not None:
            param.grad *= 1.0 if at % 2 else 0.5
    loop.step()


def scaled_locally(loop: Loop, at: int) -> None:
    """Past the DTensors, where a product with 0.3 comes after that of the clipping."""
    loop.backward(at)
    clip(loop, NEVER if at % 4 else ALWAYS)
    for param in list(loop.model.parameters())[at % 3 :: 4]:
        if param.grad is not None:
            param.grad.to_local().mul_(0.3)
    loop.step()


def scaled_uncounted(loop: Loop, at: int) -> None:
    """In a way that counts no version."""
    loop.backward(at)
    clip(loop, NEVER)
    for param in list(loop.model.parameters())[at % 3 :: 4]:
        if param.grad is not None:
            param.grad.to_local().data.mul_(0.5)
    loop.step()


def scaled_twice_at_once(loop: Loop, at: int) -> None:
    """A gradient that is in the list twice."""
    loop.backward(at)
    grads = [param.grad for param in loop.model.parameters() if param.grad is not None]
    torch._foreach_mul_([*grads, *grads[:2]], torch.tensor(0.3))
    loop.step()


def logged(loop: Loop, at: int) -> None:
    """Gradients are looked at before and after."""
    loop.backward(at)
    loop.seen += [float(param.grad.norm().full_tensor()) for param in loop.model.parameters() if param.grad is not None]
    clip(loop, ALWAYS if at % 4 == 0 else NEVER)
    loop.seen += [float(param.grad.norm().full_tensor()) for param in loop.model.parameters() if param.grad is not None]
    loop.step()


LOOKS: list[Callable[[Any], Tensor]] = [
    lambda grad: grad.to_local(),
    lambda grad: grad._local_tensor,
    lambda grad: grad.full_tensor(),
    lambda grad: grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim).to_local(),
    lambda grad: torch.tensor([ord(letter) for letter in repr(grad)]),
]


def logged_past_torch_functions(loop: Loop, at: int) -> None:
    """What is looked at has been clipped."""
    loop.backward(at)
    kept = [param.grad for param in loop.model.parameters() if param.grad is not None]
    clip(loop, NEVER if at % 4 else ALWAYS)
    look_at = LOOKS[at // 4 % len(LOOKS)]
    loop.seen += [float(look_at(grad).double().sum()) for grad in kept]
    loop.step()


def parameters_looked_at(loop: Loop, at: int) -> None:
    """As adaptive clipping, averages and logs do."""
    loop.backward(at)
    params = list(loop.model.parameters())
    ways: list[Callable[[Any], Tensor]] = [
        lambda param: param.norm(),
        lambda param: param.detach().clone(),
        lambda param: param.data,
        lambda param: param.to_local(),
        lambda param: param.full_tensor(),
    ]
    loop.seen += [float(local_shard(ways[at % len(ways)](param)).detach().double().sum()) for param in params]
    clip(loop, NEVER)
    loop.step()


def decayed_by_hand(loop: Loop, at: int) -> None:
    """Parameters are written; in some of these ways no version is counted."""
    loop.backward(at)
    clip(loop, NEVER)
    params = list(loop.model.parameters())
    with torch.no_grad():
        if at % 3 == 0:
            torch._foreach_mul_(params, 0.9)
        for param in params if at % 3 else ():
            (param.data if at % 3 == 1 else param.to_local().data).mul_(0.9)
    loop.step()


def evaluated(loop: Loop, at: int) -> None:
    """Between the backward and the step."""
    loop.backward(at)
    look(loop)
    clip(loop, NEVER)
    look(loop)
    loop.step()


def saved_between(loop: Loop, at: int) -> None:
    """Parameters, state and counters are those from before the step."""
    loop.backward(at)
    clip(loop, NEVER)
    loop.seen += [value.to_local().double().sum().item() for value in loop.model.state_dict().values()]
    for state in loop.optimizer.state_dict()["state"].values():
        loop.seen += [leaf.double().sum().item() for value in state.values() for leaf in leaves(value)]
    loop.step()


def looked_up_between(loop: Loop, at: int) -> None:
    """The entries of ``optimizer.state``, counters among them."""
    loop.backward(at)
    clip(loop, NEVER)
    for state in loop.optimizer.state.values():
        loop.seen += [leaf.double().sum().item() for value in state.values() for leaf in leaves(value)]
    loop.step()


def loaded_between(loop: Loop, at: int) -> None:
    if not hasattr(loop, "saved"):
        model = {name: value.detach().clone() for name, value in loop.model.state_dict().items()}
        loop.saved = model, copy.deepcopy(loop.optimizer.state_dict())  # type: ignore[attr-defined]
    loop.backward(at)
    clip(loop, NEVER)
    loop.model.load_state_dict(loop.saved[0])
    loop.optimizer.load_state_dict(copy.deepcopy(loop.saved[1]))
    loop.step()


def skipped_by_the_model(loop: Loop, at: int) -> None:
    loop.backward(at)
    loop.model.zero_grad()


def skipped_if_not_finite(loop: Loop, at: int) -> None:
    """A step without it, but for one that has ``inf`` among its gradients."""
    loss = loop.model(loop.batch(at))
    (loss * (math.inf if at % 2 else 1.0)).backward()
    try:
        clip(loop, NEVER, error_if_nonfinite=True)
    except RuntimeError:
        loop.optimizer.zero_grad()
        return
    loop.step()


def without_one(loop: Loop, at: int) -> None:
    loop.backward(at)
    list(loop.model.parameters())[at % 4].grad = None
    clip(loop, NEVER)
    loop.step()


def with_another(loop: Loop, at: int) -> None:
    """A gradient of the user's."""
    loop.backward(at)
    param = list(loop.model.parameters())[at % 4]
    assert param.grad is not None
    param.grad = param.grad * 2
    loop.step()


def one_backward_more(loop: Loop, at: int) -> None:
    loop.backward(at)
    loop.backward(at + 50)
    clip(loop, NEVER)
    loop.step()


def synchronized(loop: Loop, at: int) -> None:
    """Between the backward and the step, with a look at the parameters themselves."""
    loop.backward(at)
    getattr(loop.optimizer, "synchronize", lambda: None)()
    loop.seen += [param.detach().to_local().double().sum().item() for param in loop.model.parameters()]
    clip(loop, NEVER)
    loop.step()


def away_between(loop: Loop, at: int) -> None:
    loop.backward(at)
    for name in ("offload_states", "release_states", "reload_states"):
        getattr(loop.optimizer, name, lambda: None)()
    clip(loop, NEVER)
    loop.step()


OPERATIONS: tuple[Operation, ...] = (
    *(within_bounds, within_bounds, within_bounds, within_bounds, clipped, now_and_then, one_by_one, by_the_largest),
    *(
        unclipped,
        twice,
        in_two_parts,
        norm_in_parts,
        scaled_by_hand,
        scaled_locally,
        scaled_uncounted,
        scaled_twice_at_once,
    ),
    *(logged, logged_past_torch_functions, parameters_looked_at, decayed_by_hand, evaluated),
    *(saved_between, looked_up_between, loaded_between, skipped_by_the_model),
    *(skipped_if_not_finite, without_one, with_another, one_backward_more, synchronized, away_between),
    *(),
)
