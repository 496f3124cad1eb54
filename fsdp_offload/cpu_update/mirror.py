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


class MirroredBucket:
    """Host memory of a bucket that is kept from step to step.

    Attributes:
        ranges: all of them, bound to parameters on the device.
        uploaded: recorded behind the last way up of its parameters and behind their fingerprint.
    """

    def __init__(self, ranges: Sequence[BoundRange]) -> None:
        self.ranges = list(ranges)
        self.uploaded: Mark | None = None
        self._at: dict[tuple[int, int], BoundRange] = {}
        self._parts: dict[tuple[int, ...], MirroredPart] = {}
        self._known: MirroredPart | None = None  # whose weights are on the device what they are here
        self._weights = [_mirrored(bound) for bound in ranges]
        self._layouts = [(bound.param.shape, bound.param.stride()) for bound in ranges]

    def still_of(self, ranges: Sequence[BoundRange]) -> bool:
        """Return whether ``ranges`` are bound to the same memory, and in the same order of elements."""
        return len(ranges) == len(self.ranges) and all(
            (one is other or (one.shard is other.shard and one.address == other.address and one.start == other.start))
            and (other.param.shape, other.param.stride()) == layout
            for one, other, layout in zip(self.ranges, ranges, self._layouts, strict=True)
        )

    def on_host(self, index: int, side: int) -> BoundRange:
        """A range bound to the mirror, and to its state in the place ``side``."""
        found = self._at.get((index, side))
        if found is None:
            bound = self.ranges[index]
            values = bound.shard.values_at(side, bound.start, bound.stop)
            found = self._at[index, side] = replace(bound, param=self._weights[index], values=values)
        return found

    def part(self, indices: tuple[int, ...]) -> "MirroredPart":
        """Those ranges that take part in a step."""
        found = self._parts.get(indices)
        if found is None:
            if len(self._parts) >= _KEPT_PARTS:
                self._parts = {part.indices: part for part in (self._known,) if part is not None}
            weights = [self._weights[index] for index in indices]
            params = [self.ranges[index].param.data for index in indices]  # ``data``: main counts these writes
            state = (value for index in indices for value in self.ranges[index].values.values())
            state_bytes = sum(value.nbytes for value in state)
            found = self._parts[indices] = MirroredPart(indices, weights, params, state_bytes)
        return found

    def is_known(self, part: "MirroredPart") -> bool:
        """Return whether the mirror has what was last uploaded of ``part``."""
        return self._known is part

    def forget(self) -> None:
        """Forget what the mirror held: it is about to be written."""
        self._known = None

    def upload(self, part: "MirroredPart", up: Lane, hasher: Hasher) -> Mark:
        """Issue the way up of ``part``, and keep its fingerprint."""
        if part.copy_up(up, hasher):
            self._known = part
        self.uploaded = up.mark()
        return self.uploaded


class MirroredPart:
    """Some ranges of a bucket: their weights on the host, and their memory on the device.

    Attributes:
        indices: which ranges.
        state_bytes: of their state.
    """

    def __init__(self, indices: tuple[int, ...], weights: list[Tensor], params: list[Tensor], state_bytes: int) -> None:
        self.indices = indices
        self.state_bytes = state_bytes
        self._weights = weights
        self._params = params
        self._kept: Tensor | None = None
        self._now: Tensor | None = None
        dense = [_is_dense(param) and param.stride() == host.stride() for param, host in self._pairs()]
        flat = [(_flat(p), _flat(h)) for (p, h), is_dense in zip(self._pairs(), dense, strict=True) if is_dense]
        pieces = pieces_of(flat, PIECE_BYTES)
        self._up_to, self._up_from = [a for a, _ in pieces], [b for _, b in pieces]
        # What has to be rearranged on its way is copied one by one, and comes down each time.
        self._others = [pair for pair, is_dense in zip(self._pairs(), dense, strict=True) if not is_dense]
        self._print = None if self._others else Fingerprint(p for p, _ in flat)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._params, self._weights, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the mirrored parameters."""
        return sum(weights.nbytes for weights in self._weights)

    def copy_down(self, down: Lane) -> None:
        """Issue the way down of all weights."""
        if self._weights:
            down.copy_all(self._weights, self._params)

    def compare(self, changed: Tensor, hasher: Hasher) -> None:
        """Record in ``changed`` (``bool``, shape ``()``, on the host) whether somebody wrote, in the current stream.

        It waits for nothing: ``changed`` says it when the stream has got there.
        """
        assert self._print is not None and self._kept is not None
        if self._now is None:
            self._now = torch.empty_like(self._kept)
        self._print.write(self._now, hasher)
        changed.copy_(torch.ne(self._now, self._kept).any(), non_blocking=True)

    def copy_up(self, up: Lane, hasher: Hasher) -> bool:
        """Issue the way up; whether a fingerprint of what is then on the device is kept."""
        if self._up_to:
            up.copy_all(self._up_to, self._up_from)
        with up.running():
            for param, weights in self._others:
                param.copy_(weights)  # waits where it has to be rearranged
            if self._print is None:
                return False
            if self._kept is None:
                self._kept = torch.empty(self._print.rows, dtype=torch.int64, device=hasher.weights.device)
            self._print.write(self._kept, hasher)
        return True


_KEPT_PARTS = 2
"""One pattern of gradients at a time is the rule."""


def like(source: Tensor, memory: Tensor) -> Tensor:
    """A tensor like ``source`` over ``memory``, a flat ``uint8`` tensor of as many bytes, dense."""
    if source.is_contiguous():
        return memory.view(source.dtype).view(source.shape)
    stride = torch.empty_like(source, device="meta").stride()
    return memory.view(source.dtype).as_strided(source.shape, stride)


def _mirrored(bound: BoundRange) -> Tensor:
    mirror = bound.shard.mirror
    assert mirror is not None, "what the host updates has a mirror"
    itemsize = bound.param.element_size()
    return like(bound.param, mirror[bound.start * itemsize : bound.stop * itemsize])


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _flat(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
