"""Higher-precision copies of low-precision parameters that an optimizer keeps as state, under ``master_param``.

- A floating-point master of more precision is the only copy of it: it is saved, and rebuilt from the parameter where a
  checkpoint lacks it. Weights that somebody wrote into the parameter win over it.
- One of the same dtype is a duplicate that no kernel reads nor updates: it is not saved, and not needed in a load.
- An integer one (the lower bits) means nothing without the exact parameter: it is never rebuilt.

Some optimizers keep masters themselves; ``add_masters`` adds them to others (:mod:`with_masters`).
"""

from typing import Literal

import torch
from torch import Tensor

MasterKind = Literal["remainder", "fp32"]
"""What ``add_masters`` keeps: the lower 16 bits of a master in int16, or all of it."""

LOW_PRECISION = (torch.bfloat16, torch.float16)

MASTER = "master_param"
"""The name under which Transformer Engine's FusedAdam and Megatron-LM keep it in ``optimizer.state[param]``."""


def has_master(param: Tensor) -> bool:
    """Return whether ``param`` needs one: parameters in fp32 and fp64 are their own masters."""
    return param.dtype in LOW_PRECISION


def is_duplicate(param: Tensor, master_dtype: torch.dtype) -> bool:
    """Return whether a master of that dtype says nothing that ``param`` does not say."""
    return master_dtype == param.dtype


def can_rebuild(master_dtype: torch.dtype) -> bool:
    """Return whether such a master can be made from the parameter alone."""
    return master_dtype.is_floating_point


def let_weights_win(param: Tensor, master: Tensor) -> None:
    """Copy ``param`` into a ``master`` of more precision where it is not what that rounds to: somebody has written it.

    A ``dcp.load`` into the parameters fires no hook, so this is looked at before every update; where nobody wrote,
    it changes nothing. Both are local tensors on one device; temporaries take about twice ``master``'s bytes.
    """
    is_finer = master.dtype.is_floating_point and master.dtype.itemsize > param.dtype.itemsize
    if not (is_finer and param.dtype.is_floating_point and param.shape == master.shape):
        return
    written = param != master.to(param.dtype)
    master.copy_(torch.where(written, param.to(master.dtype), master))


def kept_dtype(kind: MasterKind, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what is kept under ``master_param``.

    Raises:
        ValueError: the master of such a parameter has no remainder.
    """
    if kind == "fp32":
        return torch.float32
    if param_dtype is not torch.bfloat16:
        raise ValueError(
            "masters of kind 'remainder' are for bf16, whose 16 bits are the upper ones of fp32, and a parameter is "
            f"{param_dtype}. Use add_masters(optimizer, 'fp32')."
        )
    return torch.int16


def new_master(kind: MasterKind, weights: Tensor) -> Tensor:
    """Return what is kept of a master that is what the local tensor ``weights`` is; dense."""
    kept = torch.empty_like(weights, dtype=kept_dtype(kind, weights.dtype))
    return kept.copy_(weights) if kind == "fp32" else kept.zero_()


def open_master(kind: MasterKind, weights: Tensor, kept: Tensor) -> Tensor:
    """The fp32 master that an optimizer may update: ``kept``, which is dense, or made from that and local weights."""
    if kind == "fp32":
        let_weights_win(weights, kept)
        return kept
    lower = in_memory_order(kept)
    rounded = in_memory_order(torch.empty_like(kept).view(weights.dtype).copy_(weights)).view(torch.int16)
    halves = torch.stack((lower, rounded - (lower < 0).to(torch.int16)), dim=-1)
    return halves.view(torch.float32).as_strided(kept.shape, kept.stride())


def close_master(kind: MasterKind, master: Tensor, weights: Tensor, kept: Tensor) -> None:
    """Write ``weights`` from the updated ``master``, and keep what they do not say.

    ``"fp32"`` rounds to nearest, ties to even. ``"remainder"`` is the format of Transformer Engine's
    ``store_param_remainders``: the parameter is the upper 16 bits, plus one if the lower 16, read as a signed number,
    are negative. So ties round away from zero, which can be undone.
    """
    if kind == "fp32":
        weights.copy_(master)
        return
    # The lower bits of a NaN may all be ones, and adding one to its upper bits would make it a number.
    master.masked_fill_(master.isnan(), torch.nan)
    halves = in_memory_order(master).view(torch.int16).view(-1, 2)
    lower, upper = halves[:, 0], halves[:, 1]
    in_memory_order(kept).copy_(lower)
    rounded = upper + (lower < 0)  # still int16
    weights.copy_(rounded.view(weights.dtype).as_strided(kept.shape, kept.stride()))


def in_memory_order(dense: Tensor) -> Tensor:
    """View the elements of a tensor without gaps as they lie in memory: flat."""
    return dense.as_strided((dense.numel(),), (1,))
