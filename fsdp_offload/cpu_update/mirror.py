"""The parameters of one bucket on both sides: on the device, and where the host updates them.

::

    mirror (host) ──copy up──▶ device ──fingerprint──▶ kept
                               device ──fingerprint──▶ compared with it before the next update

While nobody else has written them, parameters never come down: what they are is in the mirror. Version counters do not
say whether somebody has (``param.data.copy_`` counts nothing), so the device compares what it holds with what was
uploaded. What is not known, because an update has failed or the memory is elsewhere, comes down again.

A fingerprint is a random linear hash of each row of memory: the sum of its up to 1024 32-bit words, each times an odd
random 64-bit number of its place, modulo 2**64. One changed word always changes it. Any other write that does not know
the random numbers leaves it as it was with a probability of at most 2**-32, however regular: exchanged halves, flipped
signs, a permuted identity. Bits are compared, so -0.0 is not 0.0, and NaN is NaN.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..device.lanes import PIECE_BYTES, Lane, Mark, pieces_of
from ..optimizers.bucket_update import BoundRange

ROW_WORDS = 1024
"""A hash of 8 bytes for so many words of 4 bytes each."""

_HASHED_BYTES = 4 << 20
"""Bytes hashed at a time: products take 8 bytes a word, and few launches want large pieces."""

_SEED = int.from_bytes(os.urandom(7))


class Hasher:
    """The random numbers, and 12 MiB for products. One for each stream: what it hashes is in order there."""

    def __init__(self, device: torch.device) -> None:
        chance = torch.Generator().manual_seed(_SEED)  # not the user's generator
        weights = torch.randint(-(1 << 62), 1 << 62, (ROW_WORDS,), generator=chance, device="cpu")
        self.weights = (2 * weights + 1).to(device)
        self.products = torch.empty(_HASHED_BYTES // 4, dtype=torch.int64, device=device)
        self.joined = torch.empty(_HASHED_BYTES, dtype=torch.uint8, device=device)


class Fingerprint:
    """Fingerprint, of so many ``rows``, of flat ``uint8`` tensors of one device; it keeps their memory."""

    def __init__(self, memory: Iterable[Tensor]) -> None:
        self._runs: list[list[Tensor]] = []  # hashed together: many small parameters cost few launches
        left_bytes = 0
        for piece in (piece for flat in memory for piece in flat.split(_HASHED_BYTES) if piece.numel()):
            if piece.numel() > left_bytes:
                self._runs.append([])
                left_bytes = _HASHED_BYTES
            self._runs[-1].append(piece)
            left_bytes -= piece.numel()
        self._nbytes = [sum(piece.numel() for piece in run) for run in self._runs]
        self.rows = sum(-(-nbytes // (4 * ROW_WORDS)) for nbytes in self._nbytes)

    def write(self, out: Tensor, hasher: Hasher) -> None:
        """Hash what the memory holds now, in the order of the current stream, into ``out``: ``int64``, ``(rows,)``."""
        begin = 0
        for run, nbytes in zip(self._runs, self._nbytes, strict=True):
            end = begin - (-nbytes // (4 * ROW_WORDS))
            joined = hasher.joined[: (end - begin) * 4 * ROW_WORDS]
            torch.cat(run, out=joined[:nbytes])
            joined[nbytes:].zero_()
            words = joined.view(torch.int32).view(-1, ROW_WORDS)
            products = hasher.products[: words.numel()].view_as(words)
            torch.mul(words, hasher.weights, out=products)
            torch.sum(products, dim=1, out=out[begin:end])
            begin = end


class Mirror:
    """Parameters of a bucket that are updated together, and their host memory, which is kept from step to step.

    Attributes:
        lanes: for what goes down, and for what goes up.
        is_known: they are the same on the device, unless somebody else has written there.
        nbytes: of all of them.
        uploaded: recorded behind the last way up of parameters and behind their fingerprint.
    """

    def __init__(
        self,
        ranges: Sequence[BoundRange],
        lanes: tuple[Lane, Lane],
        hashers: tuple[Hasher, Hasher],
        uploaded: Mark | None,
    ) -> None:
        """Take ranges that are bound to parameters on the device, and a hasher for each lane."""
        self.lanes, self._hashers, self.uploaded = lanes, hashers, uploaded
        self._ranges, self._key, self.is_known = list(ranges), _key(ranges), False
        self._on_host: dict[tuple[int, int], BoundRange] = {}
        self._params = [bound.param.data for bound in ranges]  # ``data``: main counts these writes
        self._own = [_mirrored(bound) for bound in ranges]
        self.nbytes = sum(weights.nbytes for weights in self._own)
        pairs = list(zip(self._params, self._own, strict=True))
        # Ours are dense. What has to be rearranged on its way is copied in one piece, and comes down each time.
        flat = [(_flat(param), _flat(own)) for param, own in pairs if param.stride() == own.stride()]
        others = [(param, own) for param, own in pairs if param.stride() != own.stride()]
        self._up = [*pieces_of(flat, PIECE_BYTES), *others]
        self._print = None if others else Fingerprint(param for param, _ in flat)
        self._kept = self._now = torch.empty(0)

    def still_of(self, ranges: Sequence[BoundRange]) -> bool:
        """Return whether ``ranges`` are bound to the same memory, and in the same order of elements."""
        return _key(ranges) == self._key

    def on_host(self, index: int, side: int) -> BoundRange:
        """A range bound to the mirror, and to its state in the place ``side``."""
        if (index, side) not in self._on_host:
            bound = self._ranges[index]
            values = bound.shard.values_at(side, bound.start, bound.stop)
            self._on_host[index, side] = replace(bound, param=self._own[index], values=values)
        return self._on_host[index, side]

    def copy_down(self) -> None:
        """Issue the way down of all weights: the mirror is about to be written."""
        self.is_known = False
        self.lanes[0].copy_all(self._own, self._params)

    def compare(self, changed: Tensor) -> None:
        """Record in ``changed`` (``bool``, ``()``, on the host) whether somebody wrote, when the stream gets there."""
        assert self._print is not None
        with self.lanes[0].running():
            self._print.write(self._now, self._hashers[0])
            changed.copy_(torch.ne(self._now, self._kept).any(), non_blocking=True)

    def copy_up(self) -> Mark:
        """Issue the way up, and keep a fingerprint of what is then on the device."""
        up, hasher = self.lanes[1], self._hashers[1]
        up.copy_all([param for param, _ in self._up], [own for _, own in self._up])
        if self._print is not None:
            rows = self._print.rows
            with up.running():
                if len(self._kept) != rows:
                    self._kept, self._now = torch.empty(2, rows, dtype=torch.int64, device=hasher.weights.device)
                self._print.write(self._kept, hasher)
            self.is_known = True
        self.uploaded = up.mark()
        return self.uploaded


def like(source: Tensor, memory: Tensor) -> Tensor:
    """A tensor like ``source`` over ``memory``, a flat ``uint8`` tensor of as many bytes, dense."""
    stride = source.stride() if source.is_contiguous() else torch.empty_like(source, device="meta").stride()
    return memory.view(source.dtype).as_strided(source.shape, stride)


def _key(ranges: Sequence[BoundRange]) -> list[tuple[object, ...]]:
    return [(one.shard, one.address, one.start, one.param.shape, one.param.stride()) for one in ranges]


def _mirrored(bound: BoundRange) -> Tensor:
    mirror = bound.shard.mirror
    assert mirror is not None, "what the host updates has a mirror"
    itemsize = bound.param.element_size()
    return like(bound.param, mirror[bound.start * itemsize : bound.stop * itemsize])


def _flat(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
