"""The way back of parameters: their values from before an update, in host memory.

::

    a bucket's load is issued ──▶ keep: its parameters go down, beside it ──▶ the update waits for that
    the step is taken back    ──▶ restore: what has been updated comes up again

An update writes parameters where they are. Keeping the old values on the device would take as much memory as the
parameters; from what an update leaves they cannot be computed again. They are known long before the gradients are, so
that the link takes them when it likes.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..device.arena import Region
from ..device.lanes import Copy, Mark
from ..planning.buckets import aligned
from ..torch_compat.dtensor import has_inner_tensors, local_shard
from .executor import Pipeline
from .homes import Plan


class WayBack:
    """Host memory for the parameters in some buckets; one of the plan's regions."""

    def __init__(
        self, plan: Plan, pipeline: Pipeline, numbers: Iterable[int], device: torch.device, *, pin: bool
    ) -> None:
        """Take the memory for the parameters of the buckets ``numbers``, each of which :func:`is_flat`.

        Raises:
            RuntimeError: the driver refuses to lock it.
        """
        self._plan = plan
        self._pipeline = pipeline
        self._begins: dict[int, int] = {}
        self._buckets = {number: plan[number].bucket for number in numbers}
        nbytes = 0
        for number in self._buckets:
            self._begins[number] = nbytes
            nbytes += parameter_nbytes(plan, [number])
        self._region = Region(nbytes, device=device, pin=pin)
        plan.regions.append(self._region)
        self._kept: set[int] = set()  # in the step that runs
        self._marks: dict[int, Mark] = {}  # the end of the last copy of each bucket
        self._copies: dict[int, tuple[list[int], list[Copy]]] = {}  # by bucket: addresses of the parameters, and copies

    @property
    def nbytes(self) -> int:
        """Of all of them, padding included."""
        return self._region.nbytes

    def __contains__(self, number: int) -> bool:
        return number in self._begins

    def fits(self, numbers: Iterable[int]) -> bool:
        """Whether the parameters of these buckets have a place here."""
        return all(self._buckets.get(number) is self._plan[number].bucket for number in numbers)

    def free(self) -> None:
        """Give the memory back, when no copy uses it any more."""
        self._plan.regions = [region for region in self._plan.regions if region is not self._region]

    def begin(self) -> None:
        """A step begins; nothing is kept of the one before."""
        self._kept = set()

    def keep(self, number: int) -> None:
        """Start storing the parameters of a bucket, which nothing updates before :meth:`wait`."""
        if number in self._begins:
            copies, last = self._copies_of(number), self._marks.get(number)
            self._marks[number] = self._pipeline.keep_aside(copies, last, is_first=not self._kept)
            self._kept.add(number)

    def wait(self, number: int) -> None:
        """Let what follows on the current stream come after the copy of these parameters."""
        if number not in self._kept:
            self.keep(number)  # nothing of it was loaded
        self._pipeline.come_after(self._marks[number])

    def restore(self, numbers: Iterable[int]) -> None:
        """Give the parameters of these buckets the values that they had; the current stream waits for it."""
        numbers = [number for number in numbers if number in self._kept]
        copies = [(param, kept) for number in numbers for kept, param in self._copies_of(number)]
        self._pipeline.bring_back(numbers, copies)

    def _copies_of(self, number: int) -> list[Copy]:
        """From the device to the host; the same as before while the parameters stay where they are."""
        local = [local_shard(shard.param) for shard in self._plan[number].covers()]
        addresses = [tensor.data_ptr() for tensor in local]
        known, copies = self._copies.get(number, ([], []))
        if known != addresses or not copies:
            copies = list(self._make_copies(number))
            self._copies[number] = addresses, copies
        return copies

    def _make_copies(self, number: int) -> Iterator[Copy]:
        at = self._begins[number]
        for param in _ranges_of(self._plan, number):
            flat = param.view(torch.uint8)
            if flat.numel():
                yield self._region.bytes[at : at + flat.numel()], flat
            at += aligned(flat.numel())


def parameter_nbytes(plan: Plan, numbers: Iterable[int]) -> int:
    """Host memory that the parameters of these buckets take, padding included."""
    ranges = (param for number in numbers for param in _ranges_of(plan, number))
    return sum(aligned(param.numel() * param.element_size()) for param in ranges)


def is_flat(param: Tensor) -> bool:
    """Whether this rank's part of a parameter is one range of memory."""
    return local_shard(param).is_contiguous() and not has_inner_tensors(param)


def _ranges_of(plan: Plan, number: int) -> Iterator[Tensor]:
    planned = plan[number]
    for piece in planned.bucket.ranges:
        yield local_shard(planned.shards[piece.shard].param).detach().view(-1)[piece.start : piece.stop]
