"""Tells on the device whether memory still holds what it held: a random linear hash of each row of it.

A row is up to 1024 32-bit words; its hash is the sum of its words, each times an odd random 64-bit number of its place,
modulo 2**64. One changed word always changes it. Any other write that does not know the random numbers leaves it as it
was with a probability of at most 2**-32, however regular: exchanged halves, flipped signs, a permuted identity. (Plain
sums of rows and columns do not notice a flipped identity.) Bits are compared, so -0.0 is not 0.0, and NaN is NaN.
"""

import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

ROW_WORDS = 1024
"""A hash of 8 bytes for so many words of up to 4 bytes each."""

_PIECE_WORDS = 1 << 20
"""So much is hashed at a time: products take 8 bytes a word, and few launches want large pieces."""

_SMALL_WORDS = 64 * ROW_WORDS
"""Limit below which parameters are put together before they are hashed, so that many small ones cost few launches."""

_WORD_DTYPES = (torch.int32, torch.int16, torch.uint8)


class Hasher:
    """The random numbers, and the memory for products. One for each stream: what it hashes is in order there."""

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        """Take the memory from the current stream: 12 MiB. Hashes of other processes compare if ``seed`` is theirs."""
        chance = torch.Generator().manual_seed(_SEED if seed is None else seed)  # not the user's generator
        weights = torch.randint(-(1 << 62), 1 << 62, (ROW_WORDS,), generator=chance, device="cpu")
        self.weights = (2 * weights + 1).to(device)
        self.products = torch.empty(_PIECE_WORDS, dtype=torch.int64, device=device)
        self.joined = torch.empty(4 * _PIECE_WORDS, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self.weights.nbytes + self.products.nbytes + self.joined.nbytes


_SEED = int.from_bytes(os.urandom(7))


class Fingerprint:
    """Fingerprint of tensors whose memory stays where it is; it keeps that memory.

    Attributes:
        rows: how many hashes it is made of.
    """

    def __init__(self, memory: Iterable[Tensor]) -> None:
        """Take flat ``uint8`` views of the tensors, all of one device."""
        self._rows_of: list[Tensor] = []  # (rows, ROW_WORDS)
        self._joined: list[list[Tensor]] = []  # flat; each list is put together, and all of it has one dtype
        small: dict[torch.dtype, list[Tensor]] = {}
        for flat in memory:
            for words in _words(flat):
                full = words.numel() // ROW_WORDS * ROW_WORDS if words.numel() >= _SMALL_WORDS else 0
                for piece in words[:full].split(_PIECE_WORDS) if full else ():
                    self._rows_of.append(piece.view(-1, ROW_WORDS))
                if full < words.numel():
                    small.setdefault(words.dtype, []).append(words[full:])
        for words_of_dtype in small.values():
            self._joined += _packed(words_of_dtype)
        joined_rows = (-(-sum(words.numel() for words in run) // ROW_WORDS) for run in self._joined)
        self.rows = sum(len(piece) for piece in self._rows_of) + sum(joined_rows)

    def write(self, out: Tensor, hasher: Hasher) -> None:
        """Hash what the memory holds now, in the order of the current stream.

        Args:
            out: ``int64``, shape ``(rows,)``.
            hasher: of the current stream.
        """
        done = 0
        for rows in self._rows_of:
            done = _hash_rows(rows, out, done, hasher)
        for run in self._joined:
            done = _hash_rows(_join(run, hasher), out, done, hasher)
        assert done == self.rows


def _words(flat: Tensor) -> Iterator[Tensor]:
    """``flat`` as words as wide as its place in its storage allows, and what is left over."""
    dtype = next(one for one in _WORD_DTYPES if flat.storage_offset() % one.itemsize == 0)
    whole = flat.numel() // dtype.itemsize * dtype.itemsize
    if whole:
        yield flat[:whole].view(dtype)
    if whole < flat.numel():
        yield flat[whole:]


def _packed(small: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide into runs of at most a piece."""
    run: list[Tensor] = []
    for words in small:
        if run and sum(one.numel() for one in run) + words.numel() > _PIECE_WORDS:
            yield run
            run = []
        run.append(words)
    yield run


def _join(run: Sequence[Tensor], hasher: Hasher) -> Tensor:
    """Rows of the words of ``run``, one after the other; the last one is filled up with zeros."""
    numel = sum(words.numel() for words in run)
    filled = -(-numel // ROW_WORDS) * ROW_WORDS
    joined = hasher.joined.view(run[0].dtype)[:filled]
    torch.cat(list(run), out=joined[:numel])
    if numel < filled:
        joined[numel:].zero_()
    return joined.view(-1, ROW_WORDS)


def _hash_rows(rows: Tensor, out: Tensor, begin: int, hasher: Hasher) -> int:
    """Write hashes from ``out[begin]`` on; returns where they end."""
    products = hasher.products[: rows.numel()].view(rows.shape)
    torch.mul(rows, hasher.weights, out=products)
    torch.sum(products, dim=1, out=out[begin : begin + len(rows)])
    return begin + len(rows)
