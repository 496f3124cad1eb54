"""Any write changes a fingerprint, and nothing else does."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdp_offload.cpu_update import mirror
from fsdp_offload.cpu_update.mirror import ROW_WORDS, Fingerprint, Hasher

CPU = torch.device("cpu")
HASHER = Hasher(CPU)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.uint8]


def flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def hashes(*tensors: Tensor) -> Tensor:
    made = Fingerprint(flat(tensor) for tensor in tensors)
    out = torch.full((made.rows,), -1, dtype=torch.int64)
    made.write(out, HASHER)
    return out


def differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(hashes(one), hashes(other))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "one element": lambda t: t.view(-1)[t.numel() // 3].add_(1),
    "the last element": lambda t: t.view(-1)[-1].mul_(2),
    "halves exchanged": lambda t: t.copy_(torch.cat([t.view(-1)[t.numel() // 2 :], t.view(-1)[: t.numel() // 2]])),
    "two exchanged": lambda t: t.view(-1)[:2].copy_(t.view(-1)[:2].flip(0)),
    "reversed": lambda t: t.copy_(t.flip(0)),
    "negated": lambda t: t.neg_(),
    "zeroed": lambda t: t.zero_(),
    "scaled": lambda t: t.mul_(0.99),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("numel", [2, 7, 1000, ROW_WORDS, ROW_WORDS + 1, 70 * ROW_WORDS + 3, 300_001])
def test_writes_are_seen(numel: int, write: Callable[[Tensor], object]) -> None:
    others = torch.randn(50), torch.randn(100_000)
    tensor = torch.randn(numel)
    before = hashes(others[0], tensor, others[1])
    assert torch.equal(before, hashes(others[0], tensor, others[1]))
    write(tensor)
    assert not torch.equal(before, hashes(others[0], tensor, others[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 3, 5, 1023, 130_001])
def test_one_bit_of_any_dtype(dtype: torch.dtype, numel: int) -> None:
    """Also where the tensor begins within its storage; what is beside it does not count."""
    memory = torch.ones(numel + 9, dtype=dtype)
    for offset in (0, 1, 2, 3, 4):
        part = memory[offset : offset + numel]
        before = hashes(part)
        for at in {0, flat(part).numel() // 2, flat(part).numel() - 1}:
            flat(part)[at] ^= 1
            assert not torch.equal(before, hashes(part)), at
            flat(part)[at] ^= 1
        memory[:offset] = memory[offset + numel :] = 0
        assert torch.equal(before, hashes(part))
        memory.fill_(1)


def test_bits_are_compared() -> None:
    zero, nan = torch.zeros(100), torch.full((100,), torch.nan)
    assert differ(zero, zero.index_fill(0, torch.tensor(3), -0.0))
    assert not differ(nan, nan.clone())


@pytest.mark.parametrize("width", [2, 64, ROW_WORDS])
def test_regular_writes(width: int) -> None:
    """Of which neither the sums of rows nor those of columns say anything."""
    eye, ones = torch.eye(width), torch.ones(width, width)
    assert differ(eye, eye.flip(0).contiguous())
    signs = 1 - 2 * (torch.arange(width)[:, None] + torch.arange(width)[None, :]).remainder(2).float()
    assert differ(signs, -signs)
    two = ones.clone()
    two[0, :2] = -1
    assert differ(ones, two)


@given(st.lists(st.integers(0, 5000), max_size=12), st.data())
def test_any_sizes(sizes: list[int], data: st.DataObject) -> None:
    tensors = [torch.randn(size) for size in sizes]
    before = hashes(*tensors)
    assert len(before) <= sum(size // ROW_WORDS + 1 for size in sizes)
    assert torch.equal(before, hashes(*tensors))
    if any(sizes):
        changed = data.draw(st.sampled_from([tensor for tensor in tensors if len(tensor)]))
        changed[data.draw(st.integers(0, len(changed) - 1))] += 1
        assert not torch.equal(before, hashes(*tensors))


def test_pieces_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the memory for products takes at once."""
    monkeypatch.setattr(mirror, "_HASHED_BYTES", 256 * ROW_WORDS)
    tensors = [torch.randn(200 * ROW_WORDS + 5), *(torch.randn(ROW_WORDS * 20 + 1) for _ in range(9))]
    for tensor in tensors:
        for at in (0, -1):
            before = hashes(*tensors)
            tensor[at] += 1
            assert not torch.equal(before, hashes(*tensors))


def test_the_users_random_numbers_are_left_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    Hasher(torch.device("cpu"))
    assert torch.equal(state, torch.get_rng_state())
