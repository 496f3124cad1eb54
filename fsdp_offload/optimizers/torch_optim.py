"""The optimizers of ``torch.optim``: an explicit answer for each class and implementation.

``tests/cpu/test_cut_table.py`` and ``tests/gpu/test_parity.py`` prove every entry of the cut table: whole
against cut, several steps, ``torch.equal``. Nothing may be added here that they do not run.
"""

import itertools
from dataclasses import replace

import torch
from torch import optim

from .base import Capabilities

# On the CPU reduced precision is left whole: scalar and vector loops round it differently, and where the one takes over
# from the other depends on how a tensor's size divides among threads.
_FLOATS = {
    "cpu": (torch.float32, torch.float64),
    "cuda": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
}


def _cuttable(*, fused_on: tuple[str, ...] = ()) -> frozenset[tuple[str, str, torch.dtype]]:
    entries: set[tuple[str, str, torch.dtype]] = set()
    for device, dtypes in _FLOATS.items():
        implementations = ("for-loop", "foreach", "fused") if device in fused_on else ("for-loop", "foreach")
        entries |= set(itertools.product(implementations, (device,), dtypes))
    return frozenset(entries)


def _elementwise(*, fused_on: tuple[str, ...] = ()) -> Capabilities:
    return Capabilities(
        elementwise=True, state_like_param=True, takes_masters=True, cuttable=_cuttable(fused_on=fused_on)
    )


CAPABILITIES: dict[type[optim.Optimizer], Capabilities] = {
    optim.Adadelta: _elementwise(),
    optim.Adagrad: _elementwise(fused_on=("cpu",)),
    optim.Adam: _elementwise(fused_on=("cpu", "cuda")),
    optim.AdamW: _elementwise(fused_on=("cpu", "cuda")),
    optim.Adamax: _elementwise(),
    optim.ASGD: _elementwise(),
    optim.NAdam: _elementwise(),
    optim.RAdam: _elementwise(),
    optim.RMSprop: _elementwise(),
    optim.Rprop: _elementwise(),
    # Its fused CUDA kernel rounds dampening differently where a tensor's size is no multiple of the vector's. The CPU's
    # leaves parameters in reduced precision as they are, and makes noise of their momentum (torch 2.11 to 2.13).
    optim.SGD: replace(_elementwise(fused_on=("cpu",)), wrong_if_fused=frozenset({torch.bfloat16, torch.float16})),
    # Orthogonalizes whole matrices: sees the DTensors, and torch redistributes them as it does without offload.
    optim.Muon: Capabilities(state_like_param=True),
    # Factors whole matrices: row and column statistics, and a norm over the parameter.
    optim.Adafactor: Capabilities(
        refuses_dtensor="torch.optim.Adafactor itself does not support sharded parameters: its step fails on DTensor "
        "shards. Use it with plain parameters, or another optimizer."
    ),
    optim.LBFGS: Capabilities(
        refusal="LBFGS keeps one flat history over all parameters and evaluates the closure many times in a step; it "
        "cannot be streamed parameter by parameter."
    ),
    optim.SparseAdam: Capabilities(
        refusal="SparseAdam takes sparse gradients, which touch only some rows of the state; streaming all of it would "
        "cost more than it saves. Keep such parameters in an optimizer of their own that is not offloaded."
    ),
}
