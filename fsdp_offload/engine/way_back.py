"""The way back of parameters: their values from before an update, in host memory.

::

    the last forward before the step uses a group, or a bucket's load is issued ──▶ keep: its parameters go down
    the bucket is updated    ──▶ wait for that
    the step is taken back   ──▶ restore: what has been updated comes up again

An update writes parameters where they are. Keeping the old values on the device would take as much memory as the
parameters; from what an update leaves they cannot be computed again. They are known long before the gradients are, so
that they go down when the link has less to do: in the backward, stores of state take all of it.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..device.arena import Region
from ..device.lanes import Copy, Mark
from ..planning.buckets import aligned
from ..torch_compat.dtensor import has_inner_tensors, local_shard, version_of
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
        self._kept: set[int] = set()  # for the step that runs
        self._versions: dict[Tensor, tuple[int, int]] = {}  # of parameters that are kept, after their updates
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

    def forget(self) -> None:
        """Parameters have other values from now on."""
        self._kept, self._versions = set(), {}

    def keep(self, number: int) -> None:
        """Start storing the parameters of a bucket, which is not updated yet, unless they have been."""
        if number not in self._begins:
            return
        is_first = not self._kept
        written = self._forget_written(number)
        if number not in self._kept:
            copies, last = self._copies_of(number), self._marks.get(number)
            # The user may have written them on the current stream.
            self._marks[number] = self._pipeline.keep_aside(copies, last, after_compute=is_first or written)
            self._kept.add(number)
            self._note_versions(number)

    def _forget_written(self, number: int) -> bool:
        """Whether somebody has written parameters of a bucket since they were kept; they count as not kept then."""
        kept = [shard for shard in self._plan[number].covers() if shard.param in self._versions]
        shards = [shard for shard in kept if self._versions[shard.param] != version_of(shard.param)]
        for shard in shards:
            self._kept.difference_update(shard.buckets)
            del self._versions[shard.param]
        return bool(shards)

    def note_updated(self, number: int) -> None:
        """The update of a bucket has been issued: what it has written is not somebody else's."""
        self._note_versions(number)

    def _note_versions(self, number: int) -> None:
        for shard in self._plan[number].covers():
            self._versions[shard.param] = version_of(shard.param)

    def wait(self, number: int) -> None:
        """Let what follows on the current stream, which updates these parameters, come after their copy."""
        self.keep(number)  # nothing of it was loaded, or somebody has written them since
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
