"""Tells on the device whether memory still holds what it held: a random linear hash of each row of it.

A row is up to 1024 32-bit words; its hash is the sum of its words, each times an odd random 64-bit number of its place,
modulo 2**64. One changed word always changes it. Any other write that does not know the random numbers leaves it as it
was with a probability of at most 2**-32, however regular: exchanged halves, flipped signs, a permuted identity. (Plain
sums of rows and columns do not notice a flipped identity.) Bits are compared, so -0.0 is not 0.0, and NaN is NaN.
"""

import os
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

ROW_WORDS = 1024
"""A hash of 8 bytes for so many words of up to 4 bytes each."""

_PIECE_WORDS = 1 << 20
"""So much is hashed at a time: products take 8 bytes a word, and few launches want large pieces."""

_WORD_DTYPES = (torch.int32, torch.int16, torch.uint8)


class Hasher:
    """The random numbers, and the memory for products. One for each stream: what it hashes is in order there."""

    def __init__(self, device: torch.device) -> None:
        """Take the memory from the current stream: 12 MiB."""
        chance = torch.Generator().manual_seed(_SEED)  # not the user's generator
        weights = torch.randint(-(1 << 62), 1 << 62, (ROW_WORDS,), generator=chance, device="cpu")
        self.weights = (2 * weights + 1).to(device)
        self.products = torch.empty(_PIECE_WORDS, dtype=torch.int64, device=device)
        self.joined = torch.empty(4 * _PIECE_WORDS, dtype=torch.uint8, device=device)


_SEED = int.from_bytes(os.urandom(7))


class Fingerprint:
    """Fingerprint of tensors whose memory stays where it is; it keeps that memory.

    Attributes:
        rows: how many hashes it is made of.
    """

    def __init__(self, memory: Iterable[Tensor]) -> None:
        """Take flat ``uint8`` views of the tensors, all of one device."""
        # Words of one dtype that are hashed together, at most a piece: many small parameters cost few launches.
        self._runs: list[list[Tensor]] = []
        open_runs: dict[torch.dtype, list[Tensor]] = {}
        for words in (piece for flat in memory for part in _words(flat) for piece in part.split(_PIECE_WORDS)):
            run = open_runs.get(words.dtype)
            if run is None or _numel(run) + words.numel() > _PIECE_WORDS:
                run = open_runs[words.dtype] = []
                self._runs.append(run)
            run.append(words)
        self.rows = sum(-(-_numel(run) // ROW_WORDS) for run in self._runs)

    def write(self, out: Tensor, hasher: Hasher) -> None:
        """Hash what the memory holds now, in the order of the current stream.

        Args:
            out: ``int64``, shape ``(rows,)``.
            hasher: of the current stream.
        """
        begin = 0
        for run in self._runs:
            numel = _numel(run)
            end = begin - (-numel // ROW_WORDS)
            filled = (end - begin) * ROW_WORDS
            joined = hasher.joined.view(run[0].dtype)[:filled]
            torch.cat(run, out=joined[:numel])
            joined[numel:].zero_()
            products = hasher.products[:filled].view(-1, ROW_WORDS)
            torch.mul(joined.view(-1, ROW_WORDS), hasher.weights, out=products)
            torch.sum(products, dim=1, out=out[begin:end])
            begin = end


def _numel(run: list[Tensor]) -> int:
    return sum(words.numel() for words in run)


def _words(flat: Tensor) -> Iterator[Tensor]:
    """``flat`` as words as wide as its place in its storage allows, and what is left over."""
    dtype = next(one for one in _WORD_DTYPES if flat.storage_offset() % one.itemsize == 0)
    whole = flat.numel() // dtype.itemsize * dtype.itemsize
    if whole:
        yield flat[:whole].view(dtype)
    if whole < flat.numel():
        yield flat[whole:]
