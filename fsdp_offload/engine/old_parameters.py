"""Host memory for parameters that guesses overwrite on the device, and for the spare homes of all that streams."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..core.buckets import Bucket
from ..device.arena import Region, aligned
from ..device.lanes import Copy
from ..fsdp.dtensor import has_inner_tensors, local_shard
from ..state.shard import StateShard
from .homes import Plan


class OldParameters:
    """The memory that it takes to take a step back.

    Attributes:
        buckets: numbers of those whose updates can be taken back.
    """

    def __init__(self, plan: Plan, device: torch.device, *, pin: bool) -> None:
        self._plan, self._device, self._pin = plan, device, pin
        self.buckets: frozenset[int] = frozenset()
        self._generation = -1  # of the plan, for which there is memory
        self._region: Region | None = None
        self._begins: dict[int, int] = {}
        self._pairs: dict[int, tuple[list[int], list[Copy]]] = {}

    @property
    def are_of_this_plan(self) -> bool:
        """Return whether :meth:`take` has seen all buckets."""
        return self._generation == self._plan.generation

    def take(self) -> str:
        """Take the memory, if there is as much; else say how much it would be."""
        plan = self._plan
        self.buckets, self._generation = frozenset(), plan.generation
        numbers = self._takeable()
        begins, nbytes = {}, 0
        for number in numbers:
            begins[number] = nbytes
            nbytes += sum(aligned(param.numel()) for param in self._ranges(number))
        plan.others = [one for one in plan.others if one is not self._region]
        self._region = None
        needed_bytes = plan.missing_spare_bytes() + nbytes
        try:
            plan.check_host_memory(needed_bytes)
            plan.take_spare_homes()
            self._region = Region(nbytes, device=self._device, pin=self._pin)
        except (MemoryError, RuntimeError) as error:
            return f"to take a step back needs {needed_bytes} bytes of host memory ({error})"
        plan.others.append(self._region)
        self._begins, self._pairs, self.buckets = begins, {}, frozenset(numbers)
        return ""

    def _takeable(self) -> list[int]:
        """Buckets of shards all of whose buckets are such: ranges of a parameter are updated in order."""
        plan = self._plan

        def is_takeable(shard: StateShard) -> bool:
            fixed = local_shard(shard.param).is_contiguous() and not has_inner_tensors(shard.param)
            return not (shard.on_host or shard.layout.left_out) and (fixed or shard.param in plan.streamed)

        left = {number for number in range(plan.bucket_count) if all(map(is_takeable, plan[number].covers()))}
        while torn := {n for n in left if any(not left.issuperset(shard.buckets) for shard in plan[n].covers())}:
            left -= torn
        return sorted(left)

    def _ranges(self, number: int) -> Iterable[Tensor]:
        """Flat bytes on the device of the parameters in a bucket that stay there."""
        planned = self._plan[number]
        for piece, shard in zip(planned.bucket.ranges, planned.covers(), strict=True):
            if shard.param not in self._plan.streamed:
                flat = local_shard(shard.param).detach().view(-1)
                yield flat[piece.start : piece.stop].view(torch.uint8)

    def pairs_of(self, bucket: Bucket) -> Sequence[Copy]:
        """Their host bytes and their device bytes."""
        addresses = [local_shard(param).data_ptr() for param in bucket.params]
        known, pairs = self._pairs.get(bucket.number, ([], []))
        if known != addresses:
            assert self._region is not None, "guesses begin when there is memory"
            pairs, at = [], self._begins[bucket.number]
            for param in self._ranges(bucket.number):
                pairs += [(self._region.bytes[at : at + param.numel()], param)] if param.numel() else []
                at += aligned(param.numel())
            self._pairs[bucket.number] = addresses, pairs
        return pairs
