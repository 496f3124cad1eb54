"""Updates in the backward that are guesses: gradients stay as they are until ``step()``, or are multiplied by 1.

::

    clip_grad_norm_() is called ──▶ host memory for the way back ──▶ in each backward, while few are taken back:
        old parameters ──▶ host      updates; state and parameters that stream ──▶ spare homes; counters: copies
                                                     │
        factor 1, nothing else was touched ──▶ commit: spare homes become the homes, counters are written
        anything else                      ──▶ take back: places are forgotten, and step() updates as ever
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..device.arena import Region, aligned
from ..device.lanes import Copy, HostFlag
from ..fsdp.dtensor import has_inner_tensors, local_shard, version_of
from ..fsdp.spent_gradient import USED_UP, is_spent
from ..fsdp.watched_gradient import is_watched, unwatch, watch
from ..optimizers import Capabilities
from ..policy import OffloadPolicy
from ..state.shard import StateShard
from ..state.store import OwnCounters, StateStore
from .buckets import Bucket
from .homes import Plan
from .items import BytesAtHome, Item
from .loop import Core
from .updates import BucketUpdates
from .weights import Weights

logger = logging.getLogger(__name__)

REMEMBERED, STOPS_ABOVE, GOES_ON_BELOW = 20, 1 / 5, 1 / 10
"""Stop guessing above 20 % taken-back steps, resume at 10 %, over the last 20 steps."""


_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def weakly(method: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Wrap a bound method so that its callers, which its object has, do not keep that object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        bound = reference()
        assert bound is not None, "its object has the caller"
        result: _Result = bound(*args, **kwargs)
        return result

    return call


class WayBack:
    """Undoes the updates of one step, in the terms of the core.

    Attributes:
        pairs_of: host bytes and device bytes of the parameters in a bucket, as far as they stay on the device.
        takes: whether the update of a bucket may be a guess now.
    """

    def __init__(self, core: Core, pairs_of: Callable[[Bucket], Sequence[Copy]], takes: Callable[[Bucket], bool]):
        self.core, self.pairs_of, self.takes = core, pairs_of, takes
        self._before: dict[Item, tuple[BytesAtHome, object]] = {}  # homes, and their versions if users have looked
        self._stored: dict[Bucket, object] = {}  # versions of the old parameters that are on the host, or on their way

    def guard(self, bucket: Bucket) -> None:
        """Before the update of ``bucket``, store what take-back will load, unless it is on the host."""
        for item in bucket.streamed:
            if item not in self._before:
                if item.dirty:
                    self.core.cache.put(item)
                self._before[item] = item.home, item.version() if item.exposed else None
        for one in (bucket, *self.core.followers(bucket)):  # the update counts as a write of its parameters
            if one is bucket or one in self._stored:
                self.keep(one)

    def keep(self, bucket: Bucket) -> None:
        """Store the old parameters of ``bucket``, unless that has been done and nobody has written them since."""
        pairs, versions = self.pairs_of(bucket), [version_of(param) for param in bucket.params]
        if not pairs or self._stored.get(bucket) == versions:
            return
        lanes = self.core.lanes
        lanes.store.wait(lanes.compute.mark())  # R3: compute has waited for the last update; users write there, too
        lanes.store.copy(pairs)
        mark = lanes.store.mark()
        for item in bucket.weights:
            item.used["store"] = mark  # R1: the update writes what this reads
        self._stored[bucket] = versions

    def updated(self, bucket: Bucket) -> None:
        """The update of ``bucket`` has written its parameters: for other ranges of these it is not a user's write."""
        for other in self.core.followers(bucket):
            if other in self._stored:
                self._stored[other] = [version_of(param) for param in other.params]

    def is_written(self) -> bool:
        """Return whether somebody has written a home since its update."""
        return any(seen is not None and item.version() != seen for item, (_, seen) in self._before.items())

    def roll_back(self) -> None:
        """Undo all updates of this step, for what follows on the compute stream."""
        core, lanes = self.core, self.core.lanes
        core.wait_updated()  # updates read gradients that the user may write from now on
        core.cache.forget(self._before)
        for item, (home, _) in self._before.items():
            item.home = home
            item.home_read.clear()  # the update has waited for its loads, and the next one will for loads after them
            item.expose()  # tensors over this home are still the user's, and may be written before step()
        for bucket in filter(None, (*core.done, core.torn)):
            pairs = self.pairs_of(bucket)
            if pairs:
                for item in bucket.weights:
                    lanes.load.wait(item.ready, *item.used.values())  # R1: updates, gathers
                lanes.load.copy([(param, old) for old, param in pairs])
                mark = lanes.load.mark()
                for item in bucket.weights:
                    item.written(mark)
                lanes.compute.wait(mark)  # R3: the user may read them without a gather
        core.forget_updates()
        self.end()

    def end(self) -> None:
        """Nothing of this step is to be taken back any more."""
        self._before, self._stored = {}, {}
        self.core.guess = None


class UsedGradients(Protocol):
    """Gradients with which the backward has updated."""

    frees_all: bool

    def used(self) -> list[Tensor]:
        """Return the gradients that updates of this step have used, or may have."""

    def forget(self, *, unwatch: bool = True) -> None:
        """Forget which gradients updates of this step have used: for ``step()`` it is as if none had been."""


class Owner(Protocol):
    """The engine of the optimizer."""

    core: Core
    plan: Plan
    policy: OffloadPolicy
    device: torch.device
    pinned: bool
    weights: Weights | None

    @property
    def early(self) -> UsedGradients:
        """Gradients with which the backward has updated."""


Scale = Callable[[Sequence[Tensor]], None]


class Guesses:
    """Decides when the updates of one optimizer are guesses, and watches what makes them wrong.

    Attributes:
        announced: the loop clips with ``clip_grad_norm_`` of this package.
        unavailable: why updates wait for ``step()``; empty if they need not.
        blocked: this step has been taken back: its updates wait for ``step()``.
        committed, taken_back: steps.
    """

    def __init__(self, engine: Owner, capabilities: Capabilities, updates: BucketUpdates) -> None:
        """Belong to ``engine``, which is not kept alive, and to what runs its updates."""
        self._engine_ref, self._updates = weakref.ref(engine), updates
        self.announced = self.blocked = False
        self.committed = self.taken_back = 0
        self.unavailable = ""
        if not (capabilities.elementwise and capabilities.known):
            self.unavailable = "this optimizer does not work element by element, or is not in the tested table"
        self.way_back = WayBack(engine.core, weakly(self._pairs_of), weakly(self._takes))
        self._own: OwnCounters | None = None
        self._without_state: set[Tensor] = set()
        self._is_on = True
        self._history: deque[bool] = deque(maxlen=REMEMBERED)
        self._changed = self._learns_later = False
        self._flags = HostFlag(engine.device), HostFlag(engine.device)  # of this step, and of the one before
        self._all_one: Tensor | None = None  # the factors of this step
        self._put_off: list[tuple[list[Tensor], Scale]] = []
        self._watched: list[TensorWeakRef] = []  # gradients
        self._written: list[TensorWeakRef] = []  # parameters
        self._shared = WeakTensorKeyDictionary()  # gradients of which somebody may have a view, from an earlier step
        self._generation = -1  # of the plan, for which there is memory
        self._takeable: frozenset[int] = frozenset()  # numbers of buckets whose updates can be taken back
        self._region: Region | None = None  # old parameters
        self._begins: dict[int, int] = {}
        self._pairs: dict[int, tuple[list[int], list[Copy]]] = {}

    @property
    def _engine(self) -> Owner:
        engine = self._engine_ref()
        assert engine is not None, "this is an attribute of its engine"
        return engine

    @property
    def made(self) -> bool:
        """Return whether this step has guesses that are neither committed nor taken back."""
        core = self.way_back.core
        return core.guess is not None and core.begun

    @property
    def is_ready(self) -> bool:
        """Return whether updates in the backward are guesses."""
        ready = self.announced and self._is_on and not self.unavailable and not self._engine.early.frees_all
        return ready and bool(self._takeable) and self._generation == self._engine.plan.generation

    @property
    def sentence(self) -> str:
        """For the report; empty where the loop does not clip with our function."""
        if not self.announced:
            return ""
        begun = 'overlap="iteration": the loop clips; '
        if self.unavailable:
            return f"{begun}updates wait for step(), as {self.unavailable}."
        taken = f"{self.taken_back} of {self.committed + self.taken_back} such steps were taken back"
        changed = f"in {sum(self._history)} of the last {len(self._history)} steps gradients were changed"
        if not self._is_on:
            return f"{begun}{changed}, so that updates wait for step() until few are. {taken}."
        return f"{begun}updates run ahead of it. {taken}; {changed}."

    # A step -----------------------------------------------------------------------------------------------------------

    def may_begin(self) -> bool:
        """Return whether the updates of the backward that runs are guesses."""
        engine = self._engine
        if not self.is_ready or self.blocked or self._updates.writes_gradients:
            return False
        # A checkpoint's writer may still be reading the spare homes: then there are no guesses in this step.
        return not any(one.spare is not None and one.spare.is_read() for one in engine.plan.housed())

    def choose(self, optimizer: Optimizer, states: StateStore) -> None:
        """Ahead of an update in the backward: choose whether the updates of this step are guesses."""
        # Updates with Nesterov's momentum write gradients, where they are those of torch._foreach_*.
        is_guess = self.may_begin() and not any(group.get("nesterov") for group in optimizer.param_groups)
        self.way_back.core.guess = self.way_back if is_guess else None
        shards = self._engine.plan.shards.items() if is_guess else ()
        self._without_state = {param for param, shard in shards if shard.homes and not states.get(param)}

    def begin(self, states: StateStore) -> None:
        """A step begins with guesses: updates see copies of what they may write in ``states``."""
        self._own = OwnCounters(states, self._engine.plan.shards)
        self._updates.begin_guesses(self._own)

    def _takes(self, bucket: Bucket) -> bool:
        if self.blocked or bucket.number not in self._takeable or any(i.nbytes and i.is_held() for i in bucket.weights):
            return False
        engine = self._engine
        shards = [engine.plan.shards[param] for param in bucket.params]
        return not any(
            (grad is None and len(shard.buckets) > 1)  # its bytes would stay behind when its neighbours move
            or (
                grad is not None
                and (grad in self._shared or not is_watched(grad) or shard.param in self._without_state)
            )
            for shard in shards
            for grad in [shard.param.grad]
        )

    def keep_ahead(self, number: int) -> None:
        """A forward uses the parameters of a group: store them now if it is the last forward before its updates."""
        core = self.way_back.core
        if core.begun or self.blocked or not core.reductions.next_is_final(number) or not self.is_ready:
            return
        for bucket in core.buckets_of(number):
            if bucket.number in self._takeable:
                self.way_back.keep(bucket)

    def settle(self) -> None:
        """``step()`` is called: commit the guesses, or take them back. The host waits only for the factor."""
        if not self.made:
            return
        if self._all_one is not None and not self._flags[0].get():
            self.take_back()
            return
        core, own = self.way_back.core, self._own
        assert own is not None
        lane = core.lanes.update
        lane.wait(core.lanes.compute.mark())  # R1: the user may still be reading counters there
        lane.run(own.commit)
        core.updated = lane.mark()
        self._updates.commit_guesses(own.states)
        self.committed += 1
        self._put_off, self._own = [], None
        self.way_back.end()

    def take_back(self) -> None:
        """Undo what this step has updated: parameters, state and counters are those from before the backward."""
        if not self.made:
            return
        self.blocked = self._changed = True
        self.taken_back += 1
        self.way_back.roll_back()
        self._updates.drop_guesses()
        self._own = None
        self._engine.early.forget(unwatch=False)  # a view of a gradient is still noticed
        _unwatch(self._written)
        self._scale_now()

    def step_ended(self) -> None:
        """``step()`` has issued everything, or gradients were cleared instead: decide about the next one."""
        if self._learns_later:
            self._history.append(not self._flags[1].get())
        self._learns_later = False
        if self._changed or self._all_one is None:
            self._history.append(self._changed)
        else:
            self._flags, self._learns_later = self._flags[::-1], True
        self._changed = self.blocked = False
        self._all_one, self._put_off = None, []
        self.way_back.end()
        if not self.announced or self.unavailable:
            return
        share, was_on = sum(self._history) / max(1, len(self._history)), self._is_on
        self._is_on = share <= (STOPS_ABOVE if was_on else GOES_ON_BELOW)
        if was_on != self._is_on:
            logger.info("%s", self.sentence)
        if self._is_on and self._generation != self._engine.plan.generation and not self._engine.early.frees_all:
            self._take_memory()

    def skip(self) -> None:
        """Gradients are about to be cleared; if there was a backward, this ends its step."""
        self.take_back()
        if self.blocked or self._all_one is not None:
            self.unwatch()
            self.step_ended()

    # Clipping ---------------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """``clip_grad_norm_`` is called.

        Raises:
            RuntimeError: the backward has updated with gradients that may be clipped, and that cannot be undone.
        """
        engine, core = self._engine, self.way_back.core
        if not engine.policy.updates_in_backward:
            return
        if (core.done and not self.made) or any(map(is_spent, engine.plan.shards)):
            raise RuntimeError(USED_UP)
        self.announced, core.frees_gradients = True, False
        self._decide_now()

    def put_off(self, is_one: Tensor, scale: Scale) -> set[int]:
        """Note whether a factor is 1. Returns ids of gradients that updates have used: only take-back scales these."""
        self._all_one = is_one if self._all_one is None else self._all_one & is_one
        self._flags[0].put(self._all_one)
        if not self.made:
            return set()
        used = self._engine.early.used()
        self._put_off.append((used, scale))
        return {id(grad) for grad in used}

    def _decide_now(self) -> None:
        """Somebody looks at gradients whose scaling was put off."""
        if self._put_off and self.made and not self._flags[0].get():
            self.take_back()
        self._put_off = []

    def _scale_now(self) -> None:
        put_off, self._put_off = self._put_off, []
        for grads, scale in put_off:
            scale(grads)

    # What is done with gradients and parameters (:class:`Watcher`) --------------------------------------------------

    def watch(self, gradients: Iterable[Tensor], written: Iterable[Tensor] = ()) -> None:
        """Watch gradients that updates may use, and parameters that they have ``written``."""
        for tensors, references in ((gradients, self._watched), (written, self._written)):
            for tensor in tensors:
                if not is_watched(tensor):
                    watch(tensor, self)
                    references.append(TensorWeakRef(tensor))

    def unwatch(self) -> None:
        """Watch nothing any more."""
        _unwatch(self._watched)
        _unwatch(self._written)

    def reads(self, tensors: Sequence[Tensor]) -> None:
        """As :class:`Watcher`: parameters are what they were before, and gradients what clipping has left."""
        if any(tensor.requires_grad for tensor in tensors):
            self.take_back()
        else:
            self._decide_now()

    def writes(self, tensors: Sequence[Tensor]) -> None:
        """As :class:`Watcher`."""
        self.take_back()
        self.blocked = self._changed = True

    def shares(self, tensors: Sequence[Tensor]) -> None:
        """As :class:`Watcher`: what becomes of that memory is not seen any more, in this step and in later ones."""
        self._shared.update((tensor, None) for tensor in tensors)
        self.writes(tensors)

    # Memory -----------------------------------------------------------------------------------------------------------

    def _take_memory(self) -> None:
        """Take the host memory that it needs to take a step back, if there is as much."""
        engine, plan = self._engine, self._engine.plan
        self._takeable, self._generation = frozenset(), plan.generation
        numbers = self._takeable_buckets()
        begins, nbytes = {}, 0
        for number in numbers:
            begins[number] = nbytes
            nbytes += sum(aligned(param.numel()) for param in self._old_ranges(number))
        plan.others = [one for one in plan.others if one is not self._region]
        self._region = None
        needed_bytes = plan.missing_spare_bytes() + nbytes
        try:
            plan.check_host_memory(needed_bytes)
            plan.take_spare_homes()
            self._region = Region(nbytes, device=engine.device, pin=engine.pinned)
        except (MemoryError, RuntimeError) as error:
            self.unavailable = f"to take a step back needs {needed_bytes} bytes of host memory ({error})"
            logger.warning("%s", self.sentence)
            return
        plan.others.append(self._region)
        self._begins, self._pairs, self._takeable = begins, {}, frozenset(numbers)

    def _takeable_buckets(self) -> list[int]:
        """Buckets of shards all of whose buckets are such: ranges of a parameter are updated in order."""
        plan = self._engine.plan

        def is_takeable(shard: StateShard) -> bool:
            fixed = local_shard(shard.param).is_contiguous() and not has_inner_tensors(shard.param)
            return not (shard.on_host or shard.layout.left_out) and (fixed or self._streams(shard))

        left = {number for number in range(plan.bucket_count) if all(map(is_takeable, plan[number].covers()))}
        while torn := {n for n in left if any(not left.issuperset(shard.buckets) for shard in plan[n].covers())}:
            left -= torn
        return sorted(left)

    def _streams(self, shard: StateShard) -> bool:
        weights = self._engine.weights
        return weights is not None and shard.param in weights.parts

    def _old_ranges(self, number: int) -> Iterable[Tensor]:
        """Flat bytes on the device of the parameters in a bucket that stay there."""
        planned = self._engine.plan[number]
        for piece in planned.bucket.ranges:
            shard = planned.arena.shards[piece.shard]
            if not self._streams(shard):
                flat = local_shard(shard.param).detach().view(-1)
                yield flat[piece.start : piece.stop].view(torch.uint8)

    def _pairs_of(self, bucket: Bucket) -> Sequence[Copy]:
        addresses = [local_shard(param).data_ptr() for param in bucket.params]
        known, pairs = self._pairs.get(bucket.number, ([], []))
        if known != addresses:
            assert self._region is not None, "guesses begin when there is memory"
            pairs, at = [], self._begins[bucket.number]
            for param in self._old_ranges(bucket.number):
                pairs += [(self._region.bytes[at : at + param.numel()], param)] if param.numel() else []
                at += aligned(param.numel())
            self._pairs[bucket.number] = addresses, pairs
        return pairs


def _unwatch(references: list[TensorWeakRef]) -> None:
    for reference in references:
        if (tensor := reference()) is not None:
            unwatch(tensor)
    references.clear()
