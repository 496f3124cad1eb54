"""Clip as torch's ``clip_grad_norm_``, bit for bit, after updates of ``overlap="iteration"`` that ran in the backward.

An update in the backward is speculative: it assumes that the clipping factor will be 1 (``engine/speculation.py``).
This function computes norm and factor on the device; ``step()`` learns on the host whether the factor was 1.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..fsdp.fully_shard import parameters_of
from ..fsdp.gradients import bare
from ..policy import check_choices, check_is, tells
from ..state.layout import params_of
from .wrapped import attachment_of, optimizers_in


@tells("clip_grad_norm_(optimizer, max_norm)")
def clip_grad_norm_(
    optimizer: Optimizer | Sequence[Optimizer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients of all parameters of ``optimizer`` by their common norm, as ``torch.nn.utils`` does.

    Norm and gradients get the bits of ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`` for the model's
    parameters that ``optimizer`` has. Without a model, or without offload, parameters are in the order of
    ``param_groups``, on which the last bit of the norm depends. The collectives are torch's own. torch refuses
    gradients on several meshes, such as those of experts: they get the bits of torchtitan's function.

    Call it from the first step on. With ``OffloadPolicy(overlap="iteration")``, updates then run in the backward as
    if the factor were 1; ``step()`` rolls them back if it is not. Gradients that an update has used are
    multiplied when they are read, or in ``step()``.

    Args:
        optimizer: one optimizer, offloaded or not, also in a framework's wrapper; or a chain or sequence of optimizers
            that are clipped together.
        max_norm: the largest norm that is not clipped.
        norm_type: the order of the norm; may be ``inf``.
        error_if_nonfinite: raise if the norm is not finite. The host waits for the norm then.
        foreach: use torch's multi-tensor kernels; ``None``: where they are supported.

    Returns:
        The norm before clipping: 0-dim, on the device of the gradients; a DTensor for sharded ones.

    Raises:
        TypeError: ``optimizer`` is not an optimizer and holds none.
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``; or the backward has freed gradients, since
            this function was not called from the first step on, or not all gradients fit on the device.
    """
    inner = optimizers_in(optimizer, "clip_grad_norm_")
    line = "clip_grad_norm_(optimizer, max_norm)"
    check_is(max_norm, Real | Tensor | str, "clip_grad_norm_: max_norm must be a number", line)  # torch takes text, too
    if isinstance(max_norm, Real) and not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be 0 or more, got {max_norm}. To clip nothing, leave it out.")
    check_choices("clip_grad_norm_", error_if_nonfinite=error_if_nonfinite, foreach=foreach or False)
    of_models: list[Tensor] = []  # parameters in the order of the models
    for attachment in filter(None, map(attachment_of, inner)):
        model = None if attachment.model is None else attachment.model()
        of_models += [] if model is None else parameters_of(model)
    own = dict.fromkeys([param for one in inner for param in params_of(one)])
    params = list(dict.fromkeys([*[param for param in of_models if param in own], *own]))
    return clip_in_order(inner, params, max_norm, norm_type, error_if_nonfinite, foreach)


@torch.no_grad()
def clip_in_order(
    optimizers: Iterable[Optimizer],
    params: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip as :func:`clip_grad_norm_`, in a framework's order: that of ``params``, the parameters of ``optimizers``."""
    inner = optimizers_in(list(optimizers), "clip_grad_norm_")
    speculating = [attachment.engine.speculation for attachment in map(attachment_of, inner) if attachment is not None]
    for one in speculating:
        one.announce()
    grads = [grad for param in params if (grad := param.grad) is not None]
    if not speculating and len(_by_mesh(grads)) < 2:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    with bare(grads):  # not an access of the user
        get_norm, options = torch.nn.utils.get_total_norm, (norm_type, error_if_nonfinite, foreach)
        norms = [get_norm(of_mesh, *options) for of_mesh in _by_mesh(grads) or [grads]]
        # The norm of sharded gradients is reduced over the ranks once, here, as torch does for its factor.
        totals = [one.full_tensor() if isinstance(one, DTensor) else one for one in norms]
        norm, total = norms[0], totals[0]
        if len(totals) > 1:  # combined as torchtitan does
            whole, order = torch.stack(totals), float(norm_type)
            norm = total = whole.amax() if math.isinf(order) else (whole**order).sum() ** (1.0 / order)
        if grads:
            max_norm = float(max_norm)
            is_one = torch.clamp(max_norm / (total + 1e-6), max=1.0) == 1

            def scale(grads: Sequence[Tensor]) -> None:
                with bare(grads):
                    for of_mesh in _by_mesh(grads):
                        holders: Any = [SimpleNamespace(grad=grad) for grad in of_mesh]
                        torch.nn.utils.clip_grads_with_norm_(holders, max_norm, total, foreach)

            used = set().union(*(one.put_off(is_one, scale) for one in speculating))
            scale([grad for grad in grads if id(grad) not in used])
    return norm


def _by_mesh(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divide ``grads`` by mesh: torch's functions take gradients of one."""
    found: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for grad in grads:
        found[grad.device_mesh if isinstance(grad, DTensor) else None].append(grad)
    return list(found.values())
