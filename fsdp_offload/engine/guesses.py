"""Updates in the backward: which gradients they have used, who has touched these since, and those that are guesses.

A guess: gradients stay as they are until ``step()``, or are multiplied by 1.

::

    clip_grad_norm_() is called ──▶ host memory for the way back ──▶ in each backward, while few are taken back:
        old parameters ──▶ host      updates; state and parameters that stream ──▶ spare homes; counters: copies
                                                     │
        factor 1, nothing else was touched ──▶ commit: spare homes become the homes, counters are written
        anything else                      ──▶ take back: places are forgotten, and step() updates as ever
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..core.buckets import Bucket
from ..core.loop import Core, WayBack
from ..device.arena import Region, aligned
from ..device.lanes import Copy, HostFlag
from ..fsdp.dtensor import has_inner_tensors, local_shard, version_of, versions_of
from ..fsdp.gradients import USED_UP, is_spent, is_watched, note_freed, spend, unwatch, watch
from ..fsdp.optim import scaler_decides
from ..state.shard import StateShard
from ..state.store import StateStore, is_exchanged
from .homes import Plan, home_of
from .step import Contents, Step

logger = logging.getLogger(__name__)

REMEMBERED, STOPS_ABOVE, GOES_ON_BELOW = 20, 1 / 5, 1 / 10
"""Stop guessing above 20 % taken-back steps, resume at 10 %, over the last 20 steps."""

_CLEAN_STEPS = 2
"""Updates move into the backward after so many steps in which nobody touched gradients before ``step()``."""

Version = tuple[int, int]
Scale = Callable[[Sequence[Tensor]], None]


AnyMethod = TypeVar("AnyMethod", bound=Callable[..., Any])


def _from_any_thread(method: AnyMethod) -> AnyMethod:
    """Let no other thread in meanwhile, and undo updates in the stream that trains, whose kernels come behind that."""

    @functools.wraps(method)
    def call(self: "Guesses", *args: Any) -> Any:
        core = self._core
        with core.lock, core.stream.running() if core.is_foreign else nullcontext():
            return method(self, *args)

    return cast(AnyMethod, call)


class Ahead:
    """Holds what backwards do ahead of one ``step()``, and the loop with their gradients. It is dropped with that step.

    Attributes:
        way_back: undoes it; a forward begins to prepare that.
        is_guess: it is to be undone if it turns out wrong.
        is_off: the updates wait for ``step()``: what they had done has been taken back, or would be.
        is_touched: a loop that does not clip has touched gradients.
        used: by parameter, the gradient that an update has used or would have; its version, and that of the parameter
            then.
        freed: parameters whose gradient was let go of with its update, and their versions then.
        without_state: parameters that have none.
        all_one: whether all factors of clipping are 1.
        put_off: gradients that clipping has not scaled, and how to.
        ended: parameters updated in a step that a load has ended: ``step()`` leaves their used gradients out.
    """

    def __init__(self, way_back: WayBack) -> None:
        self.way_back = way_back
        self.is_guess = self.is_off = self.is_touched = False
        self.used: dict[Tensor, tuple[Tensor, Version, Version]] = {}
        self.freed: dict[Tensor, Version] = {}
        self.without_state: set[Tensor] = set()
        self.all_one: Tensor | None = None
        self.put_off: list[tuple[list[Tensor], Scale]] = []
        self.ended: set[Tensor] = set()


class Guesses:
    """Decides when the updates of one optimizer are guesses, and watches what makes them wrong.

    Attributes:
        announced: the loop clips with ``clip_grad_norm_`` of this package.
        unavailable: why updates wait for ``step()``; empty if they need not.
        committed, taken_back: steps.
        old: the memory that it takes to take a step back.
        ahead: of the step to come.
    """

    def __init__(self, core: Core, contents: Contents, names: Mapping[Tensor, str]) -> None:
        self._core, self._contents, self._names = core, contents, names
        capabilities = contents.layouts.capabilities
        self.old = OldParameters(contents.plan)
        self.announced = False
        self.committed = self.taken_back = 0
        self.unavailable = ""
        if not (capabilities.elementwise and capabilities.known):
            self.unavailable = "this optimizer does not work element by element, or is not in the tested table"
        self.ahead = Ahead(WayBack(core))
        self._is_on = True
        self._history: deque[bool] = deque(maxlen=REMEMBERED)
        self._learns_later = False
        self._flags = HostFlag(core.cache.device), HostFlag(core.cache.device)  # of this step, and of the one before
        self._watched: list[TensorWeakRef] = []  # gradients
        self._written: list[Tensor] = []  # parameters
        self._shared = WeakTensorKeyDictionary()  # gradients of which somebody may have a view, from an earlier step
        self._clean_steps = 0  # -1: somebody has touched gradients, and updates stay in step() for good

    @property
    def made(self) -> bool:
        """Return whether this step has guesses that are neither committed nor taken back."""
        return self.ahead.is_guess and self._core.updates is not None

    @property
    def step(self) -> Step | None:
        """The step under way."""
        return cast(Step | None, self._core.updates)

    @property
    def is_ready(self) -> bool:
        """Return whether updates in the backward are guesses."""
        ready = self.announced and self._is_on and not self.unavailable and not self._core.frees_all
        return ready and bool(self.old.begins)

    @property
    def is_clean(self) -> bool:
        """Return whether the first steps have shown that nobody touches gradients before ``step()``."""
        return self._clean_steps >= _CLEAN_STEPS

    @property
    def sentence(self) -> str:
        """For the report; empty where updates need not be guesses."""
        if not self.announced and self._clean_steps >= 0:
            return ""
        if not self.announced:
            return (
                'overlap="iteration": the loop changes gradients before step(), so all updates wait for it. To clip, '
                "call fsdp_offload.clip_grad_norm_(optimizer, max_norm) from the first step on."
            )
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
        if not self.is_ready or self.ahead.is_off or self._contents.writes_gradients:
            return False
        # A checkpoint's writer may still be reading the spare homes: then there are no guesses in this step.
        return not [one for one in self._contents.plan.housed() if (spare := one.spare) is not None and spare.is_read()]

    def choose(self, optimizer: Optimizer, states: StateStore) -> None:
        """Ahead of an update in the backward: choose whether the updates of this step are guesses."""
        # Updates with Nesterov's momentum write gradients, where they are those of torch._foreach_*.
        ahead = self.ahead
        ahead.is_guess = self.may_begin() and not any(group.get("nesterov") for group in optimizer.param_groups)
        shards = self._contents.plan.shards.items() if ahead.is_guess else ()
        ahead.without_state = {param for param, shard in shards if not states.get(param) and shard.homes}

    def takes(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Return those that may be updated now; guesses that may not be made wait for ``step()``."""
        if not self.ahead.is_guess:
            return buckets
        found: list[Bucket] = []
        waiting: set[int] = set()
        for bucket in () if self.ahead.is_off else buckets:
            is_next = waiting.isdisjoint(bucket.after)  # ranges of a parameter are updated in order
            if is_next and bucket in self.old.begins and all(map(self._may_use, bucket.params)):
                bucket.old = self.old.pairs_of(bucket)
                found.append(bucket)
            else:
                waiting.add(bucket.number)
        return found

    def _may_use(self, param: Tensor) -> bool:
        if (grad := param.grad) is None:
            return (
                len(self._contents.plan.shards[param].buckets) == 1
            )  # else bytes would stay behind when neighbours move
        return grad not in self._shared and is_watched(grad, self) and param not in self.ahead.without_state

    def keep_ahead(self, number: int) -> None:
        """A forward uses the parameters of a group: store them now if it is the last forward before its updates."""
        core = self._core
        is_last = core.updates is None and core.reductions.next_is_final(number)
        for bucket in core.of_group.get(number, ()) if is_last and not self.ahead.is_off and self.is_ready else ():
            if bucket in self.old.begins:
                self.watch((), self._on_device(bucket.params))
                bucket.old = self.old.pairs_of(bucket)
                self.ahead.way_back.keep(bucket)

    def before_gather(self, number: int) -> None:
        """Parameters of a group are about to be read: take guesses back that have changed them."""
        if self.made and self._core.has_updated(number):
            self.take_back()

    def settle(self) -> None:
        """``step()`` is called: commit the guesses, or take them back. The host waits only for the factor."""
        if not self.made:
            return
        ahead = self.ahead
        if ahead.all_one is not None and not self._flags[0].get():
            self.take_back()
            return
        core, step = self._core, self.step
        assert step is not None and step.own is not None
        step.way_back, ahead.is_guess = None, False  # first: an interrupt leaves nothing that can be taken back
        lane = core.lanes.update
        lane.wait(core.lanes.compute.mark())  # R1: the user may still be reading counters there
        lane.wait(*core.updated.values())  # R3: updates in another lane may still be writing their copies
        lane.run(step.own.commit)
        core.updated = {lane.name: (mark := lane.mark())}
        core.lanes.update_kept.wait(mark)  # R3: updates that step() runs there count on from these
        step.certain()
        self.committed += 1
        ahead.put_off = []

    def take_back(self) -> None:
        """Undo what this step has updated: parameters, state and counters are those from before the backward."""
        if not self.made:
            return
        ahead = self.ahead
        ahead.is_off = True
        self.taken_back += 1
        for bucket in (*self._core.done, *self._core.torn):
            bucket.old = self.old.pairs_of(bucket)  # the user may have moved parameters
        ahead.way_back.roll_back()
        ahead.is_guess = False
        ahead.used = {}  # they are still watched: a view of a gradient is noticed
        self._unwatch_parameters()
        put_off, ahead.put_off = ahead.put_off, []
        for grads, scale in put_off:
            scale(grads)

    def step_ended(self, scaler_decides: bool) -> None:
        """``step()`` has issued everything: learn from it. A GradScaler that decides about a step changes gradients."""
        ahead = self._end()
        for param in ahead.freed:
            note_freed(param)
        if ahead.used and 0 <= self._clean_steps < _CLEAN_STEPS and not self.announced:
            if ahead.is_touched or _exchanged(ahead.used) or scaler_decides:
                logger.info("gradients are changed between the backward and step(): all updates stay in step()")
                self._clean_steps = -1
            else:
                self._clean_steps += 1
        self._decide_on_next(ahead)

    def _end(self) -> Ahead:
        """Begin with the next step: first where one ends, so that an interrupt leaves nothing of that one."""
        ahead, self.ahead = self.ahead, Ahead(WayBack(self._core))
        return ahead

    def _decide_on_next(self, ahead: Ahead) -> None:
        if self._learns_later:
            self._history.append(not self._flags[1].get())
        self._learns_later = False
        if ahead.is_off or ahead.all_one is None:
            self._history.append(ahead.is_off)
        else:
            self._flags, self._learns_later = self._flags[::-1], True
        if not self.announced or self.unavailable:
            return
        share, was_on = sum(self._history) / max(1, len(self._history)), self._is_on
        self._is_on = share <= (STOPS_ABOVE if was_on else GOES_ON_BELOW)
        if was_on != self._is_on:
            logger.info("%s", self.sentence)
        if self._is_on and not self.old.is_known and not self._core.frees_all:
            self.unavailable = self.old.take()
            if self.unavailable:
                logger.warning("%s", self.sentence)

    def skip(self) -> None:
        """Gradients are about to be cleared; if there was a backward, this ends its step."""
        self.take_back()
        if self.ahead.is_off or self.ahead.all_one is not None:
            self.unwatch()
            self._decide_on_next(self._end())

    # Clipping ---------------------------------------------------------------------------------------------------------

    @_from_any_thread
    def announce(self) -> None:
        """``clip_grad_norm_`` is called.

        Raises:
            RuntimeError: the backward has updated with gradients that may be clipped, and that cannot be undone.
        """
        core = self._core
        if core.mode.begin != "final":
            return
        if (core.done and not self.made) or any(map(is_spent, self._contents.plan.shards)):
            raise RuntimeError(USED_UP)
        if not self.announced:
            self.unwatch()  # gradients of a loop of which it was not known that it clips
        self.announced, core.frees_gradients = True, False
        self._decide_now()

    @_from_any_thread
    def put_off(self, is_one: Tensor, scale: Scale) -> set[int]:
        """Note whether a factor is 1. Returns ids of gradients that updates have used: only take-back scales these."""
        ahead = self.ahead
        ahead.all_one = is_one if ahead.all_one is None else ahead.all_one & is_one
        self._flags[0].put(ahead.all_one)
        if not self.made:
            return set()
        used = [grad for grad, _, _ in ahead.used.values()]
        ahead.put_off.append((used, scale))
        return {id(grad) for grad in used}

    def _decide_now(self) -> None:
        """Somebody looks at gradients whose scaling was put off."""
        if self.ahead.put_off and self.made and not self._flags[0].get():
            self.take_back()
        self.ahead.put_off = []

    # Gradients that updates ahead of step() have used, or would have --------------------------------------------------

    def note(self, params: Iterable[Tensor]) -> None:
        """Watch gradients before it is known whether this step updates early, to see whether somebody changes them."""
        if self.announced:
            if not (self._core.frees_all or self.unavailable):
                shards = self._contents.plan.shards
                self.watch([grad for param in params if param in shards and (grad := param.grad) is not None])
        elif self._core.mode.begin == "final" and 0 <= self._clean_steps < _CLEAN_STEPS and not self._core.frees_all:
            self.watch_used(params)

    def watch_used(self, params: Iterable[Tensor]) -> None:
        """Watch gradients with which the backward has updated ``params``."""
        used = {param: grad for param in params if (grad := param.grad) is not None}
        grads = used.values()
        self.watch(() if self.made else grads, self._on_device(params))
        self.ahead.used.update(zip(used, zip(grads, versions_of(grads), versions_of(used), strict=True), strict=True))

    def _on_device(self, params: Iterable[Tensor]) -> Iterable[Tensor]:
        streamed = self._contents.plan.streamed
        return [param for param in params if param not in streamed] if streamed else params

    def spend(self, params: Iterable[Tensor]) -> None:
        """Let go of gradients whose updates have all been issued."""
        done = {bucket.number for bucket in self._core.done}
        for param in params:
            shard = self._contents.plan.shards[param]
            if shard.group < 0:
                continue  # it has left the param groups: its gradient has not been used, and goes on adding up
            if param.grad is not None and not is_spent(param) and done.issuperset(shard.buckets):
                self.ahead.freed[param] = version_of(param)
                spend(param)

    def forget(self) -> None:
        """Forget which gradients updates of this step have used: for ``step()`` it is as if none had been."""
        self.unwatch()
        self._end()

    def look(self) -> None:
        """``step()`` is called: note what the loop has done since the backward, and watch no more."""
        self.unwatch()
        self.ahead.is_touched |= bool(self.written())

    def written(self) -> list[Tensor]:
        """List parameters that somebody else has written since their update, as their versions tell."""
        ahead = self.ahead
        seen = {param: version for param, (_, _, version) in ahead.used.items()} | ahead.freed
        now = versions_of(seen)
        return [param for param, version in zip(seen, now, strict=True) if version != seen[param]]

    def problem(self, optimizer: Optimizer, states: StateStore, kwargs: Mapping[str, Any]) -> str:
        """Say what differs between this step and the one that the backward has begun; empty: nothing."""
        step, ahead = self.step, self.ahead
        if step is None:
            return ""
        if ahead.is_touched and (written := self.written()):
            return f"{self._names.get(written[0], 'a parameter')} has been written since then"
        exchanged = [*(param for param in ahead.freed if not is_spent(param)), *_exchanged(ahead.used)]
        if exchanged:
            return f"the gradient of {self._names.get(exchanged[0], 'a parameter')} has been changed since then"
        if ahead.is_touched:
            return "gradients have been changed since then"
        done = self._core.done
        used = set[StateShard]().union(*step.used.values())
        if self.made:  # all bytes of a bucket move to the spare home
            used = {shard for bucket in done for shard in home_of(bucket).shards}
        exposed = [home for bucket in done if (home := bucket.state.home).exposed_at is not None]
        is_written = any(home.seen != home.version() for home in exposed)
        if is_written or self._are_exchanged(used, states):
            return "optimizer.state has changed since then"
        if scaler_decides(optimizer, kwargs):
            return "a GradScaler decides only now whether there is a step"
        is_same = step.divided.still_starts_from(optimizer) and self._contents.groups.are_as_before(optimizer)
        return "" if is_same else "hyperparameters have changed since then"

    def _are_exchanged(self, shards: Iterable[StateShard], states: StateStore) -> bool:
        """Return whether somebody has put other tensors in the place of homes, or deleted the state with them."""
        for shard in shards:
            state = states.get(shard.param)
            # In a bucket of guesses some have no state, and a deletion takes them back; the CPU fills an entry later.
            is_gone = not state and not (shard.on_host and states.has(shard.param))
            if is_exchanged(shard, state) or (is_gone and shard.homes and not self.made):
                return True
        return False

    # What is done with gradients and parameters (:class:`Watcher`) --------------------------------------------------

    def watch(self, gradients: Iterable[Tensor], written: Iterable[Tensor] = ()) -> None:
        """Watch gradients that updates may use, and parameters that they have ``written``."""
        self._watched += map(TensorWeakRef, watch(gradients, self))
        self._written += watch(written, self)

    def unwatch(self) -> None:
        unwatch([tensor for reference in self._watched if (tensor := reference()) is not None])
        self._watched.clear()
        self._unwatch_parameters()

    def _unwatch_parameters(self) -> None:
        unwatch(self._written)
        self._written.clear()

    @_from_any_thread
    def reads(self, tensors: Sequence[Tensor]) -> None:
        """As :class:`Watcher`: parameters are what they were before, and gradients what clipping has left."""
        if self._tell_by_version(tensors):
            return
        if any(tensor.requires_grad for tensor in tensors):
            self.take_back()
        else:
            self._decide_now()

    @_from_any_thread
    def writes(self, tensors: Sequence[Tensor]) -> None:
        if not self._tell_by_version(tensors):
            self._note_write()

    def _note_write(self) -> None:
        if not self.announced:
            self.ahead.is_touched = True
            return
        self.take_back()
        self.ahead.is_off = True

    @_from_any_thread
    def shares(self, tensors: Sequence[Tensor]) -> None:
        """As :class:`Watcher`: what becomes of that memory is not seen any more, in this step and in later ones."""
        if not self._tell_by_version(tensors):
            self._shared.update((tensor, None) for tensor in tensors if not tensor.requires_grad)
            self._note_write()

    def _tell_by_version(self, tensors: Sequence[Tensor]) -> bool:
        """Parameters may be looked at, and written, until an update that is a guess has written them."""
        written = self.ahead.used if self.made else ()
        return all(tensor.requires_grad and tensor not in written for tensor in tensors)


def _exchanged(used: Mapping[Tensor, tuple[Tensor, Version, Version]]) -> list[Tensor]:
    now = versions_of([grad for grad, _, _ in used.values()])
    changed = zip(used.items(), now, strict=True)
    return [param for (param, (grad, seen, _)), version in changed if param.grad is not grad or version != seen]


class OldParameters:
    """The memory that it takes to take a step back.

    Attributes:
        begins: of each bucket whose updates can be taken back, the offset of its first byte.
        is_known: which these are.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._region: Region | None = None
        self.forget()

    def forget(self) -> None:
        """The buckets of the plan are others: nothing is known of them."""
        self.begins: dict[Bucket, int] = {}
        self.is_known = False
        self._pairs: dict[Bucket, tuple[list[int], list[Copy]]] = {}
        for bucket in self._plan.buckets:
            bucket.old = ()  # its memory goes

    def take(self) -> str:
        """Take the memory, if there is as much; else say how much it would be."""
        plan = self._plan
        self.forget()
        self.is_known, buckets = True, self._takeable()
        begins, nbytes = {}, 0
        for bucket in buckets:
            begins[bucket] = nbytes
            nbytes += sum(aligned(param.numel()) for param in self._ranges(bucket))
        plan.others = [one for one in plan.others if one is not self._region]
        self._region = None
        needed_bytes = plan.missing_spare_bytes() + nbytes
        try:
            plan.check_host_memory(needed_bytes)
            region = plan.region(nbytes)
            plan.take_spare_homes()
        except (MemoryError, RuntimeError) as error:
            return f"to take a step back needs {needed_bytes} bytes of host memory ({error})"
        self._region = region
        plan.others.append(region)
        self.begins = begins
        return ""

    def _takeable(self) -> list[Bucket]:
        """Buckets of shards all of whose buckets are such: ranges of a parameter are updated in order."""
        plan = self._plan

        def is_takeable(shard: StateShard) -> bool:
            fixed = local_shard(shard.param).is_contiguous() and not has_inner_tensors(shard.param)
            return not (shard.on_host or shard.layout.left_out) and (fixed or shard.param in plan.streamed)

        shards = {bucket.number: home_of(bucket).shards for bucket in plan.buckets}
        left = {number for number, its in shards.items() if all(map(is_takeable, its))}
        while torn := {n for n in left if any(not left.issuperset(shard.buckets) for shard in shards[n])}:
            left -= torn
        return [bucket for bucket in plan.buckets if bucket.number in left]

    def _ranges(self, bucket: Bucket) -> Iterable[Tensor]:
        """Flat bytes on the device of the parameters in a bucket that stay there."""
        home = home_of(bucket)
        for piece, shard in zip(home.packed.ranges, home.shards, strict=True):
            if shard.param not in self._plan.streamed:
                flat = local_shard(shard.param).detach().view(-1)
                yield flat[piece.start : piece.stop].view(torch.uint8)

    def pairs_of(self, bucket: Bucket) -> Sequence[Copy]:
        addresses = [local_shard(param).data_ptr() for param in bucket.params]
        known, pairs = self._pairs.get(bucket, ([], []))
        if known != addresses:
            assert self._region is not None, "guesses begin when there is memory"
            pairs, at = [], self.begins[bucket]
            for param in self._ranges(bucket):
                pairs += [(self._region.bytes[at : at + param.numel()], param)] if param.numel() else []
                at += aligned(param.numel())
            self._pairs[bucket] = addresses, pairs
        return pairs
