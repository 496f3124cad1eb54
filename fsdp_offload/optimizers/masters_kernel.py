"""The Triton kernel of :mod:`masters`; the formulas are there. Imported on use: Triton imports slowly."""
# mypy: ignore-errors
# Triton gives annotations and names its own meaning.

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

_BLOCK = 1024


def launch(part: Any, step: tuple[float, ...], *, remainder: bool) -> None:
    """Update a ``MasterRange`` in place, on the current stream of the current device.

    Args:
        part: its tensors.
        step: learning rate, betas, eps and weight decay; they are rounded to fp32.
        remainder: ``part.kept`` has only the lower 16 bits of masters.
    """
    numel = part.weights.numel()
    _update[(triton.cdiv(numel, _BLOCK),)](
        part.weights.view(torch.int16) if remainder else part.weights,
        *part[1:],
        *step,
        numel,
        remainder=remainder,
        block=_BLOCK,
        enable_fp_fusion=False,  # fma only where it is written
    )


@triton.jit
def _update(
    weights,
    grads,
    kept,
    averages,
    squares,
    steps,
    lr: tl.float32,
    beta1: tl.float32,
    beta2: tl.float32,
    eps: tl.float32,
    decay: tl.float32,
    numel,
    remainder: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < numel
    g = tl.load(grads + at, mask=inside, other=0).to(tl.float32)
    m = tl.load(averages + at, mask=inside, other=0)
    v = tl.load(squares + at, mask=inside, other=0)
    w = tl.load(weights + at, mask=inside, other=0)
    k = tl.load(kept + at, mask=inside, other=0)
    if remainder:
        upper = w - ((k < 0) & ((w & 0x7FFF) != 0)).to(tl.int16)
        p = ((upper.to(tl.int32) << 16) | (k.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        p = tl.where(w != k.to(weights.dtype.element_ty), w.to(tl.float32), k)  # weights that were written win
    step = (tl.load(steps) + 1.0).to(tl.float64)
    c1 = 1.0 - libdevice.pow(beta1.to(tl.float64), step).to(tl.float32)
    c2 = libdevice.sqrt_rn(1.0 - libdevice.pow(beta2.to(tl.float64), step).to(tl.float32))
    if decay != 0:  # or an infinite weight would become a NaN
        p = libdevice.fma(tl.broadcast_to(-(lr * decay), p.shape), p, p)
    b1, b2 = tl.broadcast_to(beta1, m.shape), tl.broadcast_to(beta2, v.shape)
    m = libdevice.fma(b1, m, libdevice.fma(-b1, g, g))
    v = libdevice.fma(b2, v, libdevice.fma(-b2, g * g, g * g))
    denominator = libdevice.div_rn(libdevice.sqrt_rn(v), tl.broadcast_to(c2, v.shape)) + eps
    p = p - libdevice.div_rn(libdevice.div_rn(lr, c1) * m, denominator)
    tl.store(averages + at, m, mask=inside)
    tl.store(squares + at, v, mask=inside)
    if remainder:
        bits = tl.where(p != p, 0x7FC00000, p.to(tl.int32, bitcast=True))
        lower = bits.to(tl.int16)
        tl.store(kept + at, lower, mask=inside)
        tl.store(weights + at, (bits >> 16).to(tl.int16) + (lower < 0).to(tl.int16), mask=inside)
    else:
        tl.store(kept + at, p, mask=inside)
        tl.store(weights + at, p.to(weights.dtype.element_ty), mask=inside)
