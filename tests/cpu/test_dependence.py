"""The trace of what flows into what: each kind of operator, in place and not, and the ways around them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zoo.dependence import DependenceTrace


@pytest.fixture
def tensors() -> list[Tensor]:
    return [torch.randn(4, 4) for _ in range(3)]


@pytest.fixture
def trace(tensors: list[Tensor]) -> DependenceTrace:
    made = DependenceTrace()
    for number, tensor in enumerate(tensors):
        made.mark(tensor, number)
    return made


def into(trace: DependenceTrace, run: Callable[[], Any]) -> list[set[int]]:
    """The origins of each tensor that ``run`` returns."""
    with trace:
        result = run()
    return [trace.origins_of(one) for one in (result if isinstance(result, list | tuple) else [result])]


def part_of(whole: Tensor, part: Tensor) -> Tensor:
    whole[:2].copy_(part[:2])
    return whole


def into_a_buffer(tensors: list[Tensor]) -> list[Tensor]:
    buffer = torch.empty(3 * 16)
    for number, tensor in enumerate(tensors):
        buffer[16 * number :][:16].copy_(tensor.flatten())
    return [part.view(4, 4) for part in buffer.mul_(2).split(16)]


def foreach_in_place(tensors: list[Tensor]) -> list[Tensor]:
    copies = [tensor.clone() for tensor in tensors[:2]]
    torch._foreach_lerp_(copies, tensors[1:], 0.5)
    return copies


CASES: dict[str, tuple[Callable[[list[Tensor]], Any], list[set[int]]]] = {
    "binary": (lambda t: t[0] + t[1], [{0, 1}]),
    "scalar": (lambda t: t[0] * 2, [{0}]),
    "view": (lambda t: t[0].view(-1)[3:7], [{0}]),
    "only the shape": (lambda t: torch.zeros_like(t[0]), [set()]),
    "new": (lambda t: t[0].new_ones(3), [set()]),
    "stack": (torch.stack, [{0, 1, 2}]),
    "stack, element by element": (lambda t: list((torch.stack(t).sqrt() + 1).unbind()), [{0}, {1}, {2}]),
    "stack along another dimension": (lambda t: list(torch.stack(t, dim=1)[:, 1:].unbind(1)), [{1}, {2}]),
    "cat and split": (lambda t: list(torch.cat(t, dim=-1).mul(2).split(4, dim=1)), [{0}, {1}, {2}]),
    "a batch of products": (lambda t: list(torch.bmm(torch.stack(t), torch.stack(t)).unbind()), [{0, 1, 2}] * 3),
    "broadcast": (lambda t: list((torch.stack(t) * t[1][0, 0]).unbind()), [{0, 1}, {1}, {1, 2}]),
    "into a buffer": (into_a_buffer, [{0}, {1}, {2}]),
    "other elements over the same bytes": (lambda t: torch.stack(t).view(torch.int16), [{0, 1, 2}]),
    "split": (lambda t: t[1].chunk(2), [{1}, {1}]),
    "in place": (lambda t: t[0].clone().add_(t[2]), [{0, 2}]),
    "copy": (lambda t: torch.empty(4, 4).copy_(t[2]), [{2}]),
    "overwritten": (lambda t: t[0].clone().zero_(), [set()]),
    "a part overwritten": (lambda t: part_of(t[0].clone(), t[1]), [{0, 1}]),
    "the other part": (lambda t: part_of(t[0].clone(), t[1])[2:], [{0}]),
    "out": (lambda t: torch.add(t[0], 1, out=torch.empty(4, 4)), [{0}]),
    "foreach": (lambda t: torch._foreach_add(t, 1), [{0}, {1}, {2}]),
    "foreach of two lists": (lambda t: torch._foreach_mul(t[:2], t[1:]), [{0, 1}, {1, 2}]),
    "foreach with one tensor": (lambda t: torch._foreach_mul(t[:2], t[2].sum()), [{0, 2}, {1, 2}]),
    "foreach norms": (torch._foreach_norm, [{0}, {1}, {2}]),
    "foreach in place": (foreach_in_place, [{0, 1}, {1, 2}]),
    "foreach with a scalar for each": (lambda t: torch._foreach_mul(t, [1.0, 2.0, 3.0]), [{0}, {1}, {2}]),
    "matmul": (lambda t: t[0] @ t[0].T, [{0}]),
    "linalg": (lambda t: torch.linalg.svd(t[1]).S, [{1}]),
}


@pytest.mark.parametrize(("run", "expected"), CASES.values(), ids=CASES)
def test_operators(
    trace: DependenceTrace, tensors: list[Tensor], run: Callable[[list[Tensor]], Any], expected: list[set[int]]
) -> None:
    assert into(trace, lambda: run(tensors)) == expected


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.sum(0).tolist(),
    "numpy": lambda t: t.sum().numpy(),
    "equal": lambda t: torch.equal(t[0], t[1]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_numbers_of_several_parameters_that_are_read_on_the_host(
    trace: DependenceTrace, tensors: list[Tensor], read: Callable[[Tensor], object]
) -> None:
    with trace:
        read(tensors[0])
        torch.stack([tensor.sum() for tensor in tensors]).tolist()  # one by one
        assert not trace.mixed_reads
        read(torch.stack(tensors))
    assert trace.mixed_reads
