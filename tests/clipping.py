"""Clip in a loop: by our function where its optimizer is offloaded, by torch's where it is plain."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from fsdp_offload import OffloadPolicy, clip_grad_norm_, is_offloaded
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.engine.guesses import Guesses
from tests.overlapping import Loop, policy_of

NEVER, ALWAYS = 1e9, 1e-3
"""Norms to clip by: beyond reach, and below every gradient."""


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


LOOKS: list[Callable[[Any], Tensor]] = [
    lambda grad: grad.to_local(),
    lambda grad: grad._local_tensor,
    lambda grad: grad.full_tensor(),
    lambda grad: grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim).to_local(),
    lambda grad: torch.tensor([ord(letter) for letter in repr(grad)]),
]
