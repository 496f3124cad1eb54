"""Digests of chunks: the same bits give the same one, in whatever memory, and different ones another."""

import itertools

import pytest
import torch

from fsdp_offload.checkpoint.planners import digest_of

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64, torch.float4_e2m1fn_x2),
)
SHAPES = ((), (0,), (0, 3), (5,), (1024,), (1025,), (64, 64), (3, 5, 700), (100_000, 2))


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return numbers.view(dtype).squeeze(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits(dtype: torch.dtype) -> None:
    found = {}
    for shape in SHAPES:
        one = bits(shape, dtype)
        found[shape] = digest_of(one)
        assert digest_of(one.clone()) == found[shape]
        apart = bits((*shape, 2), dtype)[..., 0]
        assert digest_of(apart) == digest_of(apart.contiguous())
    assert len({*found.values()}) == len(SHAPES)


def test_other_dtypes_and_shapes_of_the_same_bytes() -> None:
    one = torch.zeros(4, 6)
    others = (one, one.view(6, 4), one.view(-1), one.view(torch.int32), one.view(torch.float16), one[:3])
    assert len({digest_of(other) for other in others}) == len(others)


def test_each_element_of_a_small_chunk_counts() -> None:
    one = torch.zeros(32, 32)
    found = {digest_of(one)}
    for row, column in itertools.product(range(32), range(32)):
        one.zero_()[row, column] = -0.0
        found.add(digest_of(one))
    assert len(found) == 1 + one.numel()


@pytest.mark.parametrize("shape", [(512, 512), (300, 1000), (4096, 16), (8, 8192), (16, 96, 64)])
def test_rows_and_columns_of_a_large_chunk_count(shape: tuple[int, ...]) -> None:
    """Each fiftieth of each dimension, and the first elements."""
    one = torch.zeros(shape)
    before = digest_of(one)
    for dim, size in enumerate(shape):
        width = -(-size // 50)
        for begin in range(0, size, width):
            changed = one.clone()
            changed.narrow(dim, begin, min(width, size - begin)).fill_(1)
            assert digest_of(changed) != before, (dim, begin)
    one.view(-1)[63] = 1
    assert digest_of(one) != before
