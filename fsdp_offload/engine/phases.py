"""Everything off the device, and back: for loops that own their schedule, and for the sleep of a colocated trainer.

::

    after step():  offload  ──▶ resident state goes to host memory, staging is not needed any more   (asynchronous)
                   release  ──▶ what has arrived is freed, in the order of the current stream
                   reload   ──▶ resident state comes back, the first buckets are loaded               (asynchronous)

State that is not resident is at home already, or on its way: there is nothing to offload but the staging memory.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..device.lanes import Mark
from ..state.shard import Home, StateShard
from ..state.store import StateStore
from .executor import Pipeline
from .homes import Plan
from .lending import Lending
from .step import Stepping


class Phases:
    """Where the state of one optimizer is between its steps.

    Attributes:
        away: everything has left the device, or is on its way.
    """

    def __init__(self, plan: Plan, pipeline: Pipeline, steps: Stepping, lending: Lending) -> None:
        self.away = False
        self._plan = plan
        self._pipeline = pipeline
        self._steps = steps
        self._lending = lending
        self._leaving: list[Home] = []  # on the device; still read by copies to the host
        self._moved: Mark | None = None  # the end of the last copies of resident state

    def offload(self, states: StateStore) -> None:
        """Start moving resident state to the host. Loads that have begun for the next step are forgotten.

        Raises:
            MemoryError: host memory for the resident state, taken at the first time, does not suffice.
        """
        if self.away:
            return
        self._steps.take_back()
        if self._steps.begun is not None and self._steps.begun.has_updated:
            return  # the backward is updating state: it cannot leave before step()
        self._steps.drop()
        shards = self._plan.resident_shards()
        self._plan.take_host_places(shards)
        self._lending.adopt_user_tensors(self._plan.shards.values(), states)
        left = [shard.home for shard in shards]
        self._move(shards, [shard.host_places for shard in shards], states)
        self._moved = self._pipeline.copy_down(_bytes_of([shard.home for shard in shards], left)) if shards else None
        self._leaving += left
        self._steps.forget_bound()
        self.away = True

    def release(self) -> None:
        """Free the device memory of what has left, in the order of the current stream; the host does not wait."""
        if not self.away:
            return
        if self._moved is not None:
            self._pipeline.wait_on_current(self._moved)
        self._leaving = []
        self._steps.wait_for_all()  # lets go of gradients that updates beside the model have read
        self._steps.give_back_ring()

    def reload(self, states: StateStore) -> None:
        """Start moving resident state back.

        Raises:
            torch.OutOfMemoryError: it has no room on the device; it stays on the host then.
        """
        if not self.away:
            return
        shards = self._plan.resident_shards()
        self._lending.adopt_user_tensors(self._plan.shards.values(), states)
        if self._leaving and self._moved is not None:
            self._pipeline.wait_on_current(self._moved)  # nobody has released what may now be used again
            self._leaving = []
        homes = self._plan.homes_on_device(shards)
        here = [shard.home for shard in shards]
        self._move(shards, [[home] for home in homes], states)
        self._moved = self._pipeline.copy_up(_bytes_of(homes, here)) if shards else None
        self._steps.forget_bound()
        self.away = False

    def free_host_memory(self) -> None:
        """Give back the host memory of resident state that is on the device; the host waits for copies from it."""
        if self.away:
            return
        if self._moved is not None:
            self._moved.synchronize()
        self._plan.give_back_host_places()

    def park_new_state(self, shards: Iterable[StateShard]) -> None:
        """State that was added while the rest is away lives on the host as well. It holds nothing yet."""
        new = [shard for shard in shards if shard.resident and self.away]
        self._plan.take_host_places(new)
        for shard in new:
            shard.move(shard.host_places)

    def forget(self) -> None:
        """There is no state any more. Nothing is being copied."""
        self.away, self._leaving, self._moved = False, [], None

    def wait(self, shard: StateShard) -> None:
        """Let the host (for state on it) or the current stream see the home of resident state up to date."""
        if self._moved is None or not shard.resident:
            return
        if self.away:
            self._moved.synchronize()
        else:
            self._pipeline.wait_on_current(self._moved)

    @staticmethod
    def _move(shards: Iterable[StateShard], places: Iterable[list[Home]], states: StateStore) -> None:
        for shard, new in zip(shards, places, strict=True):
            state, old = states.get(shard.param), shard.homes
            shard.move(new)
            shard.point_param()
            state.update((name, home) for name, home in shard.homes.items() if state.get(name) is old[name])


def _bytes_of(targets: Iterable[Home], sources: Iterable[Home]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each pair of homes the leaves, as flat ``uint8`` tensors."""
    for target, source in zip(targets, sources, strict=True):
        for one, other in zip(target.all_leaves(), source.all_leaves(), strict=True):
            if one.numel():
                yield _flat(one), _flat(other)


def _flat(leaf: Tensor) -> Tensor:
    storage = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(leaf.untyped_storage())
    return storage[: leaf.nbytes]  # on the device a parameter is padded
