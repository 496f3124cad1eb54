"""The parameters of one bucket on both sides: on the device, and where the host updates them.

::

    mirror (host) ──copy up──▶ device ──fingerprint──▶ kept
                               device ──fingerprint──▶ compared with it before the next update

While nobody else has written them, parameters never come down: what they are is in the mirror. Version counters do not
say whether somebody has (``param.data.copy_`` counts nothing), so the device compares what it holds with what was
uploaded. What is not known, because an update has failed or the memory is elsewhere, comes down again.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..device.lanes import PIECE_BYTES, Lane, Mark, pieces_of
from ..optimizers.bound_range import BoundRange
from .fingerprint import Fingerprint, Hasher


class Mirror:
    """The parameters of a bucket, and their host memory, which is kept from step to step.

    Attributes:
        ranges: all of them, bound to parameters on the device.
        is_known: the chosen ones are the same on the device, unless somebody else has written there.
        nbytes: of the chosen ones, which the last step has updated.
        uploaded: recorded behind the last way up of parameters and behind their fingerprint.
    """

    def __init__(self, ranges: Sequence[BoundRange]) -> None:
        self.ranges = list(ranges)
        self.is_known, self.nbytes = False, 0
        self.uploaded: Mark | None = None
        self._on_host: dict[tuple[int, int], BoundRange] = {}
        self._weights = [_mirrored(bound) for bound in ranges]
        self._key = _key(ranges)
        self._chosen: Sequence[int] = ()
        self._params: list[Tensor] = []  # on the device; behind them on the host, and both in pieces for the way up
        self._own: list[Tensor] = []
        self._up: list[tuple[Tensor, Tensor]] = []
        self._print: Fingerprint | None = None
        self._kept = self._now = torch.empty(0)

    def still_of(self, ranges: Sequence[BoundRange]) -> bool:
        """Return whether ``ranges`` are bound to the same memory, and in the same order of elements."""
        return _key(ranges) == self._key

    def on_host(self, index: int, side: int) -> BoundRange:
        """A range bound to the mirror, and to its state in the place ``side``."""
        found = self._on_host.get((index, side))
        if found is None:
            bound = self.ranges[index]
            values = bound.shard.values_at(side, bound.start, bound.stop)
            found = self._on_host[index, side] = replace(bound, param=self._weights[index], values=values)
        return found

    def choose(self, indices: Sequence[int]) -> None:
        """Choose the ranges that have a gradient in this step; no other update of this bucket is under way."""
        if indices == self._chosen:
            return
        self._chosen, self.is_known = indices, False
        self._own = [self._weights[index] for index in indices]
        self._params = [self.ranges[index].param.data for index in indices]  # ``data``: main counts these writes
        self.nbytes = sum(weights.nbytes for weights in self._own)
        pairs = list(zip(self._params, self._own, strict=True))
        # Ours are dense. What has to be rearranged on its way is copied in one piece, and comes down each time.
        flat = [(_flat(param), _flat(own)) for param, own in pairs if param.stride() == own.stride()]
        others = [(param, own) for param, own in pairs if param.stride() != own.stride()]
        self._up = [*pieces_of(flat, PIECE_BYTES), *others]
        self._print = None if others else Fingerprint(param for param, _ in flat)

    def copy_down(self, down: Lane) -> None:
        """Issue the way down of all weights: the mirror is about to be written."""
        self.is_known = False
        if self._own:
            down.copy_all(self._own, self._params)

    def compare(self, changed: Tensor, hasher: Hasher) -> None:
        """Record in ``changed`` (``bool``, shape ``()``, on the host) whether somebody wrote, in the current stream.

        It waits for nothing: ``changed`` says it when the stream has got there.
        """
        assert self._print is not None
        self._print.write(self._now, hasher)
        changed.copy_(torch.ne(self._now, self._kept).any(), non_blocking=True)

    def copy_up(self, up: Lane, hasher: Hasher) -> Mark:
        """Issue the way up, and keep a fingerprint of what is then on the device."""
        if self._up:
            up.copy_all([param for param, _ in self._up], [own for _, own in self._up])
        if self._print is not None:
            with up.running():
                if len(self._kept) != self._print.rows:
                    self._kept, self._now = torch.empty(
                        2, self._print.rows, dtype=torch.int64, device=hasher.weights.device
                    )
                self._print.write(self._kept, hasher)
            self.is_known = True
        self.uploaded = up.mark()
        return self.uploaded


def like(source: Tensor, memory: Tensor) -> Tensor:
    """A tensor like ``source`` over ``memory``, a flat ``uint8`` tensor of as many bytes, dense."""
    if source.is_contiguous():
        return memory.view(source.dtype).view(source.shape)
    stride = torch.empty_like(source, device="meta").stride()
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
