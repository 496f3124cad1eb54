"""What may be cut into flat ranges: each entry of the table gives the same bits whole and cut, on this device."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from fsdp_offload.core.packing import CUT_NUMEL
from fsdp_offload.optimizers import capabilities_of
from fsdp_offload.optimizers.capabilities import rows
from tests.cpu.test_parity_optimizers import FLAGS, IMPLEMENTATIONS
from tests.overlapping import assert_same_each_step, pair
from tests.parity import SMALL, One, same_bits

CLASSES = [getattr(optim, name.partition(":")[2]) for name in rows() if name.startswith("torch.optim:")]

# Sizes, and the range in units of CUT_NUMEL: small ranges of what is small, or it would take minutes.
CUTS = [((1, 63, 64, 65, 1000), 1), ((129, 4096 + 7), 9), ((4096 + 7, 40000 + 3), 50)]
STEPS = 4
Snapshot = list[Tensor]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """With one, a CPU tensor has no seams; with two it has them in places that are no multiple of anything."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def entries(device_type: str) -> Iterator[Any]:
    """Every entry of the table for this kind of device, as parameters of a test."""
    for cls in CLASSES:
        for implementation, kind, dtype in sorted(capabilities_of(cls).cuttable, key=str):
            if kind == device_type:
                yield pytest.param(cls, implementation, dtype, id=f"{cls.__name__}-{implementation}-{dtype}")


def train(
    cls: type[optim.Optimizer],
    kwargs: dict[str, Any],
    start: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    cut_numel: int | None,
) -> Iterator[Snapshot]:
    """Parameters and state after each step; in ranges of ``cut_numel`` elements, each with an optimizer of its own."""
    ranges = [param.split(cut_numel or param.numel()) for param in start]
    leaves = [[piece.clone().requires_grad_() for piece in pieces] for pieces in ranges]
    every = list(itertools.chain.from_iterable(leaves))
    # Together where they are whole, one range at a time where they are cut, as buckets are.
    optimizers = [cls(batch, **kwargs) for batch in ([every] if cut_numel is None else [[leaf] for leaf in every])]
    for step_grads in grads:
        for pieces, grad in zip(leaves, step_grads, strict=True):
            for leaf, part in zip(pieces, grad.split(cut_numel or grad.numel()), strict=True):
                leaf.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
        states = {leaf: state for optimizer in optimizers for leaf, state in optimizer.state.items()}
        yield [value for pieces in leaves for value in joined(pieces, states)]


def joined(pieces: Sequence[Tensor], states: dict[Any, dict[str, Any]]) -> Iterator[Tensor]:
    """The ranges of a parameter put together again: the parameter, and its state by name."""
    yield torch.cat([piece.detach() for piece in pieces])
    for name in states.get(pieces[0], {}):
        values = [torch.as_tensor(states[piece][name]) for piece in pieces]
        assert values[0].dim() or all(torch.equal(value, values[0]) for value in values), name
        yield torch.cat(values) if values[0].dim() else values[0].clone()


def check_entry(
    cls: type[optim.Optimizer],
    implementation: str,
    dtype: torch.dtype,
    device: str,
    cuts: Sequence[tuple[tuple[int, ...], int]] = CUTS,
) -> None:
    """The test itself; ``tests/gpu`` runs it too."""
    generator = torch.Generator().manual_seed(0)
    for flags, (sizes, units) in itertools.product(FLAGS[cls], cuts):
        start = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
        grads = [[torch.randn(size, generator=generator).to(device, dtype) for size in sizes] for _ in range(STEPS)]
        kwargs = {"lr": 0.01, **flags, **IMPLEMENTATIONS[implementation]}
        if dtype is torch.float16 and "eps" in cls(start, **kwargs).param_groups[0]:
            kwargs["eps"] = 1e-3  # the usual one is zero in float16, and everything would be NaN
        whole = list(train(cls, kwargs, start, grads, None))
        cut = train(cls, kwargs, start, grads, units * CUT_NUMEL)
        for step, (one, other) in enumerate(zip(whole, cut, strict=True)):
            assert len(one) == len(other)
            assert all(map(same_bits, one, other)), f"{flags}, {sizes} in ranges of {units} units, step {step}"
        assert all(torch.isfinite(tensor).all() for tensor in whole[-1]), f"{flags}: equality of NaN shows little"


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("cuts", [CUTS[:1], pytest.param(CUTS, marks=pytest.mark.long)], ids=["small", "all sizes"])
@pytest.mark.parametrize(("cls", "implementation", "dtype"), list(entries("cpu")))
def test_whole_and_cut_have_the_same_bits(
    cls: type[optim.Optimizer], implementation: str, dtype: torch.dtype, cuts: Sequence[tuple[tuple[int, ...], int]]
) -> None:
    check_entry(cls, implementation, dtype, "cpu", cuts)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_that_threads_share(dtype: torch.dtype) -> None:
    """From 32,768 elements on torch divides a tensor among threads; in bfloat16 the seam is seen in the bits."""

    def make(params: Any) -> optim.Optimizer:
        return optim.SGD(params, momentum=0.9, weight_decay=0.1, nesterov=True)

    plain, loop = pair(None, SMALL, make, net=lambda: One(40003).to(dtype))
    assert_same_each_step(plain, loop, 5)
    assert (loop.optimizer.offload_report().kept.moving_buckets > 1) == (dtype is torch.float32)
